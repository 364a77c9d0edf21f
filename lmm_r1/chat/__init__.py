"""A conversation with a checkpoint in a terminal, or line by line through a pipe."""
