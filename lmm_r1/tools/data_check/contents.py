"""What rows contain and what is wrong with it: answers, repeated rows, special tokens as text; statistics of a file."""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from lmm_r1.data.images import load_image, load_video
from lmm_r1.data.messages import (
    ImagePart,
    Message,
    PreferenceRow,
    Row,
    TextPart,
    VideoPart,
    demonstration,
    images_of,
    videos_of,
)
from lmm_r1.data.training_rows import check_prompt
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits.checkpoint import Checkpoint, check_embeddings, check_images_taken, encode_row
from lmm_r1.lmm_kits.encoding import control_texts
from lmm_r1.scoring.sources import VerifierJudge
from lmm_r1.supervised.pairs import check_response
from lmm_r1.supervised.samples import check_sample, loss_turns
from remote_rm.answer_verifier import AnswerVerifier
from remote_rm.composition import Composition
from remote_rm.verifier import Item, Verifier

KINDS = {
    "row": "cannot be used: training stops at such a row",
    "image": "has an image or a video that cannot be read",
    "answer": "is refused by the training that it is for",
    "options": "has options that the model does not see",
    "length": "is longer than the training's budget",
    "encoding": "cannot be encoded for the model",
    "special tokens": "writes special tokens as text, which do not act as a turn or an end",
    "gold refused": "has an answer that a verifier or function cannot judge by",
    "gold wrong": "has an answer that a verifier or function does not accept",
    "leak": "is also in another file",
    "duplicate": "repeats an earlier row",
    "contradiction": "repeats an earlier row with another answer",
}
"""The kinds of findings in the order in which they are reported, each with a predicate for its rows."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A problem with one row."""

    kind: str
    """One of `KINDS`."""
    index: int
    """The row's index in the file, from 0."""
    location: str
    """File and line."""
    what: str

    def __post_init__(self) -> None:
        """An unknown kind would not be reported."""
        assert self.kind in KINDS, self.kind


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """How a number is distributed over the rows or the images."""

    name: str
    count: int
    least: float
    median: float
    most_of_90: float
    """90 % of the values are at most this."""
    most_of_99: float
    largest: float
    limit: float | None = None
    """Values should not exceed it."""

    @classmethod
    def of(cls, name: str, values: Sequence[float], *, limit: float | None = None) -> Distribution:
        """Return the distribution of one or more values; a quantile is the smallest value with that share at or below it."""
        ordered = sorted(values)

        def quantile(share: float) -> float:
            return ordered[max(0, math.ceil(share * len(ordered)) - 1)]

        return cls(
            name=name,
            count=len(ordered),
            least=ordered[0],
            median=quantile(0.5),
            most_of_90=quantile(0.9),
            most_of_99=quantile(0.99),
            largest=ordered[-1],
            limit=limit,
        )


@dataclass(frozen=True, kw_only=True)
class JudgedView(Row):
    """A prompt with judged responses."""

    judged: PreferenceRow

    @property
    def verdict(self) -> str:
        """The text of the better response; if two rows differ in it alone, one of them is wrong."""
        return " ".join(part.text for turn in self.judged.chosen for part in turn.parts if isinstance(part, TextPart))


def sides_of(row: Row) -> dict[str, tuple[Message, ...]]:
    """Return the turns of each of a row's judged responses, by its name; none for other rows."""
    return {"chosen": row.judged.chosen, "rejected": row.judged.rejected} if isinstance(row, JudgedView) else {}


def image_count(row: Row) -> int:
    """Return the number of images of a row and its judged responses."""
    return len(images_of(row.messages)) + sum(len(images_of(turns)) for turns in sides_of(row).values())


def views(rows: Mapping[int, PreferenceRow]) -> dict[int, Row]:
    """Return rows with judged responses in the form that the checks need."""
    return {
        index: JudgedView(
            messages=row.messages,
            answer="",
            datasource=row.datasource,
            location=row.location,
            plain=row.plain,
            judged=row,
        )
        for index, row in rows.items()
    }


# The number of rows whose images are in memory at a time, in all threads together.
_AT_A_TIME = 64


