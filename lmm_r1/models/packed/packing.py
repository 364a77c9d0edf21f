"""Samples to packed sequences: no padding, what samples begin with once; results go back to their places."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.utils.rnn import pad_sequence
from transformers import PretrainedConfig

from lmm_r1.data.sample import PlacedMedia, SampleMedia, TreeSample, placed, prefix_tree
from lmm_r1.lmm_kits import LmmKit, Media
from lmm_r1.models.packed.layout import PackedLayout, PackedSegment

SampleT = TypeVar("SampleT")


@dataclass(kw_only=True, eq=False)
class ModelSample:
    """A sample of L tokens, without padding, as a model takes it."""

    token_ids: torch.Tensor
    """(L,)."""
    loss_mask: torch.Tensor
    """(L - 1,), bool: of which of the tokens after the first a number is wanted."""
    media: SampleMedia = None
    group: int | None = None
    """Samples of a batch with the same number share the prompt's tokens and media; None for a sample by itself."""
    prompt_tokens: int = 0
    """How many of its first tokens are the prompt's, if it has a group."""

    @classmethod
    def whole(cls, token_ids: Sequence[int], media: SampleMedia = None) -> ModelSample:
        """Return a sample by itself, whose tokens are all wanted."""
        return cls(
            token_ids=torch.tensor(token_ids),
            loss_mask=torch.ones(len(token_ids) - 1, dtype=torch.bool),
            media=media,
        )

    @property
    def last(self) -> torch.Tensor:
        """(L,), bool: only the last token."""
        return torch.arange(len(self.token_ids)) == len(self.token_ids) - 1


def stacked(samples: Sequence[SampleT], part: Callable[[SampleT], torch.Tensor]) -> torch.Tensor:
    """Return a tensor of each sample in one, (B, longest), with zeros after the shorter ones."""
    return pad_sequence([part(sample) for sample in samples], batch_first=True)


@dataclass(frozen=True, kw_only=True)
class PackedSequence:
    """Several samples as one sequence of T tokens, and where what is computed for K of them belongs."""

    token_ids: torch.Tensor  # (1, T)
    inputs: dict[str, torch.Tensor]
    """Keyword arguments of the model's forward beside ids: positions, token types, media."""
    layout: PackedLayout
    sources: torch.Tensor
    """Tokens from which a target is predicted, (K,)."""
    target_ids: torch.Tensor  # (K,)
    places: tuple[torch.Tensor, torch.Tensor]
    """Sample and token from which each target is predicted, (P,) each: a target of several samples has several."""
    shape: tuple[int, int]
    """(B, A), of the results."""
    filled: bool
    """Whether its last segment is an image that only keeps the vision tower running."""
    filler: int
    """How many tokens at its end belong to no sample."""
    copies: torch.Tensor | None = None
    """Which of the K targets each place is about, (P,); None where each has one place, in their order."""

    def scatter(self, values: torch.Tensor) -> torch.Tensor:
        """Return values (K,) at their places in zeros (B, A)."""
        if self.copies is not None:
            # Its gradients are summed in one order, unlike those of `index_select` on GPUs.
            values = values[self.copies]
        return values.new_zeros(self.shape).index_put(self.places, values)


def pack_batch(
    kit: LmmKit,
    config: PretrainedConfig,
    samples: Sequence[ModelSample],
    *,
    wanted: torch.Tensor,
    share_prefix: bool,
    fill: bool,
    multiple_of: int = 1,
    device: torch.device | None = None,
) -> PackedSequence:
    """Return samples as one packed sequence.

    Samples of a group make a tree where `share_prefix` is set: what some of them begin with is there once, with its
    media.

    Args:
        wanted: (B, A), bool: the tokens from which a number is wanted. That of token c is about token c + 1.
        fill: append the smallest legal image where there is none, so that the vision tower runs on every rank.
        multiple_of: append tokens of no meaning until this divides their number.
    """
    parts = _Parts(kit=kit, config=config)
    groups: dict[int, list[int]] = {}
    for row, sample in enumerate(samples):
        shares = share_prefix and sample.group is not None
        groups.setdefault(sample.group if shares else -1 - row, []).append(row)  # type: ignore[arg-type]
    for rows in groups.values():
        parts.add_group({row: samples[row] for row in rows}, wanted)
    real = parts.length
    filled = fill and not parts.media
    if filled:
        ids, media = _filler(kit, config)
        parts.add_segment(ids)
        parts.media.append(media)
        parts.inputs.append(parts.inputs_of(ids, [media]))
    missing = -parts.length % multiple_of
    if missing:
        # A chat's first token is no placeholder of an image.
        ids = parts.token_ids[0][:1].repeat(missing)
        parts.add_segment(ids)
        parts.inputs.append(parts.inputs_of(ids, []))
    return parts.packed(
        shape=(wanted.shape[0], wanted.shape[1]), filled=filled, filler=parts.length - real, device=device
    )


