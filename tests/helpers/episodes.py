"""Episodes of the shipped environments, played turn by turn, and small Sokoban levels with optima derived by hand."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from helpers.conversations import message, row
from PIL import Image

from lmm_r1.agents.environment import Answered, Environment, Turn
from lmm_r1.data.messages import ImagePart, Message, Row, TextPart


def coordinates_image(width: int, height: int) -> Image.Image:
    """Return an image whose pixel at x, y is (x, y, 7), counted modulo 256."""
    pixels = bytes(value for y in range(height) for x in range(width) for value in (x % 256, y % 256, 7))
    return Image.frombytes("RGB", (width, height), pixels)


def image_row(*images: Image.Image | ImagePart) -> Row:
    return row(message("user", *images, "What does the sign say?"))


async def answers_of(environment: Environment, asked: Row, texts: Sequence[str], *, seed: int = 0) -> list[Answered]:
    """Return what one episode says to turns, one after the other; it is closed behind them."""
    episode = environment.begin(asked, seed=seed)
    try:
        return [await episode.answer(turn(text, number=number)) for number, text in enumerate(texts)]
    finally:
        await episode.close()


def play(environment: Environment, asked: Row, *texts: str, seed: int = 0) -> list[Answered]:
    return asyncio.run(answers_of(environment, asked, texts, seed=seed))


def turn(text: str, *, number: int = 0, ended: bool = True) -> Turn:
    return Turn(text=text, number=number, ended=ended)


def text_of(answered: Answered) -> str:
    """Return what an answer says, `<image>` in the place of each image."""
    return "".join(part.text if isinstance(part, TextPart) else "<image>" for part in answered.shown)


def images_in(answered: Answered) -> list[Image.Image]:
    """Return the images of an answer, each in full resolution."""
    return [part.source for part in answered.shown if isinstance(part, ImagePart)]


@dataclass(frozen=True, kw_only=True)
class Played:
    answers: list[Answered]
    rewards: dict[str, float]
    """Summed over the turns."""
    counts: Counter


def row_of(text="Solve it.", *, answer="", **columns):
    message = Message(role="user", parts=(TextPart(text),))
    return Row(messages=(message,), answer=answer, datasource="", location="rows.jsonl, line 3", columns=columns)


def play_episode(environment, row, *texts):
    """Give the turns to a new episode; it must be over with the last of them or go on after it, and not before."""

    async def run():
        episode = environment.begin(row, seed=0)
        answers = []
        for number, text in enumerate(texts):
            assert not answers or not answers[-1].is_over, f"over before turn {number}"
            answers.append(await episode.answer(Turn(text=text, number=number, ended=True)))
        await episode.close()
        return answers

    answers = asyncio.run(run())
    rewards: dict[str, float] = {}
    counts: Counter = Counter()
    for answered in answers:
        counts.update(answered.counts)
        for name, value in answered.rewards.items():
            rewards[name] = rewards.get(name, 0.0) + value
    return Played(answers=answers, rewards=rewards, counts=counts)


def texts_of(parts):
    return "".join(part.text for part in parts if isinstance(part, TextPart))


ONE_PUSH = "#####\n#@$.#\n#####"
# L pushes the box left, U and L walk around it, D pushes it down: 4 moves, 2 of them pushes.
CORNER = "######\n#    #\n# $@ #\n#.   #\n######"
# The box must go left, and the player can't get to its right.
WRONG_SIDE = "#######\n#@ .$ #\n#######"
IN_A_CORNER = "#####\n#$ @#\n# . #\n#####"
