"""Media and pictures in Ray's object store."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import ray
from PIL import Image

from lmm_r1.data.images import load_image
from lmm_r1.data.messages import ImagePart, Message
from lmm_r1.data.sample import EpisodeResult, MediaRef, PlacedMedia, PlacedRef, Said, Sample, SampleMedia, SentMedia
from lmm_r1.errors import UserError
from lmm_r1.generation.compact_media import CompactMedia, compact
from lmm_r1.lmm_kits import Media


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
    """What stays behind of an episode."""

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
    """The pictures of a turn as any machine can show them, no larger than the policy saw them."""
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
