"""The start and the end of a run, shared by all trainers: checks, stops, the final model."""
