"""What a run will need of a machine's memory, told from its settings before anything is loaded."""
