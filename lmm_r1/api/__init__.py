"""What Python code calls instead of commands; its names are attributes of `lmm_r1`."""
