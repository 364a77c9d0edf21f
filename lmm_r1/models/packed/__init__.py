"""Packed sequences: padded batches without their padding, the attention over them, and the check that both are right."""