def _filler(kit: LmmKit, config: PretrainedConfig) -> tuple[torch.Tensor, Media]:
    """Return ids (L,) and media of the smallest legal image."""
    filler = kit.filler_media(config)
    assert filler is not None, f"the kit {kit.model_type} takes images and has no filler"
    ids, media = filler
    return torch.tensor(ids), media


class _Parts:
    """Collects what a packed sequence is made of, group by group."""

    def __init__(self, *, kit: LmmKit, config: PretrainedConfig) -> None:
        self.kit = kit
        self.config = config
        self.token_ids: list[torch.Tensor] = []
        self.segments: list[PackedSegment] = []
        self.inputs: list[dict[str, torch.Tensor]] = []
        self.media: list[Media] = []
        self.media_names: set[str] = set()
        self.sources: list[torch.Tensor] = []
        self.places: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.target_ids: list[torch.Tensor] = []

    @property
    def length(self) -> int:
        return self.segments[-1].end if self.segments else 0

    def add_group(self, group: Mapping[int, ModelSample], wanted: torch.Tensor) -> None:
        """Add the samples of one prompt, by their rows, as a tree, its nodes in pre-order; one sample is one segment."""
        members = list(group.values())
        media = [placed(sample.media) for sample in members]
        tree = prefix_tree(
            [
                TreeSample(token_ids=sample.token_ids.numpy(), media=items)
                for sample, items in zip(members, media, strict=True)
            ],
            known=members[0].prompt_tokens,
        )
        first = len(self.segments)
        inputs = self._inputs_of_group(members, media)
        tokens: list[list[torch.Tensor]] = [[] for _ in members]
        for node in tree:
            start, owner = self.length, node.samples[0]
            prefix = None if node.parent is None else first + node.parent
            self.add_segment(members[owner].token_ids[node.start : node.end], prefix=prefix)
            self.media += [item.tensors for item in media[owner] if node.start <= item.start < node.end]
            self.inputs.append({name: value[..., node.start : node.end] for name, value in inputs[owner].items()})
            for member in node.samples:
                tokens[member].append(torch.arange(start, self.length))
        for (row, sample), own in zip(group.items(), tokens, strict=True):
            columns = wanted[row].nonzero().flatten()
            self.sources.append(torch.cat(own)[columns])
            # The last token predicts none; the first token fills its place.
            self.target_ids.append(sample.token_ids.roll(-1)[columns])
            self.places.append((torch.full_like(columns, row), columns))

    def add_segment(self, token_ids: torch.Tensor, *, prefix: int | None = None) -> None:
        self.segments.append(PackedSegment(start=self.length, end=self.length + len(token_ids), prefix=prefix))
        self.token_ids.append(token_ids)

    def _inputs_of_group(
        self, members: Sequence[ModelSample], media: Sequence[Sequence[PlacedMedia]]
    ) -> list[dict[str, torch.Tensor]]:
        """Return what the model gets for each token of samples of one prompt, and maybe for more."""
        # Without media in them, all responses go on from the prompt alike: one as long as the longest serves all.
        plain = [
            row
            for row, (sample, items) in enumerate(zip(members, media, strict=True))
            if all(item.start < sample.prompt_tokens for item in items)
        ]
        longest = max(plain, key=lambda row: len(members[row].token_ids), default=-1)
        made = {
            row: self.inputs_of(members[row].token_ids, [item.tensors for item in media[row]])
            for row in range(len(members))
            if row == longest or row not in plain
        }
        return [made[longest if row in plain else row] for row in range(len(members))]

    def inputs_of(self, token_ids: torch.Tensor, media: Sequence[Media]) -> dict[str, torch.Tensor]:
        """Return what the model gets for each of a sample's tokens: positions, and token types where there are media."""
        mask = torch.ones(1, len(token_ids), dtype=torch.long)
        merged = self.kit.merge_media([_without_pixels(item) for item in media]) if media else None
        inputs = self.kit.forward_inputs(self.config, token_ids[None], mask, merged)
        names = set() if merged is None else merged.keys() & inputs.keys()
        self.media_names |= names
        return {name: value for name, value in inputs.items() if name not in names}

    def packed(
        self, *, shape: tuple[int, int], filled: bool, filler: int, device: torch.device | None
    ) -> PackedSequence:
        token_ids = torch.cat(self.token_ids)
        layout = PackedLayout(
            segments=tuple(self.segments),
            block_ids=self._block_ids(token_ids),
            blocks_within_window=self.kit.bidirectional_within_window,
        )
        inputs = {name: self._joined(name) for name in dict.fromkeys(name for part in self.inputs for name in part)}
        if self.media:
            media = self.kit.merge_media(self.media)
            inputs |= {name: media[name] for name in self.media_names}
        sources, target_ids = torch.cat(self.sources), torch.cat(self.target_ids)
        first, copies = _distinct(sources, target_ids)
        rows, columns = zip(*self.places, strict=True)
        return PackedSequence(
            token_ids=token_ids[None].to(device),
            inputs={name: value.to(device) for name, value in inputs.items()},
            layout=layout,
            sources=sources[first].to(device),
            target_ids=target_ids[first].to(device),
            places=(torch.cat(rows).to(device), torch.cat(columns).to(device)),
            shape=shape,
            filled=filled,
            filler=filler,
            copies=None if copies is None else copies.to(device),
        )

    def _joined(self, name: str) -> torch.Tensor:
        """Return what the model gets for each token; token types are missing where there are no media: all is text."""
        example = next(part[name] for part in self.inputs if name in part)
        lengths = [part["position_ids"].shape[-1] for part in self.inputs]
        values = [
            part[name] if name in part else example.new_zeros(*example.shape[:-1], length)
            for part, length in zip(self.inputs, lengths, strict=True)
        ]
        return torch.cat(values, dim=-1)

    def _block_ids(self, token_ids: torch.Tensor) -> torch.Tensor | None:
        """Return the number of the bidirectional run that each token is in, (T,), -1 where it is in none."""
        kinds = self.kit.bidirectional_token_ids(self.config)
        inside = torch.isin(token_ids, torch.tensor(sorted(kinds), dtype=token_ids.dtype))
        if not inside.any():
            return None
        begins = inside.clone()
        begins[1:] &= ~inside[:-1]
        begins[[segment.start for segment in self.segments]] = inside[[segment.start for segment in self.segments]]
        return torch.where(inside, begins.cumsum(0) - 1, -1)


