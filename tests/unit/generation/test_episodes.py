"""Episodes on a hand-written engine and a kit whose tokens are characters, so that every id can be worked out by hand."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import scripted_engines
from helpers.character_kit import AFTER_IMAGE, END, IMAGE, NEWLINE, PATCHES, PLACEHOLDER
from helpers.conversations import message, row
from helpers.scripted_engines import LIMITS, play_group
from PIL import Image

from lmm_r1.agents.environment import Answered, Environment, Episode, Turn, TurnOptions, load_environment
from lmm_r1.config.ppo import AgentConfig
from lmm_r1.config.shared import ThoughtConfig
from lmm_r1.data.messages import ImagePart, Row, TextPart
from lmm_r1.data.sample import Cut, Said, Sample
from lmm_r1.errors import UserError
from lmm_r1.generation.episodes import EpisodeRollout
from lmm_r1.generation.group import GroupSettings
from lmm_r1.scoring import ScoredResponse
from remote_rm.verifier import Score

SETTINGS = replace(scripted_engines.SETTINGS, max_len=60)
PROMPT = row(message("user", "1+1?"), answer="2")
PROMPT_IDS = [*b"u1+1?", END, NEWLINE, ord("a")]
ScriptedTurn = tuple[bytes, str, str | None]
"""A turn's tokens, how it ended, and by which text."""


def said(text: str) -> ScriptedTurn:
    return bytes([*text.encode(), END]), "stop", None


class TalkingEngine:
    """Says the turns of a script one after the other; each episode has its own, in the order in which they begin."""

    def __init__(self, *scripts: Sequence[ScriptedTurn]) -> None:
        self.scripts = [list(script) for script in scripts]
        self.requests: list[tuple[Any, Any]] = []
        self._episodes: dict[tuple[int, ...], list[ScriptedTurn]] = {}

    async def generate(self, request: Any, parameters: Any, request_id: str) -> AsyncIterator[SimpleNamespace]:
        ids = tuple(request["prompt_token_ids"])
        self.requests.append((request, parameters))
        begun = next((known for known in self._episodes if ids[: len(known)] == known and len(ids) > len(known)), None)
        script = self.scripts.pop(0) if begun is None else self._episodes.pop(begun)
        token_ids, finish, reason = script.pop(0)
        self._episodes[(*ids, *token_ids)] = script
        logprobs = [{token: SimpleNamespace(logprob=-float(token))} for token in token_ids]
        part = SimpleNamespace(
            index=0, token_ids=list(token_ids), logprobs=logprobs, finish_reason=finish, stop_reason=reason
        )
        read = [token for token in ids for _ in range(PATCHES if token == PLACEHOLDER else 1)]
        yield SimpleNamespace(outputs=[part], prompt_token_ids=read)


class OneEpisode(TalkingEngine):
    """Says one script after the other, whatever it is asked with; a turn may be several pieces."""

    def __init__(self, *pieces: ScriptedTurn) -> None:
        super().__init__()
        self.pieces = list(pieces)

    async def generate(self, request: Any, parameters: Any, request_id: str) -> AsyncIterator[SimpleNamespace]:
        self.scripts, self._episodes = [[self.pieces.pop(0)]], {}
        async for output in super().generate(request, parameters, request_id):
            yield output


class Scripted(Environment):
    """Gives the same answers to every episode, or calls one that is a function."""

    name = "scripted"
    rewards = ("step",)
    counts = ("calls",)

    def __init__(self, *answers: Answered | Callable[[Turn], Any], stops: tuple[str, ...] = ()) -> None:
        self.answers, self.stops = answers, stops
        self.turns: list[Turn] = []
        self.closed: list[int] = []
        self.seeds: list[int] = []

    def begin(self, row: Row, *, seed: int) -> Episode:
        self.seeds.append(seed)
        return _ScriptedEpisode(self)


