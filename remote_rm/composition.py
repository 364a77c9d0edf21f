"""A verifier made of others: their weighted sum, or the one that each label names, or both.

python -m remote_rm composition --part math=1.0 --part format=0.5
python -m remote_rm composition --select math --select choice --part format=0.5    # labels: `choice: B`, `math: 42`
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, cast

from remote_rm.answer_verifier import AnswerVerifier, finite_number
from remote_rm.registry import get_verifier
from remote_rm.verifier import AskingVerifier, Item, Score, Verifier

if TYPE_CHECKING:
    from typing_extensions import Self


LABEL_SEPARATOR = ":"
RESERVED_NAMES = ("accuracy", "ungradable", "timed_out")
DEFAULT_PARTS = ("math=1.0", "format=0.5")


@dataclass(frozen=True, kw_only=True)
class Part:
    """A verifier and how much its score (from 0.0 to 1.0) counts."""

    verifier: Verifier
    weight: float = 1.0

    @property
    def name(self) -> str:
        return self.verifier.name


def part_from(text: str) -> Part:
    """Return the part that `NAME=WEIGHT` or `NAME` (weight 1) describes; raises ValueError for anything else."""
    name, equals, weight = text.partition("=")
    if name == Composition.name:
        raise ValueError("a composition cannot be a part of itself; name its parts instead")
    try:
        verifier = get_verifier(name)
        if isinstance(verifier, AskingVerifier):
            raise ValueError(
                f"{name} asks others, which no part can; serve it by itself, with weights and a rule of its own"
            )
        return Part(verifier=verifier, weight=finite_number(weight) if equals else 1.0)
    except (ValueError, argparse.ArgumentTypeError) as error:
        raise ValueError(f"{text!r}: {error}") from error


@dataclass(frozen=True, kw_only=True)
class Composition:
    """The weighted sum of the scores of `parts`, and of the one in `select` that the label names.

    The score is that of the leading verifier: the selected one, or else the first part. The parts of its scores are the
    leading one's `accuracy`, the score of each of `parts` under its name, and `ungradable`.
    """

    name: ClassVar[str] = "composition"

    parts: tuple[Part, ...] = ()
    select: tuple[Part, ...] = ()

    def __post_init__(self) -> None:
        """Use math and format by default; raises ValueError for repeated names."""
        if not self.parts and not self.select:
            object.__setattr__(self, "parts", tuple(map(part_from, DEFAULT_PARTS)))
        for flag, given in (("part", self.parts), ("select", self.select)):
            names = [part.name for part in given]
            twice = sorted({name for name in names if names.count(name) > 1 or name in RESERVED_NAMES})
            if twice:
                raise ValueError(
                    f"--{flag} {twice[0]} is given more than once or is a reserved name; give each name once"
                )

    def check_label(self, label: str) -> None:
        """Raise a ValueError for a label that one of the parts refuses, or that names no verifier to select."""
        chosen, gold = self._selected(label)
        if self.select and not chosen:
            raise ValueError(
                f"the label {label[:100]!r} names no verifier; write NAME{LABEL_SEPARATOR} before the gold answer, "
                f"with one of {', '.join(part.name for part in self.select)}"
            )
        for part in (*chosen, *self.parts):
            part.verifier.check_label(gold)

    def quick_score(self, item: Item) -> Score | None:
        self.check_label(item.label)
        return self._composed(item, lambda verifier, own: verifier.quick_score(own))

    def score(self, item: Item) -> Score:
        self.check_label(item.label)
        return cast(Score, self._composed(item, lambda verifier, own: verifier.score(own)))

    def failed_score(self, item: Item) -> Score:
        return cast(Score, self._composed(item, lambda verifier, own: verifier.failed_score(own)))

    def answer_of(self, label: str) -> str:
        chosen, gold = self._selected(label)
        for part in (*chosen, *self.parts):
            if isinstance(part.verifier, AnswerVerifier):
                return part.verifier.answer_of(gold)
        return gold

    def _selected(self, label: str) -> tuple[tuple[Part, ...], str]:
        """The verifier that the label names, as a tuple of at most one, and the gold answer without that name."""
        name, separator, gold = label.partition(LABEL_SEPARATOR)
        chosen = tuple(part for part in self.select if separator and part.name == name.strip())
        return chosen, gold.strip() if chosen else label

    def _composed(self, item: Item, judge: Callable[[Verifier, Item], Score | None]) -> Score | None:
        chosen, gold = self._selected(item.label)
        own = replace(item, label=gold)
        judged: list[tuple[Part, Score]] = []
        for part in (*chosen, *self.parts):
            score = judge(part.verifier, own)
            if score is None:
                return None
            judged.append((part, score))
        first = judged[0][1] if chosen or not self.select else None
        leading = 0.0 if first is None else first.score
        parts = {"accuracy": leading if first is None else first.parts.get("accuracy", leading)}
        parts |= {part.name: score.score for part, score in judged[len(chosen) :]}
        parts["ungradable"] = max((score.parts.get("ungradable", 0.0) for _, score in judged), default=0.0)
        return Score(reward=sum(part.weight * score.score for part, score in judged), score=leading, parts=parts)

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--part",
            action="append",
            metavar="NAME=WEIGHT",
            help=f"a verifier that judges every item, and its weight; may be repeated, without any of both flags: "
            f"{' '.join(DEFAULT_PARTS)}",
        )
        parser.add_argument(
            "--select",
            action="append",
            metavar="NAME=WEIGHT",
            help="a verifier that judges the items whose label opens with `NAME:`; may be repeated",
        )

    @classmethod
    def from_arguments(cls, args: argparse.Namespace) -> "Self":
        """Return the verifier that the flags describe; raises ValueError for a part that is none."""
        return cls(parts=tuple(map(part_from, args.part or ())), select=tuple(map(part_from, args.select or ())))
