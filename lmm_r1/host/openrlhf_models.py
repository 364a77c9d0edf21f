"""Names of OpenRLHF's models, which load DeepSpeed and peft, and what the strategy asks of ours."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from openrlhf.models import Actor as Actor  # base class of the policy, by which OpenRLHF's strategy tells it apart
from openrlhf.models.utils import compute_entropy as compute_entropy
from openrlhf.models.utils import log_probs_from_logits as log_probs_from_logits  # chunked, to save memory
from openrlhf.models.utils import set_z3_leaf_modules as set_z3_leaf_modules  # unused experts would stall ZeRO-3


class HostedModel(ABC):
    """What the strategy asks of a policy or value model (mix-in); models implement it."""

    saves_itself: bool
    """Whether `save` writes it, and not OpenRLHF's strategy."""

    @abstractmethod
    def keeping_buffers(self) -> AbstractContextManager[None]:
        """Raise UserError at the end of the block if a buffer has changed within; DeepSpeed prepares the model there."""

    @abstractmethod
    def vision_weights(self) -> Sequence[torch.nn.Parameter]:
        """Return the weights of the vision tower and its projector, none for a language model."""

    @abstractmethod
    def save(self, folder: str | Path, *, processor: Any, weights: Mapping[str, torch.Tensor]) -> None:
        """Write a checkpoint from the whole weights."""