class _ScriptedEpisode(Episode):
    def __init__(self, environment: Scripted) -> None:
        self.environment = environment

    async def answer(self, turn: Turn) -> Answered:
        self.environment.turns.append(turn)
        answer = self.environment.answers[turn.number]
        return answer if isinstance(answer, Answered) else await answer(turn)

    async def close(self) -> None:
        self.environment.closed.append(1)


class LastTurnScorer:
    """Rewards 1 where the last turn is the label."""

    one_by_one = True

    def __init__(self) -> None:
        self.asked: list[ScoredResponse] = []

    async def rewards(self, batch: Sequence[ScoredResponse]) -> list[Score]:
        (item,) = batch
        self.asked.append(item)
        right = float(item.response == item.row.answer)
        return [Score(reward=right, score=right, parts={"accuracy": right})]


def told(*parts: str | Any, **settings: Any) -> Answered:
    return Answered(
        shown=tuple(TextPart(part) if isinstance(part, str) else ImagePart(part) for part in parts), **settings
    )


OVER = Answered()


def play(
    environment: Environment,
    *scripts: Sequence[ScriptedTurn],
    prompt: Row = PROMPT,
    settings: GroupSettings = SETTINGS,
    limits: AgentConfig = LIMITS,
    scorer: Any = None,
    stored: list[Any] | None = None,
    engine: TalkingEngine | None = None,
) -> tuple[list[Sample], TalkingEngine]:
    engine = engine or TalkingEngine(*scripts)
    samples = play_group(
        partial(EpisodeRollout, environment=environment),
        engine,
        prompt,
        n_samples=max(1, len(scripts)),
        settings=settings,
        limits=limits,
        scorer=scorer,
        stored=stored,
    )
    return list(samples), engine


def test_an_episode_is_the_ids_that_were_generated_and_shown_and_nothing_is_tokenized_again():
    (sample,), engine = play(Scripted(told("no"), OVER), [said("5"), said("2")])
    shown = [NEWLINE, *b"uno", END, NEWLINE, ord("a")]
    whole = [*PROMPT_IDS, ord("5"), END, *shown, ord("2"), END]
    assert sample.token_ids == whole
    assert [request["prompt_token_ids"] for request, _ in engine.requests] == [PROMPT_IDS, whole[:-2]]
    first = len(PROMPT_IDS)
    assert sample.action_ranges == [(first, first + 2), (len(whole) - 2, len(whole))]
    assert [value for value in sample.log_probs if value] == [-53.0, -1.0, -50.0, -1.0]
    assert sample.response == "2"
    assert sample.played.said == (Said("assistant", "5"), Said("user", "no"), Said("assistant", "2"))
    assert (sample.played.end, sample.masked, sample.finish_reason) == ("over", False, "stop")
    assert {parameters.n for _, parameters in engine.requests} == {1}


def test_a_greedy_episode_is_played_beside_the_sampled_one_and_brings_nothing_for_training():
    engine = TalkingEngine([said("5"), said("2")], [said("6"), said("3")])
    settings, stored, scorer = replace(SETTINGS, greedy=True), [], LastTurnScorer()
    environment = Scripted(told("see ", IMAGE), OVER)
    (sample,), _ = play(environment, engine=engine, settings=settings, scorer=scorer, stored=stored)
    greedy = sample.greedy
    assert ([one.text for one in greedy.played.said], greedy.reward.reward) == (["6", "see <image>", "3"], 0.0)
    assert (sample.response, sample.reward.reward, greedy.greedy) == ("2", 1.0, None)
    # In every turn, and the environment's picture is stored for the sampled episode alone.
    temperatures = {request["prompt_token_ids"].count(ord("6")): p.temperature for request, p in engine.requests[2:]}
    assert temperatures == {0: 1.0, 1: 0.0}
    assert (len(stored), greedy.media, len(sample.media)) == (1, (), 1)
    # No log-probs are asked for with it.
    assert {p.temperature: p.logprobs for _, p in engine.requests} == {1.0: 0, 0.0: None}
    assert environment.closed == [1, 1]


