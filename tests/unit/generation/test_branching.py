"""Episodes that branch, on an engine that says another character each time, so that every id can be worked out by hand."""

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import scripted_engines
from helpers.character_kit import END, IMAGE, NEWLINE, PATCHES, PLACEHOLDER
from helpers.conversations import message, row
from helpers.scripted_engines import play_group

from lmm_r1.agents.environment import Answered, Environment, Episode, Turn
from lmm_r1.config.ppo import AgentConfig
from lmm_r1.data.messages import ImagePart, Row, TextPart
from lmm_r1.data.sample import Sample
from lmm_r1.errors import UserError
from lmm_r1.generation.executors import BranchingRollout
from lmm_r1.generation.group import GroupSettings
from lmm_r1.rl.samples import PassLimits, TrainingSample, forward_passes, tree_tokens

FOUR = replace(scripted_engines.SETTINGS.sampling, n_samples=4)
SETTINGS = replace(scripted_engines.SETTINGS, sampling=FOUR, max_len=200, branches=4)
LIMITS = AgentConfig(max_turns=4, max_images=9, answer_s=5.0, overturn="keep")
PROMPT = row(message("user", "?"), answer="2")


class CountingEngine:
    """Says a letter each time, `A` first; gives the event loop a turn before, as engines do."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, ...]] = []

    async def generate(self, request: Any, parameters: Any, request_id: str) -> AsyncIterator[SimpleNamespace]:
        ids = tuple(request["prompt_token_ids"])
        token_ids = [ord("A") + len(self.asked), END]
        self.asked.append(ids)
        await asyncio.sleep(0)
        part = SimpleNamespace(
            index=0,
            token_ids=token_ids,
            logprobs=[{token: SimpleNamespace(logprob=-float(token))} for token in token_ids],
            finish_reason="stop",
            stop_reason=None,
        )
        read = [token for token in ids for _ in range(PATCHES if token == PLACEHOLDER else 1)]
        yield SimpleNamespace(outputs=[part], prompt_token_ids=read)


class Counting(Environment):
    """Shows how many turns it has answered, until it is over."""

    name = "counting"
    rewards = ("turns_before",)

    def __init__(self, *, turns: int = 3, picture: bool = False) -> None:
        self.turns, self.picture = turns, picture
        self.begun = 0
        self.closed: list[Episode] = []

    def begin(self, row: Row, *, seed: int) -> Episode:
        self.begun += 1
        return _CountingEpisode(self)


class _CountingEpisode(Episode):
    def __init__(self, environment: Counting) -> None:
        self.environment = environment
        self.heard: list[str] = []

    async def answer(self, turn: Turn) -> Answered:
        self.heard.append(turn.text)
        if len(self.heard) == self.environment.turns:
            return Answered(rewards={"turns_before": len(self.heard) - 1.0})
        image = (ImagePart(IMAGE),) if self.environment.picture else ()
        return Answered(shown=(TextPart(str(len(self.heard))), *image), rewards={"turns_before": 0.5})

    async def close(self) -> None:
        self.environment.closed.append(self)


class Locked(Counting):
    name = "locked"

    def begin(self, row: Row, *, seed: int) -> Episode:
        episode = super().begin(row, seed=seed)
        episode.lock = threading.Lock()
        return episode


def play(
    environment: Environment, *, settings: GroupSettings = SETTINGS, stored: list[Any] | None = None, **limits: Any
) -> tuple[list[Sample], CountingEngine]:
    engine = CountingEngine()
    samples = play_group(
        partial(BranchingRollout, environment=environment),
        engine,
        PROMPT,
        n_samples=settings.sampling.n_samples,
        settings=settings,
        limits=replace(LIMITS, **limits),
        stored=stored,
    )
    return list(samples), engine


def generated(sample: Sample) -> str:
    return "".join(chr(segment.token_ids[0]) for segment in sample.generated)


def turns_in_common(one: Sample, other: Sample) -> int:
    pairs = zip(one.generated, other.generated, strict=False)
    return next((count for count, (mine, theirs) in enumerate(pairs) if mine is not theirs), len(one.generated))


def test_branches_have_their_first_turns_in_common_and_go_on_by_themselves():
    environment = Counting(turns=3)
    samples, engine = play(environment, branch_turn=1)
    assert environment.begun == 1
    assert sorted(generated(sample)[0] for sample in samples) == ["A"] * 4
    # One first turn, then two of each.
    assert len(engine.asked) == 1 + 4 * 2
    assert len({generated(sample) for sample in samples}) == 4
    begun = [ord("u"), ord("?"), END, NEWLINE, ord("a")]
    shown = [[NEWLINE, ord("u"), ord(count), END, NEWLINE, ord("a")] for count in "12"]
    for sample in samples:
        first, second, third = (list(segment.token_ids) for segment in sample.generated)
        assert sample.token_ids == [*begun, *first, *shown[0], *second, *shown[1], *third]
        assert tuple(sample.token_ids[:-2]) in engine.asked
        assert sample.scored.reward == 0.5 + 0.5 + 2.0
        assert [said.role for said in sample.played.said] == ["assistant", "user", "assistant", "user", "assistant"]
    one, other = samples[:2]
    assert turns_in_common(one, other) == 1
    assert one.segments[:3] == other.segments[:3]
    assert all(mine is theirs for mine, theirs in zip(one.segments[:3], other.segments[:3], strict=True))
    assert len({id(episode) for episode in environment.closed}) == len(environment.closed) == 4


def test_pictures_of_turns_in_common_are_put_once():
    stored: list[Any] = []
    samples, _ = play(Counting(turns=3, picture=True), branch_turn=2, stored=stored)
    # One of the first turn and one of the second, both before the branches part.
    assert len(stored) == 2
    assert {tuple(item.key for item in sample.media) for sample in samples} == {("object 1", "object 2")}
    assert {sample.played.images for sample in samples} == {2}


def test_a_group_has_as_many_trunks_as_branches_leave_room_for():
    environment = Counting(turns=2)
    settings = replace(SETTINGS, branches=2, sampling=replace(SETTINGS.sampling, n_samples=6))
    samples, engine = play(environment, branch_turn=1, settings=settings)
    assert environment.begun == 3
    assert Counter(generated(sample)[0] for sample in samples) == {"A": 2, "B": 2, "C": 2}
    assert len(engine.asked) == 3 + 6


def test_an_environment_that_cannot_be_copied_is_refused_by_name():
    environment = Locked()
    with pytest.raises(
        UserError, match="environment locked: its episodes cannot branch, .*lock.* leave --agent.branches out"
    ):
        play(environment, branch_turn=1)
    assert len(environment.closed) == environment.begun, "also the trunk is closed"


def test_a_failure_of_one_branch_costs_that_branch_alone():
    class Failing(Counting):
        name = "failing"

        def begin(self, row: Row, *, seed: int) -> Episode:
            self.begun += 1
            return _FailingEpisode(self)

    class _FailingEpisode(_CountingEpisode):
        async def answer(self, turn: Turn) -> Answered:
            if turn.text == "C":
                raise RuntimeError("no such square")
            return await super().answer(turn)

    samples, _ = play(Failing(turns=3), branch_turn=1)
    assert Counter(sample.played.end for sample in samples) == {"over": 3, "failed": 1}


def test_training_knows_what_branches_have_in_common(monkeypatch):
    monkeypatch.setattr("lmm_r1.data.sample.LEAST_SHARED", 1)
    settings = replace(SETTINGS, branches=2)
    samples, _ = play(Counting(turns=3, picture=True), branch_turn=2, settings=settings)
    trained = [TrainingSample.of(sample, max_len=200, place=place) for place, sample in enumerate(samples)]
    # Two turns with what was shown behind each: the pictures of two trunks are not the same.
    in_common = [sum(len(segment.token_ids) for segment in sample.segments[1:5]) for sample in samples]
    prompt, (trunk, _, other, _) = trained[0].prompt_tokens, sorted(in_common)
    assert tree_tokens(trained) == prompt + trunk + other + 4 * 2
    (passes,) = forward_passes(trained, ranks=1, limits=PassLimits(samples=None, tokens=40, share_prefix=True))
    assert sorted("".join(sorted(generated(samples[one.place])[0] for one in batch)) for batch in passes) == [
        "AA",
        "BB",
    ]
