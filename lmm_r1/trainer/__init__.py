"""Reinforcement learning and supervised training on OpenRLHF's parts."""