@dataclass(frozen=True, kw_only=True)
class RowContent:
    """The content of one row. Rows with equal digests are equal in what the digest covers."""

    question: bytes
    """Digest of the prompt: its text, ignoring spaces and case, its images and its videos."""
    opening: bytes | None
    """Digest of the first question and its images, ignoring the system turn and later turns, so that a trajectory equals the
    question that it answers. None if there is no image before the model's first turn."""
    repeated: bytes
    """Digest by which rows repeat or contradict one another: the prompt and, in any order, its judged responses."""
    answer: str
    sizes: tuple[tuple[int, int], ...]
    """Width and height of each image."""
    error: str | None
    """Why an image or a video cannot be read; the digests are then empty."""


def contents(rows: Mapping[int, Row]) -> Iterator[tuple[int, RowContent]]:
    """Yield the content of each row, in order; several threads decode images, which are not kept."""
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as threads:
        items = iter(rows.items())
        while chunk := list(itertools.islice(items, _AT_A_TIME)):
            found = threads.map(content_of, [row for _, row in chunk])
            yield from zip((index for index, _ in chunk), found, strict=True)


def content_of(row: Row) -> RowContent:
    """Return the content of a row; its prompt is everything but a last turn of the assistant."""
    prompt = row.messages[:-1] if is_conversation(row) else row.messages
    answer = (
        row.verdict if isinstance(row, JudgedView) else row.answer or _text((row.response or row.messages[-1]).parts)
    )
    sizes: list[tuple[int, int]] = []
    read: dict[int, bytes] = {}

    def pixels(part: ImagePart | VideoPart) -> bytes:
        if id(part) not in read:
            if isinstance(part, ImagePart):
                image = load_image(part, location=row.location)
                sizes.append(image.size)
                shape, data = image.size, image.tobytes()
            else:
                frames = load_video(part, location=row.location).frames
                shape, data = frames.shape, frames.tobytes()
            read[id(part)] = repr(shape).encode() + hashlib.sha256(data).digest()
        return read[id(part)]

    def digest(turns: Sequence[Message]) -> bytes:
        normalised = (f"{turn.role}\0{''.join(_text(turn.parts).split()).casefold()}\0" for turn in turns)
        made = hashlib.sha256("".join(normalised).encode())
        for found in (images_of(turns), videos_of(turns)):
            for part in found:
                made.update(pixels(part))
        return made.digest()

    before = list(itertools.takewhile(lambda message: message.role != "assistant", row.messages))
    opening = [message for message in before if message.role != "system"]
    try:
        list(map(pixels, images_of(row.messages)))
        question = digest(prompt)
        return RowContent(
            question=question,
            opening=digest(opening) if images_of(opening) else None,
            repeated=question + b"".join(sorted(map(digest, sides_of(row).values()))),
            answer=answer,
            sizes=tuple(sizes),
            error=None,
        )
    except UserError as error:
        return RowContent(
            question=b"", opening=None, repeated=b"", answer=answer, sizes=tuple(sizes), error=str(error)
        )


def is_conversation(row: Row) -> bool:
    """Return whether a row ends with a turn to train on, so that it is not a prompt."""
    return row.messages[-1].role == "assistant"


def _text(parts: Iterable[object]) -> str:
    return " ".join(part.text for part in parts if isinstance(part, TextPart))


def answer_findings(rows: Mapping[int, Row], judge: VerifierJudge, *, timeout_s: float) -> Iterator[Finding]:
    """Yield the findings about the rows that have an answer.

    Args:
        timeout_s: seconds after which the judging of one answer is stopped.
    """
    judged: dict[int, Row] = {}
    for index, row in rows.items():
        if not row.answer:
            continue
        try:
            judge.verifier.check_label(row.answer)
            judged[index] = row
        except ValueError as error:
            yield Finding(kind="gold refused", index=index, location=row.location, what=f"{judge.name}: {error}")
    if not judged:
        return
    labels = [row.answer for row in judged.values()]
    with judge:
        scores = judge.judge([Item(prompt="", response=_response(judge.verifier, one), label=one) for one in labels])
    for (index, row), score in zip(judged.items(), scores, strict=True):
        if score.parts.get("ungradable"):
            what = f"{judge.name} cannot read the answer {row.answer!r}, so no response can be correct"
            yield Finding(kind="gold refused", index=index, location=row.location, what=what)
        elif score.parts.get("accuracy", score.score) < 1.0:
            cause = f"was stopped after {timeout_s:g} s on" if score.timed_out else "does not accept"
            what = f"{judge.name} {cause} a response that gives the answer {row.answer!r} itself"
            yield Finding(kind="gold wrong", index=index, location=row.location, what=what)


