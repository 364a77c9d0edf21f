"""The stages of `gpu_check.py`: what each measures, and the record of it that survives a failure and a kill."""
