"""The rows of a run: their order, their digest, and the rows left out."""

from __future__ import annotations

import hashlib
import math
import os
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np

from lmm_r1.data.messages import (
    ImagePart,
    Message,
    PreferenceRow,
    Row,
    SkippedRow,
    StoredBytes,
    TextPart,
    VideoPart,
    describe,
    kind_of,
)
from lmm_r1.errors import UserError

T = TypeVar("T")
SKIP_BAD_ROWS = "--data.bad_rows skip"
"""The flag with which a training leaves out rows that it cannot use."""


@dataclass(frozen=True, kw_only=True)
class LeftOutRow:
    """A row that a training leaves out."""

    dataset: str
    """As given in the flag."""
    index: int
    """Its index among the records of its file, from 0."""
    reason: str
    """One sentence with the file and the line."""


class KeptRows(list[T]):
    """The rows of one or several datasets, and the rows that were left out of them."""

    def __init__(
        self,
        rows: Iterable[T] = (),
        *,
        left_out: Sequence[LeftOutRow] = (),
        origins: Mapping[str, tuple[str, int]] | None = None,
    ) -> None:
        """Args: origins: the dataset of each row and the index in it, by the row's location."""
        super().__init__(rows)
        self.left_out = tuple(left_out)
        self.origins = dict(origins or {})

    @classmethod
    def of(cls, path: str, rows: Mapping[int, T], skipped: Sequence[SkippedRow]) -> KeptRows[T]:
        """Return the rows of one file, given by their index in it."""
        left_out = [LeftOutRow(dataset=path, index=row.index, reason=row.reason) for row in skipped]
        any_rows: Mapping[int, Any] = rows  # all kinds of rows have a location
        origins = {row.location: (path, index) for index, row in any_rows.items()}
        return cls(rows.values(), left_out=left_out, origins=origins)

    @classmethod
    def blended(cls, rows: Iterable[T], parts: Sequence[KeptRows[T]]) -> KeptRows[T]:
        """Return rows that were drawn from several datasets."""
        left_out = [row for part in parts for row in part.left_out]
        origins = {location: origin for part in parts for location, origin in part.origins.items()}
        return cls(rows, left_out=left_out, origins=origins)


def stopped_by(error: UserError) -> UserError:
    """Return the error of a run that stops at a row which could not be encoded, with the way to continue."""
    return UserError(
        f"{error}. To continue this run, repeat the command with {SKIP_BAD_ROWS}, which leaves the row out; do not "
        "remove it from the data, because a run resumes only with unchanged data"
    )


def with_left_out(summary: str, skipped: Sequence[SkippedRow]) -> str:
    """Return the summary of a file that a training has read, with what was left out."""
    if not skipped:
        return summary
    rows = "1 row that cannot be used is" if len(skipped) == 1 else f"{len(skipped):,} rows that cannot be used are"
    return f"{summary}; {rows} left out, the first: {' '.join(skipped[0].reason.split())}"


def dataset_paths(datasets: str, *, flag: str) -> list[str]:
    """Return the entries of a flag that are separated by commas; raises UserError for an empty one."""
    paths = [path.strip() for path in datasets.split(",")]
    if not all(paths):
        raise UserError(f"{flag} {datasets!r} has an empty entry; give paths separated by single commas")
    return paths


def parse_dataset_spec(datasets: str, probabilities: str | None = None) -> tuple[list[str], list[float] | None]:
    """`("a.jsonl,b.jsonl", "0.7,0.3")` → `(["a.jsonl", "b.jsonl"], [0.7, 0.3])`; raises UserError for a mismatch."""
    paths = dataset_paths(datasets, flag="--data.prompt_dataset")
    if probabilities is None or not probabilities.strip():
        return paths, None
    try:
        values = [float(value) for value in probabilities.split(",")]
    except ValueError:
        values = []
    are_shares = all(value >= 0 for value in values) and math.isclose(sum(values), 1.0, abs_tol=1e-4)
    if len(values) != len(paths) or not are_shares:
        raise UserError(
            f"--data.prompt_probs {probabilities}: give one number of 0 or more for each of the {len(paths)} datasets in "
            "--data.prompt_dataset, separated by commas; they must add up to 1"
        )
    return paths, values


def blend(row_lists: Sequence[Sequence[T]], probabilities: Sequence[float] | None, *, seed: int) -> list[T]:
    """Return one list: all rows in order without `probabilities`, else draws until the first list is used up.

    Each draw picks a list by its probability and takes that list's next row, so no row occurs twice. The order is that
    of `datasets.interleave_datasets(..., stopping_strategy="first_exhausted")` for the same seed.

    Raises:
        UserError: a list is empty.
    """
    if probabilities is None:
        return [row for rows in row_lists for row in rows]
    for number, rows in enumerate(row_lists, start=1):
        if not rows:
            raise UserError(
                f"dataset {number} of --data.prompt_dataset holds no rows, so nothing can be drawn from it"
            )
    # After this many draws at the latest, one list has been used up.
    shares = np.asarray(probabilities) / sum(probabilities)
    draws = np.random.default_rng(seed).choice(len(row_lists), size=sum(map(len, row_lists)), p=shares)
    taken = [0] * len(row_lists)
    blended: list[T] = []
    for index in draws.tolist():
        blended.append(row_lists[index][taken[index]])
        taken[index] += 1
        if taken[index] == len(row_lists[index]):
            break
    return blended


