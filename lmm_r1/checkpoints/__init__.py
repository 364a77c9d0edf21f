"""Checkpoints of a training run: which are complete, their weights, and the Hugging Face folders made of them."""
