"""Media and pictures in Ray's object store."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy
import ray
import torch

from lmm_r1.data.images import load_image, within_bounds
from lmm_r1.data.messages import ImagePart, Message
from lmm_r1.data.sample import MediaRef, PlacedMedia, PlacedRef, Said, Sample, SampleMedia, SentMedia
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits import Media

COLOURS = 3
CODES = 256
# Smaller tensors do not save memory by tables.
SMALLEST = 4096
# Values of a channel that are tried before all of them.
SAMPLE = 8192
# Numpy has no bf16, and bits distinguish -0.0 from 0.0.
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredTensor:
    """A tensor in its own type, or in a narrower one that represents its values exactly."""

    bits: numpy.ndarray
    """The values' bits as integers, in the tensor's shape."""
    stored: torch.dtype
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.bits.nbytes

    def expand(self) -> torch.Tensor:
        # The object store's memory is read-only, and tensors must be writable.
        return torch.from_numpy(self.bits.copy()).view(self.stored).to(self.dtype)


@dataclass(frozen=True, kw_only=True, eq=False)
class CodedTensor:
    """A tensor as codes into a table of values per channel."""

    codes: numpy.ndarray
    """(outer, channels, inner), bytes: the tensor's values in order."""
    tables: numpy.ndarray
    """(channels, 256): the values of a channel's codes, as bits."""
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.tables.nbytes

    def expand(self) -> torch.Tensor:
        bits = numpy.empty(self.codes.shape, dtype=self.tables.dtype)
        for channel, table in enumerate(self.tables):
            bits[:, channel] = table[self.codes[:, channel]]
        return torch.from_numpy(bits).view(self.dtype).view(self.shape)


@dataclass(frozen=True, eq=False)
class CompactMedia:
    """The media tensors of one segment, by the names of the model's forward."""

    tensors: Mapping[str, StoredTensor | CodedTensor]

    @property
    def nbytes(self) -> int:
        return sum(item.nbytes for item in self.tensors.values())

    def expand(self) -> Media:
        """Return the original tensors in new memory."""
        return {name: item.expand() for name, item in self.tensors.items()}


def compact(media: Media) -> CompactMedia:
    """Return media tensors in as few bytes as represent them exactly."""
    return CompactMedia({name: compact_tensor(value) for name, value in media.items()})


def compact_tensor(values: torch.Tensor) -> StoredTensor | CodedTensor:
    """Return a tensor as codes, in bf16 or unchanged: the first of these that is exact."""
    values = values.detach().cpu().contiguous()
    if values.element_size() > 1 and values.numel() >= SMALLEST:
        for channels, inner in _layouts(values.shape):
            coded = _coded(values, channels=channels, inner=inner)
            if coded is not None:
                return coded
    if values.dtype == torch.float32:
        halved = values.bfloat16()
        if torch.equal(_bits(halved.float()), _bits(values)):
            return StoredTensor(bits=_bits(halved).numpy(), stored=torch.bfloat16, dtype=values.dtype)
    return StoredTensor(bits=_bits(values).numpy(), stored=values.dtype, dtype=values.dtype)


