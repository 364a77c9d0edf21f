"""The rows of a run: their order, their curriculum and their digest."""

from __future__ import annotations

import hashlib
import math
import os
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np

from lmm_r1.data.bad_rows import SkippedRow
from lmm_r1.data.image_sources import ImageSource, StoredBytes, describe, kind_of
from lmm_r1.data.messages import ImagePart, Message, Row, TextPart, VideoPart
from lmm_r1.data.preferences import PreferenceRow, StepRow, UnpairedRow
from lmm_r1.errors import UserError

CurriculumName = Literal["easy_first", "uncertain"]
UNKNOWN = 0.5
"""How often a prompt is taken to be solved that nobody has answered yet."""
LEAST_SHARE = 0.1
"""Of the weight of a prompt that is solved half of the time, what one has that is always or never solved."""


class MeasuredCurriculum:
    """Orders the prompts of an episode by the solve rates of those before."""

    def __init__(self, kind: CurriculumName, *, rows: int) -> None:
        self.kind = kind
        self.solved = np.full(rows, np.nan)
        """The mean score of each prompt's last group, 0 to 1 where scores are, (N,); NaN where there was none."""

    @property
    def mean(self) -> float | None:
        """The mean of `solved` over the prompts that were answered; None before the first."""
        known = self.solved[~np.isnan(self.solved)]
        return float(known.mean()) if len(known) else None

    def note(self, places: Sequence[int], solved: Sequence[float | None]) -> None:
        """Note how often prompts were solved; None leaves what is known."""
        for place, rate in zip(places, solved, strict=True):
            if rate is not None:
                self.solved[place] = rate

    def load(self, solved: Sequence[float]) -> None:
        """Go on from `solved` of a stopped run."""
        assert len(solved) == len(self.solved), "the run's rows are those of its checkpoints"
        self.solved = np.array(solved)

    def ordered(self, shuffled: Sequence[int], draw: random.Random) -> list[int]:
        """Return the places of the prompts of an episode, N, from a shuffled order of all of them.

        Before anything is measured it is that order. `easy_first` sorts it from often to seldom solved, `uncertain` draws
        from it by `weights`, so that an episode has a prompt several times, once or not at all.
        """
        if np.isnan(self.solved).all():
            return list(shuffled)
        rates = np.where(np.isnan(self.solved), UNKNOWN, self.solved)
        if self.kind == "easy_first":
            return sorted(shuffled, key=lambda place: -rates[place])
        drawn = systematic(weights(rates[np.array(shuffled)]), start=draw.random())
        order = [shuffled[place] for place in drawn]
        draw.shuffle(order)
        return order


def weights(rates: np.ndarray) -> np.ndarray:
    """Return how much prompts count that are solved so often, (N,): 4 p (1 - p), the variance of a right answer against the
    largest there is, and `LEAST_SHARE` at least, so that all of them are measured again."""
    inside = np.clip(rates, 0.0, 1.0)
    return np.maximum(4 * inside * (1 - inside), LEAST_SHARE)


def systematic(weighted: np.ndarray, *, start: float) -> list[int]:
    """Return N places drawn in proportion to N weights, each the expected number of times rounded down or up.

    Args:
        start: where the first draw is in its N-th, 0 to 1.
    """
    count = len(weighted)
    bounds = np.cumsum(weighted) * count / weighted.sum()
    places = np.searchsorted(bounds, np.arange(count) + start, side="right")
    return np.minimum(places, count - 1).tolist()


T = TypeVar("T")
SKIP_BAD_ROWS = "--data.bad_rows skip"
"""How a training is told to go on without the rows that cannot be used."""


@dataclass(frozen=True, kw_only=True)
class LeftOutRow:
    """A row that a training goes on without."""

    dataset: str
    """As the flag names it."""
    index: int
    """Its place among the records of its file, from 0."""
    reason: str
    """One sentence with the file and the line."""