def test_a_turn_that_a_text_has_ended_is_closed_for_the_model():
    (sample,), engine = play(Scripted(told("no"), OVER, stops=("</t>",)), [(b"</t>", "stop", "</t>"), said("2")])
    assert sample.token_ids[len(PROMPT_IDS) : -2] == [*b"</t>", END, NEWLINE, *b"uno", END, NEWLINE, ord("a")]
    assert sample.played.said[0] == Said("assistant", "</t>")
    parameters, _ = [parameters for _, parameters in engine.requests]
    assert (parameters.stop, parameters.include_stop_str_in_output, parameters.detokenize) == (["</t>"], True, True)


def test_a_turn_that_was_cut_off_is_closed_too_and_the_environment_knows():
    environment = Scripted(told("no"), OVER)
    (sample,), _ = play(environment, [(b"1234", "length", None), said("2")])
    assert sample.token_ids[len(PROMPT_IDS) :][:7] == [*b"1234", END, NEWLINE, ord("u")]
    assert [turn.ended for turn in environment.turns] == [False, True]
    assert [turn.number for turn in environment.turns] == [0, 1]


def test_the_next_turn_may_be_begun_for_the_model_and_that_is_not_learnt():
    environment = Scripted(told("no", prefill="<t>"), OVER)
    (sample,), _ = play(environment, [said("5"), said("2")])
    assert sample.played.said[-1] == Said("assistant", "<t>2")
    assert sample.token_ids[-5:] == [*b"<t>", ord("2"), END]
    assert sample.loss_mask[-5:] == [False, False, False, True, True]
    assert environment.turns[1].text == "<t>2"


def test_images_that_are_shown_are_the_segments_own():
    stored: list[Any] = []
    prompt = row(message("user", IMAGE, "?"), answer="2")
    (sample,), engine = play(Scripted(told("see ", IMAGE), OVER), [said("5"), said("2")], prompt=prompt, stored=stored)
    observed = [NEWLINE, *b"usee ", *[PLACEHOLDER] * PATCHES, AFTER_IMAGE, END, NEWLINE, ord("a")]
    start = len(sample.segments[0].token_ids) + 2
    assert sample.token_ids[start : start + len(observed)] == observed
    assert [(item.start, item.key) for item in sample.media] == [(0, "object 1"), (start, "object 2")]
    assert stored == [{"pixels": 1}, {"pixels": 1}]
    asked = engine.requests[1][0]
    assert len(asked["multi_modal_data"]["image"]) == 2
    assert asked["prompt_token_ids"].count(PLACEHOLDER) == 2
    assert (sample.played.images, sample.played.said[1]) == (1, Said("user", "see <image>"))
    # Named alike in every turn: the engine need not look at their pixels again.
    names = [request["multi_modal_uuids"]["image"] for request, _ in engine.requests]
    assert names[1][:1] == names[0]
    assert len(names[1]) == 2


@pytest.mark.parametrize(
    ("overturn", "reward", "masked"), [("mask", 0.25, True), ("keep", 0.25, False), ("penalise", -0.25, False)]
)
def test_an_episode_that_goes_too_far_is_masked_kept_or_pays(overturn, reward, masked):
    (sample,), _ = play(
        Scripted(told("no", rewards={"step": 0.25})),
        [said("5")],
        limits=replace(LIMITS, max_turns=1, overturn=overturn),
    )
    assert (sample.scored.reward, sample.masked) == (reward, masked)
    assert sample.scored.parts["over_turn"] == 1.0