def _response(verifier: Verifier, label: str) -> str:
    """Return a response as a policy would be trained to write it: the thought and the answer, each in its tags."""
    gold = verifier.answer_of(label) if isinstance(verifier, (AnswerVerifier, Composition)) else label
    return f"<think>\nThis is known.\n</think>\n<answer>{gold}</answer>"


def prompts_of(rows: Mapping[int, Row]) -> dict[bytes, str]:
    """Return the location of the first row with each prompt or opening, by digest, where the images can be read."""
    known: dict[bytes, str] = {}
    for index, content in contents(rows):
        for digest in (content.question, content.opening) if content.error is None else ():
            if digest is not None:
                known.setdefault(digest, rows[index].location)
    return known


class Repeats:
    """Finds rows whose prompt repeats that of an earlier row, or of a row in another file."""

    def __init__(self, others: Sequence[Mapping[bytes, str]] = ()) -> None:
        """Args: others: `prompts_of` other files."""
        self._others = others
        self._seen: dict[bytes, tuple[str, str]] = {}

    def findings(self, index: int, row: Row, content: RowContent) -> Iterator[Finding]:
        """Yield the findings about the file's next row, whose images can be read."""
        for other in self._others:
            place = other.get(content.question) or (content.opening and other.get(content.opening))
            if place:
                yield Finding(kind="leak", index=index, location=row.location, what=f"asks what {place} asks")
        first, answer = self._seen.setdefault(content.repeated, (row.location, content.answer))
        if first == row.location:
            return
        if answer.strip() == content.answer.strip():
            yield Finding(kind="duplicate", index=index, location=row.location, what=f"repeats {first}")
        else:
            is_judged = isinstance(row, JudgedView)
            asked = f"judges the responses of {first}" if is_judged else f"asks what {first} asks"
            had, instead = (repr(text if len(text) <= 60 else f"{text[:57]}...") for text in (content.answer, answer))
            what = f"{asked}, but has the {'verdict' if is_judged else 'answer'} {had} instead of {instead}"
            yield Finding(kind="contradiction", index=index, location=row.location, what=what)


# The special tokens of common chat templates, used if no model is given.
COMMON = re.compile(r"<\|\w+\|>|<｜[\w▁]+｜>|<(?:start|end)_of_turn>|\[/?INST\]|</s>")


def spelled_findings(rows: Mapping[int, Row], control: re.Pattern[str]) -> Iterator[Finding]:
    """Yield one finding per row that writes special tokens as text.

    Args:
        control: matches the spelling of each special token.
    """
    for index, row in rows.items():
        counts: dict[str, Counter[str]] = {}
        for message in _messages(row):
            for part in message.parts:
                if isinstance(part, TextPart) and (found := [one[0] for one in control.finditer(part.text)]):
                    counts.setdefault(message.role, Counter()).update(found)
        if counts:
            texts = {
                role: ", ".join(f"{text} ({count} x)" if count > 1 else text for text, count in of_role.most_common())
                for role, of_role in counts.items()
            }
            what = "; ".join(f"the {role}'s text: {text}" for role, text in texts.items())
            yield Finding(kind="special tokens", index=index, location=row.location, what=what)


def _messages(row: Row) -> Iterator[Message]:
    yield from row.messages
    if row.response is not None:
        yield row.response
    if row.prefill:
        yield Message(role="assistant", parts=(TextPart(row.prefill),))
    for turns in sides_of(row).values():
        yield from turns


def _refused(check: Callable[[], object]) -> str | None:
    try:
        check()
    except UserError as error:
        return str(error)
    return None


