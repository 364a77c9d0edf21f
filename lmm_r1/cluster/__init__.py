"""The Ray cluster that a run joins: what its nodes have, how workers are placed on them, which files they must see."""
