"""Episodes of environments for tests: rows to begin with, turns to answer, and what was shown."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from helpers.conversations import message, row
from PIL import Image

from lmm_r1.agents.environment import Answered, Environment, Turn
from lmm_r1.data.messages import ImagePart, Row, TextPart


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
