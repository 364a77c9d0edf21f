"""LMM-R1: rule-based reinforcement learning for large multimodal models, text first, then images."""

from lmm_r1 import quiet

quiet.begin()
