"""Media and pictures in Ray's object store."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy
import ray
import torch
from PIL import Image

from lmm_r1.data.images import load_image
from lmm_r1.data.messages import ImagePart, Message
from lmm_r1.data.sample import EpisodeResult, MediaRef, PlacedMedia, PlacedRef, Said, Sample, SampleMedia, SentMedia
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits import Media

COLOURS = 3
CODES = 256
# Below it, tables take as much as they save.
SMALLEST = 4096
# So many values of a channel show whether it may be worth while to look at all of them.
SAMPLE = 8192
# By so many of its bits a value is looked up: a table of this size stays in a processor's cache.
KEY_BITS = 20
# Numpy knows no bf16, and bits tell -0.0 from 0.0.
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredTensor:
    """A tensor in its own type, or in a narrower one that holds its values."""

    bits: numpy.ndarray
    """Of the values, as integers, in the tensor's shape."""
    stored: torch.dtype
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.bits.nbytes

    def expand(self) -> torch.Tensor:
        # The object store's memory can only be read, and whoever gets a tensor may write to it.
        return torch.from_numpy(self.bits.copy()).view(self.stored).to(self.dtype)


@dataclass(frozen=True, kw_only=True, eq=False)
class CodedTensor:
    """A tensor as codes into the values that each of its channels has."""

    codes: numpy.ndarray
    """(outer, channels, inner), of bytes: the tensor's values in order."""
    tables: numpy.ndarray
    """(channels, 256): what the codes of a channel stand for, as bits."""
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
    """The media tensors of one segment, by the names that the model's forward takes."""

    tensors: Mapping[str, StoredTensor | CodedTensor]

    @property
    def nbytes(self) -> int:
        return sum(item.nbytes for item in self.tensors.values())

    def expand(self) -> Media:
        """Return the tensors as they were, in memory of their own."""
        return {name: item.expand() for name, item in self.tensors.items()}


def compact(media: Media) -> CompactMedia:
    """Return media tensors of any processor in as few bytes as are exact."""
    return CompactMedia({name: compact_tensor(value) for name, value in media.items()})


def compact_tensor(values: torch.Tensor) -> StoredTensor | CodedTensor:
    """Return a tensor as codes, in bf16 or as it is: the first of these that gives it back bit by bit."""
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
    """Yield how many channels a tensor may have, and how many values of one stand together.

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
    """Return a tensor as codes; None where a channel has more values than there are codes."""
    bits = _bits(values).view(-1, channels, inner)
    codes = torch.empty(bits.shape, dtype=torch.uint8)
    tables = bits.new_zeros(channels, CODES)
    # The first bits of a number tell it from others, the last ones of a whole number.
    shift = max(0, 8 * values.element_size() - KEY_BITS) if values.is_floating_point() else 0
    for channel in range(channels):
        # A channel is a part of every row: this copies it where there are several.
        own = bits[:, channel].reshape(-1)
        found = _codes(own, shift=shift)
        if found is None:
            return None
        table, places = found
        codes[:, channel] = places.view(-1, inner)
        tables[channel, : len(table)] = table
    return CodedTensor(codes=codes.numpy(), tables=tables.numpy(), shape=tuple(values.shape), dtype=values.dtype)


def _codes(values: torch.Tensor, *, shift: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the different values, sorted, and the place of each value (N,) among them; None where they are too many.

    Places are looked up by `KEY_BITS` bits behind the last `shift` ones: None, too, where these do not tell values apart.
    """
    keys = _keys(values, shift=shift)
    lookup = torch.zeros(2**KEY_BITS, dtype=torch.uint8)
    table = values[:: max(1, len(values) // SAMPLE)].unique()
    while len(table) <= CODES:
        known = _keys(table, shift=shift)
        if len(known.unique()) < len(table):
            return None
        lookup[known] = torch.arange(len(table), dtype=torch.uint8)
        places = lookup.index_select(0, keys)
        unknown = values[table.index_select(0, places.int()) != values]
        if not len(unknown):
            return table, places
        table = torch.cat([table, unknown[:SAMPLE]]).unique()
    return None


def _keys(values: torch.Tensor, *, shift: int) -> torch.Tensor:
    return (values >> shift).int() & (2**KEY_BITS - 1)


def _bits(values: torch.Tensor) -> torch.Tensor:
    """Return a tensor's values as integers of their size."""
    return values.view(BITS[values.element_size()])


def put(media: Media) -> MediaRef:
    """Put media where every worker of the cluster can fetch them; whoever is given the reference holds them there."""
    packed = compact(media)
    stored = ray.put(packed)
    return MediaRef(key=stored.hex(), stored=stored, nbytes=packed.nbytes)


def fetched(rows: Sequence[SentMedia | SampleMedia]) -> list[SampleMedia]:
    """Return the media of a pass's rows as models take them: each object fetched once, tensors as they were put.

    Nothing is kept: between passes the object store holds them for all processes of a node, in fewer bytes.
    """
    refs = {
        item.ref.key: item.ref for row in rows if isinstance(row, tuple) for item in row if isinstance(item, PlacedRef)
    }
    stored: list[CompactMedia] = ray.get([ref.stored for ref in refs.values()]) if refs else []
    tensors = {key: item.expand() for key, item in zip(refs, stored, strict=True)}
    return [_with_tensors(row, tensors) for row in rows]


def _with_tensors(row: SentMedia | SampleMedia, tensors: Mapping[str, Media]) -> SampleMedia:
    """Return a row's media with tensors, by their keys, in the place of references."""
    if not isinstance(row, tuple):
        return row
    return tuple(
        (
            PlacedMedia(item.start, tensors[item.ref.key], ref_key=item.ref.key, end=item.end)
            if isinstance(item, PlacedRef)
            else item
        )
        for item in row
    )


logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class _Pictures:
    """The pictures of an episode that are kept after it."""

    shown: tuple[Message, ...]
    turns: tuple[tuple[ImagePart, ...], ...]
    """Of each turn that was said."""


def put_pictures(samples: Sequence[Sample]) -> list[Sample]:
    """Return a group's samples, whose pictures stay where every process of the cluster can fetch them."""
    return [_put(sample) for sample in samples]


def fetch_pictures(sample: Sample) -> Sample:
    """Return a sample with its pictures; without them where their engine is lost, which a warning tells."""
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
    stored = ray.put(_pictures(played, location=sample.row.location))
    said = tuple(one._replace(images=()) for one in played.said)
    return replace(sample, played=replace(played, said=said, shown=(), pictures=stored))


def _pictures(played: EpisodeResult, *, location: str) -> _Pictures:
    return _Pictures(shown=played.shown, turns=tuple(_decoded(one, location=location) for one in played.said))


def _decoded(said: Said, *, location: str) -> tuple[ImagePart, ...]:
    """Return the pictures of a turn, decoded and no larger than the policy saw them."""
    try:
        return tuple(
            replace(part, source=_bounded(load_image(part, location=location), part.max_pixels))
            for part in said.images
        )
    except UserError:
        # It could be read a moment ago; a picture to look at is not worth the run.
        logger.warning(
            "%s: a picture of an episode cannot be read again, and is not recorded", location, exc_info=True
        )
        return ()


def _bounded(image: Image.Image, max_pixels: int | None) -> Image.Image:
    pixels = image.width * image.height
    if max_pixels is None or pixels <= max_pixels:
        return image
    scale = math.sqrt(max_pixels / pixels)
    return image.resize((max(1, int(image.width * scale)), max(1, int(image.height * scale))))
