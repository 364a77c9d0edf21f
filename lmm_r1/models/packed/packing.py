"""Padded batches to packed sequences: no padding, what samples begin with once; results go back to their places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from transformers import PretrainedConfig

from lmm_r1.data.sample import PlacedMedia, SampleMedia, TreeSample, placed, prefix_tree
from lmm_r1.lmm_kits import LmmKit, Media
from lmm_r1.models.packed.layout import PackedLayout, PackedSegment


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """Which samples of a batch continue the same prompt, by their rows."""

    groups: Sequence[int]
    """Samples with the same number share the prompt's tokens and media."""
    lengths: Sequence[int]
    """Tokens of the prompt."""


@dataclass(frozen=True, kw_only=True)
class Targets:
    """The tokens of a batch from which something is wanted: column c predicts column c + 1, or has a value of its own."""

    wanted: torch.Tensor
    """(B, T - 1), bool; (B, T) where values are wanted, which a last token has as well."""
    prompts: Prompts | None = None
    """None where no samples share a prompt."""


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
    """Row and column in the padded batch's predictions (B, T - 1), (P,) each: a target of several samples has several."""
    filled: bool
    """Whether its last segment is an image that only keeps the vision tower running."""
    filler: int
    """How many tokens at its end belong to no sample."""
    copies: torch.Tensor | None = None
    """Which of the K targets each place is about, (P,); None where each has one place, in their order."""

    def scatter(self, values: torch.Tensor, *, like: torch.Tensor) -> torch.Tensor:
        """Return values (K,) at their places in zeros of the shape of `like` (B, T - 1)."""
        if self.copies is not None:
            # Its gradients are summed in one order, unlike those of `index_select` on GPUs.
            values = values[self.copies]
        return values.new_zeros(like.shape).index_put(self.places, values)


@dataclass(frozen=True, kw_only=True)
class _Sample:
    """One row of the batch without its padding."""

    row: int
    columns: torch.Tensor
    """Columns of its tokens in the batch, (L,)."""
    token_ids: torch.Tensor  # (L,)
    prompt_length: int
    media: tuple[PlacedMedia, ...]

    @property
    def has_later_media(self) -> bool:
        """Whether media stand behind its prompt."""
        return any(item.start >= self.prompt_length for item in self.media)


def pack_batch(
    kit: LmmKit,
    config: PretrainedConfig,
    *,
    sequences: torch.Tensor,
    attention_mask: torch.Tensor,
    targets: Targets,
    media: Sequence[SampleMedia],
    share_prefix: bool,
    fill: bool,
    multiple_of: int = 1,
) -> PackedSequence:
    """Return a padded batch (B, T) as one packed sequence.

    Samples of one prompt make a tree where `share_prefix` is set: what some of them begin with is there once, with its
    media.

    Args:
        media: one entry per row of the batch.
        fill: append the smallest legal image where there is none, so that the vision tower runs on every rank.
        multiple_of: append tokens of no meaning until this divides their number.
    """
    samples = _samples(sequences.cpu(), attention_mask.cpu(), targets, media)
    parts = _Parts(kit=kit, config=config)
    for group in _groups(samples, targets.prompts if share_prefix else None):
        parts.add_group(group, targets.wanted.cpu())
    real = parts.length
    image = kit.filler_media(config) if fill and not parts.media else None
    if image is not None:
        image_ids, filler = image
        parts.add_segment(torch.tensor(image_ids))
        parts.media.append(filler)
        parts.inputs.append(parts.inputs_of(torch.tensor(image_ids), [filler]))
    missing = -parts.length % multiple_of
    if missing:
        # A chat's first token is no placeholder of an image.
        ids = parts.token_ids[0][:1].repeat(missing)
        parts.add_segment(ids)
        parts.inputs.append(parts.inputs_of(ids, []))
    return parts.packed(filled=image is not None, filler=parts.length - real, device=sequences.device)


def _samples(
    sequences: torch.Tensor, attention_mask: torch.Tensor, targets: Targets, media: Sequence[SampleMedia]
) -> list[_Sample]:
    samples = []
    for row, (ids, mask) in enumerate(zip(sequences, attention_mask, strict=True)):
        columns = mask.nonzero().flatten()
        samples.append(
            _Sample(
                row=row,
                columns=columns,
                token_ids=ids[columns],
                prompt_length=len(columns) if targets.prompts is None else targets.prompts.lengths[row],
                media=placed(media[row]) if media else (),
            )
        )
    return samples


