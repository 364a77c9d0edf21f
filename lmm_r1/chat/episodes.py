"""Episodes in a chat: turns and what the environment answers on the screen, its pictures in a folder, and how it went."""

from __future__ import annotations

import os

from lmm_r1.agents.environment import Answered
from lmm_r1.chat.screen import AnswerWriter, Screen
from lmm_r1.config.ppo import AgentConfig
from lmm_r1.data.images import load_image
from lmm_r1.data.messages import ImagePart, TextPart
from lmm_r1.data.picture_files import PictureFolder
from lmm_r1.data.sample import Completion


class EpisodeScreen:
    """Shows an episode as it is played: each turn as an answer, and in between what the environment says."""

    def __init__(self, screen: Screen, *, environment: str, thinking: bool, pictures: PictureFolder | None) -> None:
        """Args:
        environment: its name.
        thinking: whether the prompt has opened the first thought of a turn already.
        pictures: where those are written that the environment shows; None writes none.
        """
        self._screen, self._environment, self._thinking, self._pictures = screen, environment, thinking, pictures
        self._writer: AnswerWriter | None = None

    def begin_turn(self) -> None:
        self._writer = self._screen.answer(thinking=self._thinking)

    def write(self, piece: str) -> None:
        assert self._writer is not None, "a turn has begun"
        self._writer.write(piece)

    def end_turn(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def answered(self, answered: Answered) -> None:
        if not answered.is_over:
            parts = (part.text if isinstance(part, TextPart) else self._picture(part) for part in answered.shown)
            self._screen.say(f"{self._environment}: {''.join(parts).strip()}")

    def _picture(self, part: object) -> str:
        """Return what stands in the place of a picture: its size, and the file that it was written to."""
        assert isinstance(part, ImagePart), "environments show texts and images"
        image = load_image(part, location=f"a picture of {self._environment}")
        written = ""
        if self._pictures is not None:
            written = f", written to {os.path.relpath(str(self._pictures.kept(part).source))}"
        return f"[picture of {image.width}x{image.height} pixels{written}]"


def greeting(environment: str) -> str:
    """Return what a user is told of a chat with an environment."""
    return (
        f"each message begins an episode with the environment {environment}; the conversation goes on from its last turn, "
        "and keeps nothing of those before it"
    )


def episode_account(completion: Completion, limits: AgentConfig, *, max_new_tokens: int) -> str:
    """Return how an episode went: `2 turns, tool calls 1, failed calls 0`, and why it ended where a limit did it."""
    played = completion.played
    if played is None:
        return "stopped"
    ends = {
        "over": "",
        "turns": f"ended at --agent_max_turns {limits.max_turns}",
        "images": f"ended at --agent_max_images {limits.max_images}",
        "tokens": "ended: the conversation fills --max_model_len",
    }
    numbers = {**played.counts, **played.rewards}
    told = [
        f"{played.turns} {'turn' if played.turns == 1 else 'turns'}",
        *(f"{name.replace('_', ' ')} {value:g}" for name, value in numbers.items()),
        ends[played.end],
        f"the last turn cut off at max_new_tokens {max_new_tokens}" if completion.finish_reason == "length" else "",
    ]
    return ", ".join(filter(None, told))