class KeptRows(list[T]):
    """The rows of one dataset or of several, and those that were left out of them."""

    def __init__(
        self,
        rows: Iterable[T] = (),
        *,
        left_out: Sequence[LeftOutRow] = (),
        origins: Mapping[str, tuple[str, int]] | None = None,
    ) -> None:
        """Args: origins: by the location of each row, its dataset and its place in it."""
        super().__init__(rows)
        self.left_out = tuple(left_out)
        self.origins = dict(origins or {})

    @classmethod
    def of(cls, path: str, rows: Mapping[int, T], skipped: Sequence[SkippedRow]) -> KeptRows[T]:
        """Return the rows of one file, which are given by their places in it."""
        left_out = [LeftOutRow(dataset=path, index=row.index, reason=row.reason) for row in skipped]
        origins = {located(row): (path, index) for index, row in rows.items()}
        return cls(rows.values(), left_out=left_out, origins=origins)

    @classmethod
    def blended(cls, rows: Iterable[T], parts: Sequence[KeptRows[T]]) -> KeptRows[T]:
        """Return rows that were taken from several datasets."""
        left_out = [row for part in parts for row in part.left_out]
        origins = {location: origin for part in parts for location, origin in part.origins.items()}
        return cls(rows, left_out=left_out, origins=origins)


def located(row: Any) -> str:
    """Return the file and the line of a row of any kind."""
    return row.location


def stopped_by(error: UserError) -> UserError:
    """Return the error of a run that stops at a row which could not be encoded when its turn came, with the way to go on."""
    return UserError(
        f"{error}. To go on with this run, repeat the command with {SKIP_BAD_ROWS}, which leaves the row out; data without "
        "the row would be those of another run"
    )


def told_of(told: str, skipped: Sequence[SkippedRow]) -> str:
    """Return what a training says of a file that it has read: how it was found, and what was left out."""
    if not skipped:
        return told
    rows = "1 row that cannot be used is" if len(skipped) == 1 else f"{len(skipped):,} rows that cannot be used are"
    return f"{told}; {rows} left out, the first: {' '.join(skipped[0].reason.split())}"


def parse_dataset_spec(datasets: str, probabilities: str | None = None) -> tuple[list[str], list[float] | None]:
    """`("a.jsonl,b.jsonl", "0.7,0.3")` → `(["a.jsonl", "b.jsonl"], [0.7, 0.3])`; raises UserError if they do not fit."""
    paths = [path.strip() for path in datasets.split(",")]
    if not all(paths):
        raise UserError(
            f"--data.prompt_dataset {datasets!r} has an empty entry; give paths separated by single commas"
        )
    if probabilities is None or not probabilities.strip():
        return paths, None
    try:
        values = [float(value) for value in probabilities.split(",")]
    except ValueError as error:
        raise UserError(f"--data.prompt_probs {probabilities!r} must be numbers separated by commas") from error
    _check(values, num_datasets=len(paths))
    return paths, values


def blend(row_lists: Sequence[Sequence[T]], probabilities: Sequence[float] | None, *, seed: int) -> list[T]:
    """One list of rows: a concatenation without `probabilities`, else a draw that stops at the first list used up.

    Each draw picks a list by its probability and takes that list's next row, so no row comes twice. The order is that
    of `datasets.interleave_datasets(..., stopping_strategy="first_exhausted")` for the same seed.

    Raises:
        UserError: the probabilities do not fit the lists, or a list is empty.
    """
    if probabilities is None:
        return [row for rows in row_lists for row in rows]
    _check(probabilities, num_datasets=len(row_lists))
    for number, rows in enumerate(row_lists, start=1):
        if not rows:
            raise UserError(
                f"dataset {number} of --data.prompt_dataset holds no rows, so nothing can be drawn from it"
            )
    # No more draws than rows can be needed: after that many, one list has been used up.
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


def _check(probabilities: Sequence[float], *, num_datasets: int) -> None:
    given = ",".join(f"{value:g}" for value in probabilities)
    if len(probabilities) != num_datasets:
        raise UserError(
            f"--data.prompt_probs {given} has {len(probabilities)} numbers but --data.prompt_dataset names "
            f"{num_datasets} datasets; give one probability for each"
        )
    if not all(math.isfinite(value) and value >= 0 for value in probabilities):
        raise UserError(f"--data.prompt_probs {given} must not be negative")
    if not math.isclose(sum(probabilities), 1.0, abs_tol=1e-4):
        raise UserError(
            f"--data.prompt_probs {given} adds up to {sum(probabilities):g}; the probabilities of the datasets in "
            "--data.prompt_dataset must add up to 1"
        )