def _distinct(sources: torch.Tensor, target_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return which of P targets are no repetitions, (K,), and which of these each one is, (P,); None where none repeats."""
    pairs = sources.numpy() * 2**32 + target_ids.numpy()
    _, first, copies = np.unique(pairs, return_index=True, return_inverse=True)
    if len(first) == len(sources):
        return torch.arange(len(sources)), None
    order = first.argsort()
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    return torch.from_numpy(first[order]), torch.from_numpy(place[copies])


def _without_pixels(media: Media) -> Media:
    """Return media as positions are made of them, sizes and grids: pixels have a shape but take no memory."""
    return {
        name: value.to("meta") if value.is_floating_point() and value.dim() > 1 else value
        for name, value in media.items()
    }


@dataclass(frozen=True, kw_only=True)
class BatchInputs:
    """Turns samples into arguments of the model's forward."""

    kit: LmmKit
    config: PretrainedConfig
    dtype: torch.dtype
    """Of pixel values; grids and sizes stay integers."""
    device: torch.device
    """Where the model computes; its weights may be elsewhere."""

    def padded(self, samples: Sequence[ModelSample]) -> dict[str, torch.Tensor]:
        """Return all arguments for samples padded on the right, (B, T) or (B + 1, T): a filler comes last."""
        given = [item.tensors for sample in samples for item in placed(sample.media)]
        if not given and self._needs_filler():
            ids, media = _filler(self.kit, self.config)
            samples, given = [*samples, ModelSample(token_ids=ids, loss_mask=ids[1:].bool())], [media]
        sequences = stacked(samples, lambda sample: sample.token_ids).to(self.device)
        mask = stacked(samples, lambda sample: torch.ones_like(sample.token_ids)).to(self.device)
        merged = None
        if given:
            merged = {key: value.to(self.device) for key, value in self.kit.merge_media(given).items()}
        inputs = self.kit.forward_inputs(self.config, sequences, mask, merged)
        return {**self._arguments(sequences, inputs), "attention_mask": mask}

    def packed(
        self, samples: Sequence[ModelSample], *, wanted: torch.Tensor, share_prefix: bool, multiple_of: int = 1
    ) -> tuple[PackedSequence, dict[str, torch.Tensor | None]]:
        """Return samples as a packed sequence, whose length `multiple_of` divides, and all arguments for it."""
        packed = pack_batch(
            self.kit,
            self.config,
            samples,
            wanted=wanted,
            share_prefix=share_prefix,
            fill=self._needs_filler(),
            multiple_of=multiple_of,
            device=self.device,
        )
        # The layout stands in the mask's place.
        return packed, {**self._arguments(packed.token_ids, packed.inputs), "attention_mask": None}

    def _arguments(self, token_ids: torch.Tensor, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return all arguments but the mask."""
        return self.kit.in_one_tower_run(self.config, {"input_ids": token_ids, **self._in_dtype(inputs)})

    def _needs_filler(self) -> bool:
        """Whether the vision tower must run without images: on all ranks, or ZeRO's collectives wait forever.

        The image's tokens take no part in the loss, so its gradients are exactly zero; but they must be new.

        To a weight without a gradient in one of several passes, DeepSpeed 0.19.6 gives that of an earlier step
        (ZeRO-3, and ZeRO-2 with `--ds.adam_offload`).
        """
        if not self.kit.takes_images or not dist.is_initialized():
            return False
        return dist.get_world_size() > 1 or torch.is_grad_enabled()

    def _in_dtype(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {key: value.to(self.dtype) if value.is_floating_point() else value for key, value in inputs.items()}