def _groups(samples: Sequence[_Sample], prompts: Prompts | None) -> list[list[_Sample]]:
    """Return samples by their prompt, in the order in which these come first; each by itself without prompts."""
    groups: dict[int, list[_Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.row if prompts is None else prompts.groups[sample.row], []).append(sample)
    return list(groups.values())


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

    def add_group(self, group: Sequence[_Sample], wanted: torch.Tensor) -> None:
        """Add the samples of one prompt as a tree, its nodes in pre-order; a sample by itself is one segment."""
        tree = prefix_tree(
            [TreeSample(token_ids=sample.token_ids.numpy(), media=sample.media) for sample in group],
            known=group[0].prompt_length,
        )
        first = len(self.segments)
        inputs = self._inputs_by_row(group)
        tokens: list[list[torch.Tensor]] = [[] for _ in group]
        for node in tree:
            start, owner = self.length, group[node.samples[0]]
            prefix = None if node.parent is None else first + node.parent
            self.add_segment(owner.token_ids[node.start : node.end], prefix=prefix)
            self.media += [item.tensors for item in owner.media if node.start <= item.start < node.end]
            self.inputs.append(_cut(inputs[owner.row], node.start, node.end))
            for member in node.samples:
                tokens[member].append(torch.arange(start, self.length))
        for sample, own in zip(group, tokens, strict=True):
            self.add_targets(sample, wanted, tokens=torch.cat([torch.arange(0), *own]))

    def add_segment(self, token_ids: torch.Tensor, *, prefix: int | None = None) -> None:
        self.segments.append(PackedSegment(start=self.length, end=self.length + len(token_ids), prefix=prefix))
        self.token_ids.append(token_ids)

    def _inputs_by_row(self, group: Sequence[_Sample]) -> dict[int, dict[str, torch.Tensor]]:
        """Return what the model gets for each token of samples of one prompt, and maybe for more, by their rows."""
        # Without media in them, all responses go on from the prompt alike: one as long as the longest serves all.
        plain = [sample for sample in group if not sample.has_later_media]
        in_common = self.inputs_of_sample(max(plain, key=lambda sample: len(sample.token_ids))) if plain else {}
        return {sample.row: self.inputs_of_sample(sample) if sample.has_later_media else in_common for sample in group}

    def inputs_of_sample(self, sample: _Sample) -> dict[str, torch.Tensor]:
        return self.inputs_of(sample.token_ids, [item.tensors for item in sample.media])

    def inputs_of(self, token_ids: torch.Tensor, media: Sequence[Media]) -> dict[str, torch.Tensor]:
        """Return what the model gets for each of a sample's tokens: positions, and token types where there are media."""
        mask = torch.ones(1, len(token_ids), dtype=torch.long)
        merged = self.kit.merge_media([_without_pixels(item) for item in media]) if media else None
        inputs = self.kit.forward_inputs(self.config, token_ids[None], mask, merged)
        names = set() if merged is None else merged.keys() & inputs.keys()
        self.media_names |= names
        return {name: value for name, value in inputs.items() if name not in names}

    def add_targets(self, sample: _Sample, wanted: torch.Tensor, *, tokens: torch.Tensor) -> None:
        """Add the targets of a sample, whose tokens (L,) are where `tokens` says."""
        before = wanted[sample.row, sample.columns[sample.columns < wanted.shape[1]]].nonzero().flatten()
        columns = sample.columns[before]
        self.sources.append(tokens[before])
        # Behind a sample's last token there is none to be predicted: its first stands here.
        self.target_ids.append(sample.token_ids.roll(-1)[before])
        self.places.append((torch.full_like(columns, sample.row), columns))

    def packed(self, *, filled: bool, filler: int, device: torch.device) -> PackedSequence:
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


def _cut(inputs: dict[str, torch.Tensor], start: int, end: int) -> dict[str, torch.Tensor]:
    """Return what the model gets for some tokens of a sample."""
    return {name: value[..., start:end] for name, value in inputs.items()}


def _without_pixels(media: Media) -> Media:
    """Return media as positions are made of them, sizes and grids: pixels have a shape but take no memory."""
    return {
        name: value.to("meta") if value.is_floating_point() and value.dim() > 1 else value
        for name, value in media.items()
    }


@dataclass(frozen=True, kw_only=True)
class BatchInputs:
    """Turns batches (B, T), with one entry of media per row, into arguments of the model's forward."""

    kit: LmmKit
    config: PretrainedConfig
    dtype: torch.dtype
    """Of pixel values; grids and sizes stay integers."""

    @classmethod
    def of(cls, model: torch.nn.Module, *, kit: LmmKit, config: PretrainedConfig) -> BatchInputs:
        """Return the inputs of a model whose weights are of one dtype; an engine's config is not always the model's."""
        return cls(kit=kit, config=config, dtype=next(model.parameters()).dtype)

    def padded(
        self, sequences: torch.Tensor, attention_mask: torch.Tensor, media: Sequence[SampleMedia]
    ) -> dict[str, torch.Tensor]:
        """Return all arguments for the batch, which may have a row more than given; see `_with_filler_row`."""
        given = [item.tensors for row in media for item in placed(row)]
        if not given and self._needs_filler():
            sequences, attention_mask, given = self._with_filler_row(sequences, attention_mask)
        merged = None
        if given:
            merged = {key: value.to(sequences.device) for key, value in self.kit.merge_media(given).items()}
        inputs = self.kit.forward_inputs(self.config, sequences, attention_mask, merged)
        return {**self._arguments(sequences, inputs), "attention_mask": attention_mask}

    def packed(
        self,
        sequences: torch.Tensor,
        attention_mask: torch.Tensor,
        media: Sequence[SampleMedia],
        *,
        targets: Targets,
        share_prefix: bool,
        multiple_of: int = 1,
    ) -> tuple[PackedSequence, dict[str, torch.Tensor | None]]:
        """Return the batch as a packed sequence, whose length `multiple_of` divides, and all arguments for it."""
        packed = pack_batch(
            self.kit,
            self.config,
            sequences=sequences,
            attention_mask=attention_mask,
            targets=targets,
            media=media,
            share_prefix=share_prefix,
            fill=self._needs_filler(),
            multiple_of=multiple_of,
        )
        # The layout stands in the mask's place.
        return packed, {**self._arguments(packed.token_ids, packed.inputs), "attention_mask": None}

    def _arguments(self, token_ids: torch.Tensor, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return all arguments but the mask."""
        return self.kit.in_one_tower_run(self.config, {"input_ids": token_ids, **self._in_dtype(inputs)})

    def _needs_filler(self) -> bool:
        """Whether the vision tower must run without images: ranks wait for one another, and gradients must be new.

        To a weight without a gradient in one of several passes, DeepSpeed 0.19.6 gives that of an earlier step
        (ZeRO-3, and ZeRO-2 with `--ds.adam_offload`).
        """
        if not self.kit.takes_images or not dist.is_initialized():
            return False
        return dist.get_world_size() > 1 or torch.is_grad_enabled()

    def _in_dtype(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {key: value.to(self.dtype) if value.is_floating_point() else value for key, value in inputs.items()}

    def _with_filler_row(
        self, sequences: torch.Tensor, attention_mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, list[Media]]:
        """Add a row that holds the smallest legal image, whose output is dropped.

        All ranks must run the vision tower in a step, or ZeRO's collectives wait for one another forever. The row
        takes no part in the loss, so its gradients are exactly zero.
        """
        filler = self.kit.filler_media(self.config)
        assert filler is not None, f"the kit {self.kit.model_type} takes images and has no filler"
        ids, media = filler
        width = max(sequences.shape[1], len(ids))
        padded = sequences.new_zeros(len(sequences) + 1, width)
        mask = attention_mask.new_zeros(len(sequences) + 1, width)
        padded[:-1, : sequences.shape[1]] = sequences
        mask[:-1, : sequences.shape[1]] = attention_mask
        padded[-1, : len(ids)] = sequences.new_tensor(ids)
        mask[-1, : len(ids)] = 1
        return padded, mask, [media]