class PromptStream:
    """Rows in a new order for each episode; it depends on the seed and the episode, and on what a curriculum has measured."""

    def __init__(
        self, rows: Sequence[Row], *, seed: int, episodes: int, curriculum: MeasuredCurriculum | None = None
    ) -> None:
        self.rows = rows
        self.seed = seed
        self.episodes = episodes
        self.curriculum = curriculum
        self.episode = 0
        self.position = 0
        self.taken: list[int] = []
        """The places of the rows that were taken last."""
        self._order = self._order_of(0)

    def take(self, count: int) -> list[Row]:
        """Return the next `count` rows of the current episode, fewer at its end, and none behind the last one."""
        if self.episode >= self.episodes:
            return []
        self.taken = list(self._order[self.position : self.position + count])
        self.position += len(self.taken)
        return [self.rows[index] for index in self.taken]

    def take_of_batches(self, count: int, *, batch: int) -> list[Row]:
        """Return up to `count` next rows of one episode, none behind the last one; of an episode as many as fill batches.

        What is left of it is passed over, as `has` does.
        """
        while self.episode < self.episodes:
            if (room := self._of_batches(batch) - self.position) > 0:
                return self.take(min(count, room))
            self.next_episode()
        return []

    def left(self, *, batch: int) -> int:
        """Return how many rows `take_of_batches` gives until the last episode ends."""
        if self.episode >= self.episodes:
            return 0
        later = self.episodes - self.episode - 1
        return max(0, self._of_batches(batch) - self.position) + later * self._of_batches(batch)

    def _of_batches(self, batch: int) -> int:
        return len(self.rows) // batch * batch

    def measured(self, solved: Sequence[float | None], *, places: Sequence[int] | None = None) -> None:
        """Note how often rows were solved, 0 to 1; None where nobody answered them.

        Args:
            places: of the rows; None are those that were taken last.
        """
        if self.curriculum is not None:
            self.curriculum.note(self.taken if places is None else places, solved)

    def has(self, count: int) -> bool:
        """Say whether `count` more rows can be taken; moves on to the next episode where this one has too few."""
        while self.episode < self.episodes:
            if self.position + count <= len(self.rows):
                return True
            self.next_episode()
        return False

    @property
    def solved(self) -> float | None:
        """How often prompts were solved when they came last, over those that were answered; None without a curriculum."""
        return None if self.curriculum is None else self.curriculum.mean

    def next_episode(self) -> bool:
        """Move on to the next episode, whatever is left of this one; say whether there is one."""
        self.episode, self.position = self.episode + 1, 0
        # Freed first, so that no second order adds to the process's memory.
        self._order = []
        self._order = self._order_of(self.episode)
        return self.episode < self.episodes

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` goes on from; nothing that happens later changes it."""
        state = {"episode": self.episode, "position": self.position}
        if self.curriculum is None:
            return state
        # The order was made of what was measured before this episode, which is measured anew while it goes on.
        return {**state, "order": list(self._order), "solved": self.curriculum.solved.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of the same rows."""
        self.episode, self.position = state["episode"], state["position"]
        # A version without curricula has saved nothing of the prompts.
        if self.curriculum is None or "solved" not in state:
            self._order = self._order_of(self.episode)
        else:
            self.curriculum.load(state["solved"])
            self._order = list(state["order"])

    def _order_of(self, episode: int) -> list[int]:
        draw = random.Random(f"{self.seed}-{episode}")
        order = list(range(len(self.rows)))
        draw.shuffle(order)
        return order if self.curriculum is None else self.curriculum.ordered(order, draw)


def check_prompt(row: Row) -> None:
    """Raise UserError for a row that ends with one of several assistant turns: it would show the model the answer."""
    if row.messages[-1].role == "assistant":
        raise UserError(
            f"{row.location}: a prompt for RL must not end with one of several assistant turns; such rows are for train_sft "
            "(where responses are to go on from that turn, give --data.format r1_vlm)"
        )


AnyRow: TypeAlias = Row | PreferenceRow | StepRow | UnpairedRow


def rows_digest(rows: Sequence[AnyRow]) -> str:
    """Return the number of rows and a digest of what they ask and answer; of an image in a file its name counts,
    and of one in a row file that file's name, its row and its length: all images of a row file can be terabytes.
    """
    digest = hashlib.sha256()
    for row in rows:
        if not isinstance(row, Row):
            _add_judged(digest, row)
            continue
        _add_messages(digest, row.messages)
        begun = f"\0{row.prefill}" if row.prefill else ""
        digest.update(f"\0{row.answer}\0{row.datasource}{begun}\n".encode(errors="replace"))
        if row.plain:
            digest.update(b"\0plain")
    return f"{len(rows)} rows {digest.hexdigest()[:12]}"


def files_of_rows(rows: Iterable[Row]) -> list[tuple[str, int, int]]:
    """Return the local files that hold the images and videos of rows: their names, sizes and times of change.

    A folder that was moved holds the same ones. A file that is not there has a size and a time of 0.
    """
    parts = (part for row in rows for message in row.messages for part in message.parts)
    paths = {path for part in parts for path in map(_path_of, _sources_of(part)) if path}
    return sorted((os.path.basename(path), *_state(path)) for path in paths)


def _sources_of(part: TextPart | ImagePart | VideoPart) -> Sequence[ImageSource]:
    if isinstance(part, TextPart):
        return ()
    return part.source if isinstance(part.source, list | tuple) else (part.source,)


def _path_of(source: ImageSource) -> str:
    if isinstance(source, StoredBytes):
        return source.place.name
    return source if isinstance(source, str) and kind_of(source) == "path" else ""


def _state(path: str) -> tuple[int, int]:
    try:
        found = os.stat(path)
    except OSError:
        return 0, 0
    return found.st_size, found.st_mtime_ns


def _add_judged(digest: hashlib._Hash, row: PreferenceRow | StepRow | UnpairedRow) -> None:
    match row:
        case PreferenceRow():
            turns = {"chosen": row.chosen, "rejected": row.rejected}
            judged = f"{row.margin}\0{row.chosen_score}\0{row.rejected_score}"
        case UnpairedRow():
            turns, judged = {"response": row.response}, str(row.desirable)
        case StepRow():
            turns, judged = {}, "\0".join([*row.steps, *map(str, row.labels)])
    for name, messages in {"prompt": row.messages, **turns}.items():
        digest.update(f"\0{name}".encode())
        _add_messages(digest, messages)
    digest.update(f"\0{judged}\0{row.datasource}\0{row.plain}\n".encode(errors="replace"))


def _add_messages(digest: hashlib._Hash, messages: Sequence[Message]) -> None:
    for message in messages:
        for part in message.parts:
            digest.update(_described(part))
        digest.update(message.role.encode())


def _described(part: TextPart | ImagePart | VideoPart) -> bytes:
    if isinstance(part, TextPart):
        return part.text.encode(errors="replace")
    pixels = f" {part.min_pixels} {part.max_pixels}".encode()
    if isinstance(part, VideoPart):
        video = part.source if isinstance(part.source, str) else [_frame_told(frame) for frame in part.source]
        return f"{video} {part.fps} {part.max_frames}".encode(errors="replace") + pixels
    if isinstance(part.source, bytes):
        return part.source + pixels
    if isinstance(part.source, str):
        return part.source.rpartition("/")[2].encode(errors="replace") + pixels
    if isinstance(part.source, StoredBytes):
        return _stored_told(part.source).encode(errors="replace") + pixels
    return part.source.tobytes() + pixels


def _frame_told(frame: ImageSource) -> str:
    return _stored_told(frame) if isinstance(frame, StoredBytes) else describe(frame)


def _stored_told(stored: StoredBytes) -> str:
    return f"{os.path.basename(stored.place.name)} {stored.row} {stored.length}"
