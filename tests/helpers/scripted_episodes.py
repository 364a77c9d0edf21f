"""Episodes outside of training without a checkpoint: an engine that answers by a function of the prompt's text."""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

from helpers.character_kit import END, PATCHES, PLACEHOLDER, CharacterKit, CharacterTokenizer

from lmm_r1.agents.environment import Answered, Environment, Episode, Turn
from lmm_r1.config.ppo import AgentConfig
from lmm_r1.data.messages import ImagePart, Row, TextPart
from lmm_r1.generation.engine import EpisodeSettings, end_tasks
from lmm_r1.generation.episode_engine import EpisodeEngine
from lmm_r1.generation.request import PromptCodec
from lmm_r1.generation.vllm_engine import VllmEngine

LIMITS = AgentConfig(max_turns=3, max_images=4, answer_s=5.0, overturn="keep")
Says = Callable[[str], str | tuple[str, str]]
"""What is said to a prompt's text; with the text that ends it, where one does."""


class TalkingEngine:
    """Gives a token at each turn of the event loop, as an engine does that is driven from there."""

    def __init__(self, says: Says) -> None:
        self.says = says
        self.requests: list[tuple[str, Any]] = []
        self.running = self.most_at_once = 0

    @property
    def has_work(self) -> bool:
        return self.running > 0

    async def generate(self, request: Any, parameters: Any, request_id: str) -> AsyncIterator[SimpleNamespace]:
        ids = request["prompt_token_ids"]
        prompt = CharacterTokenizer().decode(ids, skip_special_tokens=False)
        self.requests.append((prompt, parameters))
        said = self.says(prompt)
        text, stop = (said, None) if isinstance(said, str) else said
        tokens = [ord(character) for character in text] + ([] if stop else [END])
        finish = "stop" if len(tokens) <= parameters.max_tokens else "length"
        tokens = tokens[: parameters.max_tokens]
        read = [token for token in ids for _ in range(PATCHES if token == PLACEHOLDER else 1)]
        self.running += 1
        self.most_at_once = max(self.most_at_once, self.running)
        try:
            for place, token in enumerate(tokens, start=1):
                await asyncio.sleep(0)
                last = place == len(tokens)
                part = SimpleNamespace(
                    index=0, token_ids=[token], logprobs=None, finish_reason=finish if last else None,
                    stop_reason=stop if last and finish == "stop" else None,
                )  # fmt: skip
                yield SimpleNamespace(outputs=[part], prompt_token_ids=read)
        finally:
            self.running -= 1


class ScriptedEnvironment(Environment):
    """Answers each turn by a function of it."""

    name = "scripted"
    rewards = ("step", "bonus")
    counts = ("calls", "wrong")

    def __init__(self, answers: Callable[[Turn], Any], *, stops: tuple[str, ...] = ()) -> None:
        self.answers, self.stops = answers, stops

    def shown_row(self, row: Row) -> Row:
        return row

    def begin(self, row: Row, *, seed: int) -> Episode:
        return _ScriptedEpisode(self.answers)


class _ScriptedEpisode(Episode):
    def __init__(self, answers: Callable[[Turn], Any]) -> None:
        self.answers = answers

    async def answer(self, turn: Turn) -> Answered:
        answered = self.answers(turn)
        return answered if isinstance(answered, Answered) else await answered


def told(*parts: Any, **settings: Any) -> Answered:
    shown = tuple(
        TextPart(part) if isinstance(part, str) else part if isinstance(part, ImagePart) else ImagePart(part)
        for part in parts
    )
    return Answered(shown=shown, **settings)


class TalkingVllm(VllmEngine):
    """A `VllmEngine` whose engine talks."""

    def __init__(self, says: Says, *, max_len: int) -> None:
        self.codec = PromptCodec(kit=CharacterKit(), processor=None, banned_token_ids=())
        self.codec.max_len = max_len
        self.engine, self.guesses, self.responses = TalkingEngine(says), False, 256
        self._loop = asyncio.new_event_loop()
        self._beside = ThreadPoolExecutor(max_workers=1)

    def close(self) -> None:
        end_tasks(self._loop, asyncio.all_tasks(self._loop))
        self._loop.close()


def episode_engine(
    says: Says, environment: Environment, *, max_len: int = 200, pictures: str = "whole", seed: int = 0,
    limits: AgentConfig = LIMITS,
) -> EpisodeEngine:  # fmt: skip
    """An engine of episodes; give it to `contextlib.closing`."""

    class Given(EpisodeSettings):
        def environment(self) -> Environment:
            return environment

    return EpisodeEngine(
        TalkingVllm(says, max_len=max_len), Given(agent="scripted", limits=limits, seed=seed, pictures=pictures)
    )