def test_what_the_environment_gives_is_added_to_the_score_of_the_last_turn():
    scorer = LastTurnScorer()
    (sample,), _ = play(
        Scripted(told("no", rewards={"step": 0.25}, counts={"calls": 1}), Answered(rewards={"step": 0.5})),
        [said("5"), said("2")],
        scorer=scorer,
    )
    assert (scorer.asked[0].response, scorer.asked[0].row.answer) == ("2", "2")
    assert scorer.asked[0].query == "u1+1?<end>\na5<end>\nuno<end>\na2<end>"
    assert (sample.scored.reward, sample.scored.score) == (1.75, 1.0)
    noted = {"turns": 2.0, "shown_images": 0.0, "over_turn": 0.0, "environment_failed": 0.0}
    noted |= {"turn_format": 0.0, "kept_turns": 0.0}
    assert sample.scored.parts == {"accuracy": 1.0, "step": 0.75, "calls": 1.0, **noted}


def test_without_a_scorer_the_environment_gives_the_reward():
    (sample,), _ = play(Scripted(Answered(rewards={"step": 1.0})), [said("2")])
    assert (sample.scored.reward, sample.scored.score) == (1.0, 1.0)


async def broken(turn: Turn) -> Answered:
    raise RuntimeError("no such square")


async def silent(turn: Turn) -> Answered:
    await asyncio.sleep(60)
    return OVER


@pytest.mark.parametrize("answer", [broken, silent])
def test_an_environment_that_fails_costs_that_episode_alone(answer, caplog):
    async def once(turn: Turn) -> Answered:
        return await answer(turn) if turn.text == "5" else OVER

    environment = Scripted(once)
    samples, _ = play(
        environment, [said("5")], [said("2")], limits=replace(LIMITS, answer_s=0.3), scorer=LastTurnScorer()
    )
    ends = {sample.response: sample.played.end for sample in samples}
    assert ends == {"5": "failed", "2": "over"}
    assert len(environment.closed) == 2
    assert "rows.jsonl, line 1, environment scripted" in caplog.text


def test_episodes_of_a_group_have_the_prompt_in_common_and_seeds_of_their_own():
    environment = Scripted(told("no"), OVER)
    samples, _ = play(environment, [said("5"), said("2")], [said("6"), said("3")])
    assert samples[0].segments[0] is samples[1].segments[0]
    assert len(set(environment.seeds)) == 2
    again = Scripted(told("no"), OVER)
    play(again, [said("5"), said("2")], [said("6"), said("3")])
    assert again.seeds == environment.seeds


CROP = '<grounding>{"bbox_2d": [0.5, 0, 1, 0.5], "source": "original_image"}</grounding>'
SWAPPED = CROP.replace("[0.5, 0, 1, 0.5]", "[1, 0, 0.5, 0.5]")
LONG = replace(SETTINGS, max_len=9000, sampling=replace(SETTINGS.sampling, max_new_tokens=200))


def cropping(*scripts: Sequence[ScriptedTurn], **settings: Any) -> list[Sample]:
    prompt = row(message("user", Image.new("RGB", (60, 40)), "?"), answer="2")
    samples, _ = play(load_environment("crop"), *scripts, prompt=prompt, settings=replace(LONG, **settings))
    return sorted(samples, key=lambda sample: sample.played.number)


def test_turns_bring_their_pictures_the_boxes_of_these_and_what_became_of_calls():
    turns = [(SWAPPED.encode(), "stop", "</grounding>"), (CROP.encode(), "stop", "</grounding>"), said("2")]
    (sample,) = cropping(turns, pictures=True)
    wrong, refused, right, observed, answer = sample.played.said
    assert [(call.tool, call.outcome) for call in wrong.calls + right.calls] == [
        ("crop", "malformed"),
        ("crop", "done"),
    ]
    assert "swapped corners" in wrong.calls[0].problem
    assert (refused.images, answer.calls) == ((), ())
    (part,) = observed.images
    assert part.source.size == (30, 20)
    assert part.cut == Cut(picture=0, name="original_image", box=(30, 0, 60, 20), size=(60, 40))
    system, question = sample.played.shown
    assert (system.role, question.parts[1]) == ("system", TextPart("?"))


