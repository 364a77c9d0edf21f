"""Names of OpenRLHF and DeepSpeed that models and weight updates use, and what the strategy asks of our models."""

from __future__ import annotations

import argparse
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed import DeepSpeedEngine as DeepSpeedEngine
from deepspeed.module_inject.layers import GatherReplacedLayerParams
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero import GatheredParameters as GatheredParameters  # whole weights of ZeRO-3
from deepspeed.runtime.zero import Init as Init  # splits the weights of modules that are made within
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.runtime.zero.partition_parameters import DeepSpeedTensorOverride
from deepspeed.utils import set_z3_leaf_modules as set_whole_modules
from deepspeed.utils.tensor_fragment import fragment_address
from deepspeed.utils.zero_to_fp32 import (
    get_fp32_state_dict_from_zero_checkpoint as get_fp32_state_dict_from_zero_checkpoint,
)
from openrlhf.models import Actor as Actor  # base class of the policy, by which OpenRLHF's strategy recognizes it
from openrlhf.models.utils import compute_entropy as compute_entropy
from openrlhf.models.utils import log_probs_from_logits as log_probs_from_logits  # chunked, to save memory
from openrlhf.models.utils import set_z3_leaf_modules as set_z3_leaf_modules  # unused experts would stall ZeRO-3
from transformers.integrations.deepspeed import HfDeepSpeedConfig as HfDeepSpeedConfig  # loads straight into shards

_FORCED = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
# What a ZeRO checkpoint holds next to tensors and plain values.
_OBJECTS = (ZeroStageEnum, LossScaler, DynamicLossScaler, fragment_address, argparse.Namespace)


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
    def settle_ends(self, processor: Any) -> None:
        """Let the saved model end its responses where training has ended them."""

    @abstractmethod
    def save(self, folder: str | Path, *, processor: Any, weights: Mapping[str, torch.Tensor]) -> None:
        """Write a checkpoint from the whole weights."""


class _WeightsOnlyInit(Init):
    """DeepSpeed's context, which shards weights as they are made; the precision of nothing else is changed."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        # Buffers are still made on the device: DeepSpeed does not move those of a model that is loaded in shards.
        super().__init__(*args, **settings, tensor_overrides=[DeepSpeedTensorOverride.device])

    def _post_init_method(self, module: torch.nn.Module) -> None:
        for weight in module.parameters(recurse=False):
            # A shard has its precision already.
            if weight.is_floating_point() and not hasattr(weight, "ds_id"):
                weight.data = weight.data.to(self.dtype)
        super()._post_init_method(module)


@contextmanager
def weights_alone_cast() -> Iterator[None]:
    """Let transformers load models into ZeRO-3 shards without changing the precision of their buffers.

    Under `deepspeed.zero.Init` DeepSpeed 0.19.6 rounds what `torch.arange`, `torch.tensor` and the like make to the
    training's precision.
    """
    original = deepspeed.zero.Init
    deepspeed.zero.Init = _WeightsOnlyInit  # where transformers looks it up
    try:
        yield
    finally:
        deepspeed.zero.Init = original


@contextmanager
def only_known_objects() -> Iterator[None]:
    """Let `torch.load` refuse, by pickle.UnpicklingError, what no ZeRO checkpoint holds, in this block and process.

    DeepSpeed asks it to load everything, and PyTorch's environment variable overrides that.
    """
    before = os.environ.get(_FORCED)
    os.environ[_FORCED] = "1"
    try:
        with torch.serialization.safe_globals(list(_OBJECTS)):
            yield
    finally:
        if before is None:
            del os.environ[_FORCED]
        else:
            os.environ[_FORCED] = before


def set_leaf_classes(model: torch.nn.Module, classes: Sequence[str]) -> None:
    """Let ZeRO-3 gather modules of these classes as a whole, whichever of their parts a pass reaches."""
    set_whole_modules(model, list(classes))


@contextmanager
def whole_weights(weights: Sequence[torch.nn.Parameter], *, model: torch.nn.Module, split: bool) -> Iterator[None]:
    """Give all ranks these weights as a whole; ZeRO-3 or tensor parallelism splits them.

    Args:
        split: whether tensor parallelism splits them.
    """
    with ExitStack() as stack:
        if split:
            for weight in weights:
                stack.enter_context(GatherReplacedLayerParams([weight], model))
        else:
            stack.enter_context(GatheredParameters(list(weights)))
        yield


def whole_state_dict(engine: Any) -> dict[str, torch.Tensor] | None:
    """Return all weights of a DeepSpeed engine's model; None on other ranks than 0 if ZeRO-3 holds shards of them.

    Every rank must call it.
    """
    if engine.zero_optimization_stage() == 3:
        return engine._consolidated_16bit_state_dict()
    return engine.module.state_dict()
