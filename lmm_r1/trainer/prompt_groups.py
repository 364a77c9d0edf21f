"""Rows of one prompt one after another: which rows those are, and the order of an epoch in which they stay together."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from PIL import Image

from lmm_r1.data.image_sources import ImageSource
from lmm_r1.data.messages import ImagePart, Part, VideoPart
from lmm_r1.data.preferences import JudgedRow
from lmm_r1.data.stored_bytes import StoredBytes


def prompt_numbers(rows: Iterable[JudgedRow]) -> torch.Tensor:
    """Return the number of each row's prompt, (N,), from 0 in the order in which these come first.

    Of images and videos that are named by a path or an address the name counts, of others what is in them.
    """
    known: dict[Hashable, int] = {}
    return torch.tensor([known.setdefault(_key(row), len(known)) for row in rows])


def grouped_indices(prompts: torch.Tensor, *, batch_size: int, seed: int, step: int) -> list[int]:
    """Return the row indices of update `step` (from 0), as `batch_indices` does, but with the rows of a prompt together.

    Each epoch is a new permutation of the prompts, and of the rows of each.

    Args:
        prompts: the number of each row's prompt, (N,).
    """
    rows = len(prompts)
    epoch, position = divmod(step, rows // batch_size)
    generator = torch.Generator().manual_seed(seed + epoch)
    turns = torch.randperm(int(prompts.max()) + 1, generator=generator)[prompts]
    order = (turns * rows + torch.randperm(rows, generator=generator)).argsort()
    return order[position * batch_size : (position + 1) * batch_size].tolist()


def in_turns(indices: Sequence[Any], *, ranks: int) -> list[Any]:
    """Return an update's rows so that ranks, which take every so-many-th of them, each get neighbours.

    `[1, 1, 2, 2]` and 2 ranks → `[1, 2, 1, 2]`.
    """
    own, rest = divmod(len(indices), ranks)
    assert not rest, "an update has as many rows for every rank"
    return [indices[rank * own + place] for place in range(own) for rank in range(ranks)]


def _key(row: JudgedRow) -> Hashable:
    messages = tuple((message.role, tuple(map(_known, message.parts))) for message in row.messages)
    return row.plain, messages


def _known(part: Part) -> Hashable:
    """Return a part as it is compared with others: encoded images by their contents."""
    if isinstance(part, ImagePart):
        return replace(part, source=_content(part.source))
    if isinstance(part, VideoPart) and not isinstance(part.source, str):
        return replace(part, source=tuple(map(_content, part.source)))
    return part


def _content(source: ImageSource) -> str | bytes:
    if isinstance(source, str):
        return source
    if isinstance(source, Image.Image):
        found = f"{source.mode} {source.size}".encode() + source.tobytes()
    else:
        found = source.read() if isinstance(source, StoredBytes) else source
    return hashlib.blake2b(found, digest_size=16).digest()
