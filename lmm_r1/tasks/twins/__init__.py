"""Tasks whose question is put in words or in a picture: the same seed gives the same questions in both modalities.

A family draws the answer first, uniformly from the answers that its question may have, and then a scene with that answer.
So the question without the scene says nothing about the answer. What is held out is a combination of factors of the
question, such as the colour and the shape to count, and never depends on the answer.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Protocol, TypeAlias

from PIL import Image

from lmm_r1.tasks import LEVELS, TEST_SHARE, Modality, Parts, Split, TaskRow, check_image_share, kind_of_row

Factors: TypeAlias = tuple[str | int, ...]


@dataclass(frozen=True, kw_only=True)
class TwinItem:
    """A question before it is put in words or in a picture."""

    facts: str
    """The scene in words: all that the picture shows and the question needs."""
    question: str
    """The same next to the words and to the picture."""
    answer: str
    choices: int
    """How many answers the question may have at this difficulty, all equally likely."""
    thought: str
    draw: Callable[[int], Image.Image]
    """Returns the picture at a scale of whole pixels."""


class Maker(Protocol):
    """Draws an item of a family."""

    def __call__(self, factors: Factors, *, seen: tuple[Factors, ...], level: int, rng: random.Random) -> TwinItem:
        """Return an item about `factors`; the scene may show those of `seen` as well, but no others."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family of questions."""

    name: str
    factors: tuple[Factors, ...]
    """All combinations, the same at each difficulty."""
    make: Maker


@cache
def held(family: Family, split: Split) -> tuple[Factors, ...]:
    """Return the combinations of a split; no seed or difficulty moves one across.

    A hash orders them, and the first fifth is held out. One is passed over if training would lack a value of it then.
    """
    order = sorted(family.factors, key=lambda factors: hashlib.sha256(f"{family.name} {factors}".encode()).digest())
    train = list(order)
    test: list[Factors] = []
    for factors in order:
        others = [other for other in train if other != factors]
        if len(test) < round(TEST_SHARE * len(order)) and set(factors) <= set(itertools.chain(*others)):
            train = others
            test.append(factors)
    return tuple(train if split == "train" else test)


@dataclass(frozen=True, kw_only=True)
class TwinTask:
    """Rows of a family. Train and test share no combination of its factors, and so no row.

    Each row has the columns `difficulty`, `factors` and `chance`: how often a guess among the question's answers is right.
    """

    family: Family
    difficulty: int = 2
    """From 1 to 5: more objects, larger numbers or finer readings."""
    scale: int = 1
    """How many times larger pictures are than their 112 to 196 pixels."""
    image_share: float = 0.5
    """How many of the rows in modality `mixed` have an image, 0 to 1, evenly spread over the rows."""

    def __post_init__(self) -> None:
        check_image_share(self.image_share)
        if self.difficulty not in LEVELS:
            raise ValueError(f"difficulty {self.difficulty}: it must be from {LEVELS[0]} to {LEVELS[-1]}")
        if not 1 <= self.scale <= 16:
            raise ValueError(f"scale {self.scale}: it must be from 1 to 16")

    def at_difficulty(self, level: int) -> TwinTask:
        """The task with this difficulty."""
        return replace(self, difficulty=level)

    def generate(self, *, split: Split, modality: Modality, rows: int, seed: int) -> Iterator[TaskRow]:
        """Yields `rows` rows, each from its own random stream, which does not depend on the modality."""
        for index in range(rows):
            kind = kind_of_row(index, modality=modality, image_share=self.image_share)
            factors, item = self._item(split=split, seed=seed, index=index)
            yield TaskRow(
                messages=[{"role": "user", "content": self._picture(item) if kind == "image" else _words(item)}],
                answer=item.answer,
                datasource=f"{self.family.name}_{kind}_{self.difficulty}",
                solution=f"<think>{item.thought}</think><answer>{item.answer}</answer>",
                columns={"difficulty": self.difficulty, "factors": list(factors), "chance": 1 / item.choices},
            )

    def _item(self, *, split: Split, seed: int, index: int) -> tuple[Factors, TwinItem]:
        rng = random.Random(f"{self.family.name} {self.difficulty} {split} {seed} {index}")
        factors = rng.choice(held(self.family, split))
        # Combinations that are held out appear in no scene of the training rows, not even next to what is asked about.
        seen = held(self.family, split) if split == "train" else self.family.factors
        return factors, self.family.make(factors, seen=seen, level=self.difficulty, rng=rng)

    def _picture(self, item: TwinItem) -> Parts:
        return [{"type": "image", "image": item.draw(self.scale)}, {"type": "text", "text": item.question}]


def _words(item: TwinItem) -> str:
    return f"{item.facts}\n{item.question}"
