"""Trained models at work: what runs a checkpoint outside of training."""