def test_a_turn_is_sampled_as_its_options_say_and_the_next_one_as_the_environment_does():
    own = TurnOptions(stops=("</b>",), max_tokens=3)
    environment = Scripted(told("no", options=own), told("no"), OVER, stops=("</a>",))
    _, engine = play(environment, [said("5"), said("6"), said("2")])
    asked = [(parameters.stop, parameters.max_tokens) for _, parameters in engine.requests]
    assert asked == [(["</a>"], 4), (["</b>"], 3), (["</a>"], 4)]


def test_a_thought_is_gone_on_with_token_by_token_as_it_was_generated():
    thought = ThoughtConfig(end="</t>", continuations=1, continue_with="Hm")
    engine = OneEpisode((b"4</t>", "stop", "</t>"), (b"5</t>", "stop", "</t>"), said("=5"))
    (sample,), _ = play(
        Scripted(OVER),
        engine=engine,
        limits=replace(LIMITS, thought=thought),
        settings=replace(SETTINGS, sampling=replace(SETTINGS.sampling, max_new_tokens=20)),
    )
    assert sample.token_ids == [*PROMPT_IDS, *b"4Hm5</t>=5", END]
    assert sample.loss_mask[len(PROMPT_IDS) :] == [True, False, False, *[True] * 8]
    assert [request["prompt_token_ids"] for request, _ in engine.requests] == [
        PROMPT_IDS,
        [*PROMPT_IDS, *b"4Hm"],
        [*PROMPT_IDS, *b"4Hm5</t>"],
    ]
    assert [(parameters.stop, parameters.max_tokens) for _, parameters in engine.requests] == [
        (["</t>"], 20),
        (["</t>"], 17),
        ([], 12),
    ]
    assert (sample.response, sample.scored.parts["turns"]) == ("4Hm5</t>=5", 1.0)


async def nothing(turn: Turn) -> Answered:
    return None


async def words(turn: Turn) -> Answered:
    return Answered(shown=("no",))


async def wrong_options(turn: Turn) -> Answered:
    return told("no", options=TurnOptions(max_tokens=0))


async def own_timeout(turn: Turn) -> Answered:
    raise asyncio.TimeoutError


async def cancels_itself(turn: Turn) -> Answered:
    raise asyncio.CancelledError


async def deaf(turn: Turn) -> Answered:
    """Goes on where it is told to stop."""
    for _ in range(20):
        try:
            await asyncio.sleep(0.05)
        except asyncio.CancelledError:
            pass
    return OVER


@pytest.mark.parametrize("answer", [nothing, words, wrong_options, own_timeout, cancels_itself, deaf])
def test_whatever_an_environment_does_wrong_costs_its_episode_and_no_other(answer, caplog):
    async def once(turn: Turn) -> Answered:
        return await answer(turn) if turn.text == "5" else OVER

    environment = Scripted(once)
    samples, _ = play(environment, [said("5")], [said("2")], limits=replace(LIMITS, answer_s=0.2))
    assert {sample.response: sample.played.end for sample in samples} == {"5": "failed", "2": "over"}
    assert {sample.response: sample.masked for sample in samples} == {"5": True, "2": False}
    assert len(environment.closed) == 2
    assert "environment scripted" in caplog.text


class Stubborn(Scripted):
    """Does not begin, or does not close."""

    def __init__(self, *answers: Answered, begins: Exception | None = None, closes: Any = None) -> None:
        super().__init__(*answers)
        self.begins, self.closes = begins, closes

    def begin(self, row: Row, *, seed: int) -> Episode:
        if self.begins is not None:
            raise self.begins
        episode = super().begin(row, seed=seed)
        if self.closes is not None:
            episode.close = self.closes
        return episode


def test_a_row_that_an_environment_cannot_take_ends_the_run():
    with pytest.raises(UserError, match=r"rows.jsonl, line 1, environment scripted: the row has no board"):
        play(Stubborn(OVER, begins=UserError("the row has no board")), [said("2")])
