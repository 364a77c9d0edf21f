"""Held-out accuracy of checkpoints, and the page that shows what a run did."""