def _layouts(shape: torch.Size) -> Iterator[tuple[int, int]]:
    """Yield possible numbers of channels of a tensor, and the number of consecutive values per channel.

    All values as one channel; colours as a dimension, as in (N, 3, H, W); colours in the last dimension, outermost as in
    flattened patches of 3 x H x W, or innermost.
    """
    yield 1, math.prod(shape)
    found = [math.prod(shape[place + 1 :]) for place, size in enumerate(shape) if size == COLOURS]
    if shape[-1] % COLOURS == 0:
        found += [shape[-1] // COLOURS, 1]
    for inner in dict.fromkeys(found):
        yield COLOURS, inner


def _coded(values: torch.Tensor, *, channels: int, inner: int) -> CodedTensor | None:
    """Return a tensor as codes; None if a channel has more values than there are codes."""
    bits = _bits(values).view(-1, channels, inner)
    codes = torch.empty(bits.shape, dtype=torch.uint8)
    tables = bits.new_zeros(channels, CODES)
    for channel in range(channels):
        # Copies the channel if there are several.
        found = _codes(bits[:, channel].reshape(-1).contiguous())
        if found is None:
            return None
        table, places = found
        codes[:, channel] = places.view(-1, inner)
        tables[channel, : len(table)] = table
    return CodedTensor(codes=codes.numpy(), tables=tables.numpy(), shape=tuple(values.shape), dtype=values.dtype)


def _codes(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the distinct values, sorted, and the index of each value (N,) among them; None if there are too many."""
    table = values[:: max(1, len(values) // SAMPLE)].unique()
    while len(table) <= CODES:
        places = torch.searchsorted(table, values, out_int32=True).clamp_(max=len(table) - 1)
        unknown = values[table.index_select(0, places) != values]
        if not len(unknown):
            return table, places.to(torch.uint8)
        table = torch.cat([table, unknown[:SAMPLE]]).unique()
    return None


def _bits(values: torch.Tensor) -> torch.Tensor:
    """Return a tensor's values as integers of their size."""
    return values.view(BITS[values.element_size()])


def put(media: Media) -> MediaRef:
    """Store media for every worker of the cluster; they stay as long as the reference."""
    packed = compact(media)
    stored = ray.put(packed)
    return MediaRef(key=stored.hex(), stored=stored, nbytes=packed.nbytes)


def fetched(rows: Sequence[SentMedia | SampleMedia]) -> list[SampleMedia]:
    """Return the media of a pass's rows as tensors; each object is fetched once.

    Nothing is cached: between passes the object store holds them for all processes of a node, in fewer bytes.
    """
    refs = {
        item.ref.key: item.ref for row in rows if isinstance(row, tuple) for item in row if isinstance(item, PlacedRef)
    }
    stored: list[CompactMedia] = ray.get([ref.stored for ref in refs.values()]) if refs else []
    tensors = {key: item.expand() for key, item in zip(refs, stored, strict=True)}

    def with_tensors(item: PlacedRef | PlacedMedia) -> PlacedMedia:
        if isinstance(item, PlacedMedia):
            return item
        return PlacedMedia(item.start, tensors[item.ref.key], ref_key=item.ref.key, end=item.end)

    return [tuple(map(with_tensors, row)) if isinstance(row, tuple) else row for row in rows]


logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class _Pictures:
    """The pictures of an episode that are kept after it."""

    shown: tuple[Message, ...]
    turns: tuple[tuple[ImagePart, ...], ...]
    """The pictures of each turn."""


def put_pictures(samples: Sequence[Sample]) -> list[Sample]:
    """Return a group's samples with their pictures stored for every process of the cluster."""
    return [_put(sample) for sample in samples]


def fetch_pictures(sample: Sample) -> Sample:
    """Return a sample with its pictures; if their engine is lost, warn and return it without them."""
    played = sample.played
    if played is None or played.pictures is None:
        return sample
    try:
        kept: _Pictures = ray.get(played.pictures)
    except ray.exceptions.ObjectLostError as error:
        why = str(error).splitlines()[0]
        logger.warning("%s: the pictures of an episode are lost, and not recorded (%s)", sample.row.location, why)
        return sample
    said = tuple(one._replace(images=images) for one, images in zip(played.said, kept.turns, strict=True))
    return replace(sample, played=replace(played, said=said, shown=kept.shown, pictures=None))


def _put(sample: Sample) -> Sample:
    played = sample.played
    if played is None or not (played.shown or any(one.images for one in played.said)):
        return sample
    location = sample.row.location
    turns = tuple(_decoded(one, location=location) for one in played.said)
    stored = ray.put(_Pictures(shown=played.shown, turns=turns))
    said = tuple(one._replace(images=()) for one in played.said)
    return replace(sample, played=replace(played, said=said, shown=(), pictures=stored))


def _decoded(said: Said, *, location: str) -> tuple[ImagePart, ...]:
    """Return the pictures of a turn, decoded and no larger than the policy saw them."""
    try:
        return tuple(
            replace(part, source=within_bounds(load_image(part, location=location), replace(part, min_pixels=None)))
            for part in said.images
        )
    except UserError:
        # It could be read before; a picture for people is no reason to stop the run.
        logger.warning(
            "%s: a picture of an episode cannot be read again, and is not recorded", location, exc_info=True
        )
        return ()
