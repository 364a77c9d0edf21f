"""Media on their way from an engine to the models' workers: in Ray's object store, past the driver.

An object belongs to the process of the engine that put it, asleep or awake: with that process it is lost, and a fetch
raises Ray's OwnerDiedError. It is freed when the last process lets go of its `MediaRef`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import ray

from lmm_r1.data.sample import MediaRef, PlacedMedia, PlacedRef, SampleMedia, SentMedia
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
