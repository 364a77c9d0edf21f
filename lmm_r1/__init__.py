"""LMM-R1: rule-based reinforcement learning for large multimodal models, text first, then images."""

import warnings

# OpenRLHF requires the shim `pynvml`, at which torch warns in every process that imports it.
warnings.filterwarnings("ignore", message="The pynvml package is deprecated", category=FutureWarning)