def refusals(rows: Mapping[int, Row]) -> tuple[list[Finding], list[str]]:
    """Return a finding for each row that no training takes, and how many rows RL or SFT refuses.

    A row that begins the response is one for RL, although SFT could train on that beginning.
    """
    findings: list[Finding] = []
    refused: dict[str, list[str]] = {"train_ppo_ray": [], "train_sft": []}
    for index, row in rows.items():
        lacking = None if row.answer else f"{row.location}: has no answer for RL to reward"
        rl = _refused(partial(check_prompt, row)) or lacking
        sft = _refused(partial(loss_turns, demonstration(row), every_turn=True))
        refused["train_ppo_ray"] += [rl] if rl else []
        refused["train_sft"] += [sft] if sft else []
        if rl and (row.prefill or sft):
            what = rl.removeprefix(f"{row.location}: ")
            findings.append(Finding(kind="answer", index=index, location=row.location, what=what))
    notes = [
        f"{name} refuses {len(reasons):,} of the {len(rows):,} rows; the first: {reasons[0]}"
        for name, reasons in refused.items()
        if reasons
    ]
    return findings, notes


class Lengths:
    """Encodes rows as training and engine do, and compares them with the limits of a training."""

    def __init__(
        self, model: str, *, max_len: int, max_new_tokens: int | None, trust_remote_code: bool = False
    ) -> None:
        """Load the model's processor.

        Args:
            max_len: the most tokens of prompt, images and response together, in the trainer and in the engine.
            max_new_tokens: tokens reserved for a response; None reserves one.
        """
        self._model = model
        self._checkpoint = Checkpoint(model, trust_remote_code=trust_remote_code)
        self._refusal = _refused(partial(check_embeddings, self._checkpoint))
        self.max_len, self.room = max_len, max_new_tokens or 1
        self.longest_prompt = max_len - self.room
        self.prompts: list[int] = []
        """Tokens of each prompt that was encoded, images included."""
        self.conversations: list[int] = []
        """The same for rows that end with a turn to train on, including that turn."""

    def finding(self, index: int, row: Row) -> Finding | None:
        """Encode one row as RL and as SFT take it, or with each of its judged responses; return the first problem."""
        if self._refusal is not None:
            return Finding(kind="encoding", index=index, location=row.location, what=self._refusal)
        if isinstance(row, JudgedView):
            check = partial(check_response, first=len(row.messages))
            wholes = zip(sides_of(row), row.judged.sides, strict=True)
            found = [self._finding(index, whole, name=name, check=check) for name, whole in wholes]
            return next((finding for finding in found if finding is not None), None)
        check = partial(check_sample, every_turn=True)
        if row.response is None:
            return self._finding(index, row, check=check)
        return self._finding(index, row, check=check) or self._finding(index, demonstration(row), check=check)

    def _finding(self, index: int, row: Row, *, check: Callable[..., object], name: str = "") -> Finding | None:
        """Args: check: what a training requires of a conversation in addition to its encoding."""
        kit, processor, whole = self._checkpoint.kit, self._checkpoint.processor, is_conversation(row)
        try:
            check_images_taken([row], kit=kit, model=self._model)
            encoded = encode_row(row, kit=kit, processor=processor, add_generation_prompt=not whole)
            if whole:
                check(row, kit=kit, processor=processor)
        except UserError as error:
            what = str(error).removeprefix(f"{row.location}: ")
            return Finding(kind="encoding", index=index, location=row.location, what=what)
        tokens = len(encoded.token_ids)
        (self.conversations if whole else self.prompts).append(tokens)
        if whole and tokens > self.max_len:
            too_long = f"takes {tokens} tokens, more than --max_len {self.max_len}"
            what = f"the prompt with {name} {too_long}" if name else f"{too_long}: SFT leaves it out"
        elif not whole and tokens > self.longest_prompt:
            what = f"the prompt takes {tokens} tokens and a response {self.room}, more than --max_len {self.max_len}"
        else:
            return None
        return Finding(kind="length", index=index, location=row.location, what=what)

    @property
    def control_texts(self) -> re.Pattern[str]:
        """Matches the texts that only the model's chat template may write."""
        return control_texts(self._checkpoint.kit, self._checkpoint.processor)

    @property
    def notes(self) -> list[str]:
        """A sentence if `max_len` exceeds the model's positions."""
        known = self._checkpoint.config.get_text_config().max_position_embeddings
        if self.max_len <= known:
            return []
        return [f"--max_len {self.max_len} is more than the {known} positions of {self._model}; lower it"]
