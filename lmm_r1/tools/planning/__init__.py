"""Predict the memory of a run from its settings, before anything is loaded."""