class PromptStream:
    """Rows in a new order per episode, which depends on the seed and the episode."""

    def __init__(self, rows: Sequence[Row], *, seed: int, episodes: int) -> None:
        self.rows = rows
        self.seed = seed
        self.episodes = episodes
        self.episode = 0
        self.position = 0
        self.taken: list[int] = []
        """The indices of the rows that were taken last."""
        self._order = self._order_of(0)

    def take(self, count: int) -> list[Row]:
        """Return the next `count` rows of the current episode, fewer at its end, and none after the last episode."""
        if self.episode >= self.episodes:
            return []
        self.taken = list(self._order[self.position : self.position + count])
        self.position += len(self.taken)
        return [self.rows[index] for index in self.taken]

    def has(self, count: int) -> bool:
        """Return whether `count` more rows can be taken; moves to the next episode if this one has too few."""
        while self.episode < self.episodes:
            if self.position + count <= len(self.rows):
                return True
            self.next_episode()
        return False

    def next_episode(self) -> bool:
        """Move to the next episode, whatever is left of this one; return whether there is one."""
        self.episode, self.position = self.episode + 1, 0
        # Free the old order first, so that no second one adds to the process's memory.
        self._order = []
        self._order = self._order_of(self.episode)
        return self.episode < self.episodes

    def state_dict(self) -> dict[str, object]:
        """Return a state for `load_state_dict`, which later changes do not affect."""
        return {"episode": self.episode, "position": self.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of the same rows."""
        self.episode, self.position = state["episode"], state["position"]
        self._order = self._order_of(self.episode)

    def _order_of(self, episode: int) -> list[int]:
        order = list(range(len(self.rows)))
        random.Random(f"{self.seed}-{episode}").shuffle(order)
        return order


def check_prompt(row: Row) -> None:
    """Raise UserError for a row that ends with one of several assistant turns: it would show the model the answer."""
    if row.messages[-1].role == "assistant":
        raise UserError(
            f"{row.location}: a prompt for RL must not end with one of several assistant turns; such rows are for train_sft "
            "(if responses are to continue that turn, give --data.format r1_vlm)"
        )


AnyRow: TypeAlias = Row | PreferenceRow


def rows_digest(rows: Sequence[AnyRow]) -> str:
    """Return the number of rows and a digest of their prompts and answers.

    An image file counts by its name. An image in a row file counts by that file's name, its row and its length, because
    all images of a row file can be terabytes.
    """
    digest = hashlib.sha256()
    for row in rows:
        if not isinstance(row, Row):
            judged = f"{row.margin}\0{row.chosen_score}\0{row.rejected_score}"
            for name, messages in {"prompt": row.messages, "chosen": row.chosen, "rejected": row.rejected}.items():
                digest.update(f"\0{name}".encode())
                _add_messages(digest, messages)
            digest.update(f"\0{judged}\0{row.datasource}\0{row.plain}\n".encode(errors="replace"))
            continue
        _add_messages(digest, row.messages)
        begun = f"\0{row.prefill}" if row.prefill else ""
        digest.update(f"\0{row.answer}\0{row.datasource}{begun}\n".encode(errors="replace"))
        if row.plain:
            digest.update(b"\0plain")
    return f"{len(rows)} rows {digest.hexdigest()[:12]}"


def files_of_rows(rows: Iterable[Row]) -> list[tuple[str, int, int]]:
    """Return the local files that hold the images and videos of rows: their names, sizes and modification times.

    The result is the same for a folder that was moved. A missing file has a size and a time of 0.
    """
    paths = set()
    for part in (part for row in rows for message in row.messages for part in message.parts):
        sources = () if isinstance(part, TextPart) else part.source
        for source in sources if isinstance(sources, list | tuple) else (sources,):
            if isinstance(source, StoredBytes):
                paths.add(source.file)
            elif isinstance(source, str) and kind_of(source) == "path":
                paths.add(source)
    states = []
    for path in paths:
        try:
            found = os.stat(path)
        except OSError:
            states.append((os.path.basename(path), 0, 0))
        else:
            states.append((os.path.basename(path), found.st_size, found.st_mtime_ns))
    return sorted(states)


def _add_messages(digest: hashlib._Hash, messages: Sequence[Message]) -> None:
    for message in messages:
        for part in message.parts:
            digest.update(_described(part))
        digest.update(message.role.encode())
        if message.loss is not None:
            digest.update(str(message.loss).encode())


def _described(part: TextPart | ImagePart | VideoPart) -> bytes:
    if isinstance(part, TextPart):
        return part.text.encode(errors="replace")
    pixels = f" {part.min_pixels} {part.max_pixels}".encode()
    if isinstance(part, VideoPart):
        video = (
            part.source
            if isinstance(part.source, str)
            else [_stored_name(frame) if isinstance(frame, StoredBytes) else describe(frame) for frame in part.source]
        )
        return f"{video} {part.fps} {part.max_frames}".encode(errors="replace") + pixels
    if isinstance(part.source, bytes):
        return part.source + pixels
    if isinstance(part.source, str):
        return part.source.rpartition("/")[2].encode(errors="replace") + pixels
    if isinstance(part.source, StoredBytes):
        return _stored_name(part.source).encode(errors="replace") + pixels
    return part.source.tobytes() + pixels


def _stored_name(stored: StoredBytes) -> str:
    return f"{os.path.basename(stored.file)} {stored.row} {stored.length}"
