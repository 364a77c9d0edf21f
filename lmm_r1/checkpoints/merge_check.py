"""Whether merged weights compute what the model with its adapters does, and how much of a difference is rounding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from PIL import Image
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from lmm_r1.checkpoints.merging import listed, merge_adapter
from lmm_r1.data.messages import ImagePart, Message, TextPart
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits import EncodedPrompt, LmmKit

LIMIT = 1e-5
"""Largest difference of two logits in single precision that needs no explanation."""
EXACT_LIMIT = 1e-9
"""Largest difference in double precision, as a share of the largest logit; in practice it is below 1e-13."""
_DOUBLE_BYTES = 8
_SIDE = 84  # of the drawn image, in pixels
_LOWER = (torch.float32, torch.bfloat16, torch.float16)

Outputs = list[torch.Tensor]
"""Logits (T, V) of each prompt, or values (T, 1) of a critic."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How far two outputs are apart where they are furthest, and their largest absolute value."""

    largest: float
    scale: float

    def within(self, limit: float) -> bool:
        """Say whether the difference is at most `limit`, or that share of the largest value where it is above 1."""
        return self.largest <= limit * max(1.0, self.scale)


@dataclass(frozen=True, kw_only=True, eq=False)
class LoadedWeights:
    """A model, and the value head (1, H) of a critic."""

    model: PreTrainedModel
    head: torch.Tensor | None = None


def prompts_for(kit: LmmKit, processor: Any) -> list[EncodedPrompt]:
    """Return a prompt in words, and where the kit takes images one with an image, too."""
    text = TextPart(text="What is 12 + 34? Think first, and then say what you found.")
    messages: list[tuple[Message, list[Image.Image]]] = [(Message(role="user", parts=(text,)), [])]
    if kit.takes_images:
        image = Image.linear_gradient("L").resize((_SIDE, _SIDE)).convert("RGB")
        question = TextPart(text="What does the picture show?")
        messages.append((Message(role="user", parts=(ImagePart(source=image), question)), [image]))
    return [
        kit.encode(processor, [message], images=images, videos=[], add_generation_prompt=True)
        for message, images in messages
    ]


@torch.no_grad()
def outputs_of(loaded: LoadedWeights, kit: LmmKit, prompts: Sequence[EncodedPrompt]) -> Outputs:
    """Return what the model computes of the prompts, one after the other, in its own precision."""
    model, found = loaded.model, []
    for prompt in prompts:
        sequences = torch.tensor([prompt.token_ids])
        mask = torch.ones_like(sequences)
        media = None if prompt.media is None else kit.merge_media([prompt.media])
        if media is not None:
            media = {
                key: value.to(model.dtype) if value.is_floating_point() else value for key, value in media.items()
            }
        inputs = kit.forward_inputs(model.config, sequences, mask, media)
        inputs |= {"input_ids": sequences, "attention_mask": mask}
        if loaded.head is None:
            found.append(model(**inputs, use_cache=False).logits[0])
        else:
            hidden = kit.backbone_of(model)(**inputs, use_cache=False).last_hidden_state[0]
            found.append(hidden @ loaded.head.to(hidden.dtype).T)
    return found


def difference(one: Outputs, other: Outputs) -> Difference:
    """Return how far two outputs for the same prompts are apart."""
    pairs = list(zip(one, other, strict=True))
    return Difference(
        largest=max(float((a - b).abs().max()) for a, b in pairs),
        scale=max(float(a.abs().max()) for a, _ in pairs),
    )


def judge_merge(
    found: Difference, *, load: Callable[[], LoadedWeights], kit: LmmKit, prompts: Sequence[EncodedPrompt]
) -> str:
    """Return a few words about the difference that merging made in fp32; raises UserError where it is an error.

    Each way of adding up the same numbers rounds differently, and what that comes to grows with the logits and the
    layers. Above the limit the merge is therefore repeated in double precision, where only an error is left; where
    the memory for that is missing, the limit counts as a share of the largest logit.

    Args:
        load: gives the model with its adapters in fp32 once more.
    """
    said = f"largest difference {found.largest:.1e} in fp32, of values up to {found.scale:.1f}"
    if found.largest <= LIMIT:
        return said
    exact = _difference_in_double(load, kit, prompts)
    if exact is None:
        if found.within(LIMIT):
            return f"{said}: rounding by its size; there is not the memory to repeat it in double precision"
        raise UserError(
            f"the merged model is not the adapted one: {said}, and there is not the memory to tell in double precision "
            "whether it is rounding; use a machine with more memory, or --no_check"
        )
    if exact.within(EXACT_LIMIT):
        return f"{said}: all of it rounding, as it is {exact.largest:.1e} in fp64"
    raise UserError(f"the merged model is not the adapted one: {said}, and {exact.largest:.1e} in fp64")


def _difference_in_double(
    load: Callable[[], LoadedWeights], kit: LmmKit, prompts: Sequence[EncodedPrompt]
) -> Difference | None:
    """Return the difference that merging makes in double precision, None where it does not fit into memory."""
    available = psutil.virtual_memory().available
    loaded = load()
    if _DOUBLE_BYTES * loaded.model.num_parameters() > available:
        return None
    in_double(loaded.model)
    with DoublePrecision():
        unmerged = outputs_of(loaded, kit, prompts)
    merge_adapter(loaded.model)
    with DoublePrecision():
        return difference(outputs_of(loaded, kit, prompts), unmerged)


def in_double(model: PreTrainedModel) -> None:
    """Cast a model to double precision, and let it compute its experts such that they take that: one after the other."""
    model.set_experts_implementation("eager")
    model.double()


def check_written(
    folder: Path, loaded: LoadedWeights, *, again: LoadedWeights, kit: LmmKit, prompts: Sequence[EncodedPrompt]
) -> Outputs:
    """Return what a written folder computes; raises UserError unless it is what the model in memory computes.

    Args:
        loaded: the model as it was written, which is left in fp32.
        again: what was loaded from the folder, in fp32.
    """
    loaded.model.float()
    own, stored = loaded.model.state_dict(), again.model.state_dict()
    changed = [name for name in own if name not in stored or not torch.equal(own[name], stored[name])]
    if changed or len(own) != len(stored):
        raise UserError(f"{folder}: loaded again, other weights than were written come back ({listed(changed)})")
    expected, found = outputs_of(loaded, kit, prompts), outputs_of(again, kit, prompts)
    apart = difference(expected, found)
    if not apart.within(LIMIT):
        raise UserError(
            f"{folder}: loaded again, the same weights compute other outputs, by up to {apart.largest:.1e}; "
            "the config of the base model is not kept by transformers"
        )
    return found


class DoublePrecision(TorchDispatchMode):
    """While it is entered, whatever asks for a lower floating-point precision gets fp64.

    Models of transformers cast norms, softmax and rotary angles to fp32 even where their weights are fp64. The model
    must be loaded before, and cast with `in_double`, buffers included.
    """

    def __torch_dispatch__(
        self, func: Callable, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") in _LOWER:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)
