"""Names of weights that vLLM's models do not know, for the classes of kits that vLLM runs."""

from __future__ import annotations

import re

from vllm.model_executor.models.utils import WeightsMapper

# Transformers 5 names the vision tower's parameters without the "vision_model." of the released checkpoints.
_NEW_NAME = re.compile(r"^(model\.)?vision_tower\.(?!vision_model\.)")
NEW_TOWER_NAMES = WeightsMapper(orig_to_new_regex={_NEW_NAME: "vision_tower.vision_model."})
"""For models with a SigLIP tower: names of either layout to those that vLLM reads."""
