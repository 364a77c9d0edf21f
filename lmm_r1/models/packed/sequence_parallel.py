"""Sequence parallelism: each rank of a group computes its share of a packed sequence, and all get every result.

All ranks embed the whole sequence and its images; then the language model's inputs are cut to the share. Within
attention the ranks exchange tokens for heads (DeepSpeed-Ulysses, https://arxiv.org/abs/2309.14509), so that the layout
holds as it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.nn.functional import all_reduce
from torch.utils.hooks import RemovableHandle
from transformers import PretrainedConfig, PreTrainedModel

from lmm_r1.errors import UserError
from lmm_r1.host.models import DeepSpeedEngine
from lmm_r1.lmm_kits import LmmKit
from lmm_r1.lmm_kits.delta_rule import linear_layers
from lmm_r1.models.packed.attention import packed_as, packing_refusal
from lmm_r1.models.packed.packing import PackedSequence


@dataclass(frozen=True, kw_only=True)
class SequenceShare:
    """The tokens of a packed sequence that this process computes, and the targets predicted from them."""

    sequence: PackedSequence
    group: dist.ProcessGroup | None
    """The ranks that share the sequence; None where this process computes all of it."""
    tokens: slice
    sources: torch.Tensor
    """Tokens within the share from which a target is predicted, (k,); the first one where no target is in the share."""
    target_ids: torch.Tensor  # (k,)
    places: torch.Tensor
    """Which of the sequence's K targets these are, (k,); empty where no target is in the share."""

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Return what was computed for all K targets, on every rank, from the share's values (k,).

        Gradients are summed over the group, of which each rank has the same loss: those of a weight add up to N times
        the loss's, which is what is left after they have been averaged over data-parallel and sequence-parallel ranks.
        """
        if self.group is None:
            return values
        whole = values.new_zeros(len(self.sequence.sources)).index_put((self.places,), values[: len(self.places)])
        return all_reduce(whole, group=self.group)


def group_size(group: dist.ProcessGroup | None) -> int:
    """Return over how many ranks a sequence is split; 1 without a group."""
    return 1 if group is None else dist.get_world_size(group)


def share_of(sequence: PackedSequence, *, group: dist.ProcessGroup | None) -> SequenceShare:
    """Return this process's share of a packed sequence whose length the group's ranks divide."""
    length = sequence.layout.length
    if group is None:
        places = torch.arange(len(sequence.sources), device=sequence.sources.device)
        return SequenceShare(
            sequence=sequence,
            group=None,
            tokens=slice(0, length),
            sources=sequence.sources,
            target_ids=sequence.target_ids,
            places=places,
        )
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    assert length % size == 0, "pack_batch fills it up"
    start, end = rank * length // size, (rank + 1) * length // size
    places = ((sequence.sources >= start) & (sequence.sources < end)).nonzero().flatten()
    sources, target_ids = sequence.sources[places] - start, sequence.target_ids[places]
    if not len(places):
        # Every rank runs the output layer, whose sharded weights they gather together.
        sources, target_ids = sequence.sources.new_zeros(1), sequence.target_ids.new_zeros(1)
    return SequenceShare(
        sequence=sequence, group=group, tokens=slice(start, end), sources=sources, target_ids=target_ids, places=places
    )


@contextmanager
def running(share: SequenceShare, *, model: torch.nn.Module, kit: LmmKit) -> Iterator[None]:
    """Let a model, or its backbone, take the whole sequence's inputs and compute this process's share of its tokens.

    Args:
        model: the causal model of which the kit knows the language model, or DeepSpeed's engine around it.
    """
    with ExitStack() as stack:
        stack.enter_context(packed_as(share.sequence.layout, group=share.group))
        if share.group is not None:
            stack.callback(_cut_inputs(kit.language_model_of(bare(model)), kit, share).remove)
        yield


def check_heads(config: PretrainedConfig, *, size: int, model: str) -> None:
    """Raise UserError where the ranks do not divide a model's attention heads, or a layer's state follows the tokens.

    Args:
        model: the flag and the path, for the message.
    """
    if size > 1 and linear_layers(config.get_text_config()):
        raise UserError(
            f"--ds.ulysses_size {size}: {model} has linear attention layers, whose state passes from token to token; "
            "GPUs cannot share its sequences: leave the flag out"
        )
    heads = config.get_text_config().num_attention_heads
    if heads % size:
        divisors = ", ".join(str(divisor) for divisor in range(1, heads + 1) if heads % divisor == 0)
        raise UserError(
            f"--ds.ulysses_size {size}: {model} has {heads} attention heads, which {size} GPUs cannot share equally; "
            f"take one of {divisors}"
        )


def check_not_shared(model: torch.nn.Module, *, group: dist.ProcessGroup | None) -> None:
    """Raise UserError where ranks should share the sequences of a model that runs on padded batches."""
    if group is not None:
        why = packing_refusal(bare(model)) or "the samples are not packed"
        raise UserError(f"--ds.ulysses_size {group_size(group)} splits packed sequences only: {why}; leave it out")


def bare(model: torch.nn.Module) -> PreTrainedModel:
    """Return the model inside of DeepSpeed's engine."""
    return model.module if isinstance(model, DeepSpeedEngine) else model


def _cut_inputs(language_model: torch.nn.Module, kit: LmmKit, share: SequenceShare) -> RemovableHandle:
    def cut(module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        named = {**inspect.signature(module.forward).bind_partial(*args).arguments, **kwargs}
        return (), kit.cut_inputs(module, named, share.tokens)

    return language_model.register_forward_pre_hook(cut, with_kwargs=True)
