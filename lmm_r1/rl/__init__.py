"""Reinforcement learning: the step, the run around it, and the workers that hold the models."""
