"""Episodes on a hand-written engine and a kit whose tokens are characters, so that every id can be worked out by hand."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.character_kit import AFTER_IMAGE, END, IMAGE, NEWLINE, PATCHES, PLACEHOLDER, CharacterKit
from helpers.conversations import message, row
from helpers.samples import media_ref
from PIL import Image

from lmm_r1.agents.environment import Answered, Environment, Episode, Turn
from lmm_r1.agents.registry import load_environment
from lmm_r1.agents.tool_environment import ToolEnvironment
from lmm_r1.agents.tools import Tool
from lmm_r1.config.ppo import AgentConfig
from lmm_r1.data.messages import ImagePart, Row, TextPart
from lmm_r1.data.sample import MediaRef, Said, Sample
from lmm_r1.errors import UserError
from lmm_r1.generation.codec import PromptCodec
from lmm_r1.generation.engine import SamplingSettings
from lmm_r1.generation.episodes import EpisodeRollout
from lmm_r1.generation.group import GroupSettings
from remote_rm.verifier import Score

pytestmark = pytest.mark.unit

SETTINGS = GroupSettings(
    sampling=SamplingSettings(n_samples=1, temperature=1.0, top_p=1.0, max_new_tokens=4),
    max_len=60,
    logprobs=True,
    ignore_eos=False,
    overlong_prompts="error",
    media=True,
)
LIMITS = AgentConfig(max_turns=4, max_images=2, answer_s=5.0, overturn="mask", overturn_penalty=0.5)
PROMPT = row(message("user", "1+1?"), answer="2")
PROMPT_IDS = [*b"u1+1?", END, NEWLINE, ord("a")]
Scripted = tuple[bytes, str, str | None]
"""A turn's tokens, how it ended, and by which text."""


def said(text: str) -> Scripted:
    return bytes([*text.encode(), END]), "stop", None


class TalkingEngine:
    """Says the turns of a script one after the other; each episode has its own, in the order in which they begin."""

    def __init__(self, *scripts: Sequence[Scripted]) -> None:
        self.scripts = [list(script) for script in scripts]
        self.requests: list[tuple[Any, Any]] = []
        self._episodes: dict[tuple[int, ...], list[Scripted]] = {}

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

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    async def reward(self, **request: Any) -> Score:
        self.asked.append(request)
        right = float(request["response"] == request["label"])
        return Score(reward=right, score=right, parts={"accuracy": right})


def told(*parts: str | Any, **settings: Any) -> Answered:
    return Answered(
        shown=tuple(TextPart(part) if isinstance(part, str) else ImagePart(part) for part in parts), **settings
    )


OVER = Answered()


def play(
    environment: Environment,
    *scripts: Sequence[Scripted],
    prompt: Row = PROMPT,
    settings: GroupSettings = SETTINGS,
    limits: AgentConfig = LIMITS,
    scorer: Any = None,
    stored: list[Any] | None = None,
) -> tuple[list[Sample], TalkingEngine]:
    engine = TalkingEngine(*scripts)
    kept = [] if stored is None else stored

    def store(media: Any) -> MediaRef:
        kept.append(media)
        return media_ref(f"object {len(kept)}")

    rollout = EpisodeRollout(
        environment=environment,
        limits=limits,
        codec=PromptCodec(kit=CharacterKit(), processor=None, banned_token_ids=()),
        scorer=scorer,
        in_thread=asyncio.to_thread,
        store=store,
    )
    sampling = replace(settings.sampling, n_samples=len(scripts))
    made = rollout.run(engine, prompt, replace(settings, sampling=sampling), weight_version=7)
    return asyncio.run(asyncio.wait_for(made, timeout=20)), engine


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


def test_what_is_not_trained_on_is_not_stored():
    stored: list[Any] = []
    play(Scripted(told(IMAGE), OVER), [said("5"), said("2")], settings=replace(SETTINGS, media=False), stored=stored)
    assert stored == []


@pytest.mark.parametrize(
    ("limits", "settings", "answer", "end", "turns"),
    [
        ({"max_turns": 2}, {}, told("no"), "turns", 2),
        ({"max_images": 1}, {}, told(IMAGE), "images", 2),
        # 8 of the prompt, 2 of a turn, 7 of what is shown: 17, and with the second turn 26, which would leave nothing.
        ({}, {"max_len": 26}, told("no"), "tokens", 2),
        ({}, {"max_len": 28}, told("no"), "tokens", 3),
    ],
)
def test_a_limit_ends_an_episode_with_the_policys_turn(limits, settings, answer, end, turns):
    (sample,), _ = play(
        Scripted(*[answer] * 4),
        [said("5")] * 4,
        limits=replace(LIMITS, **limits),
        settings=replace(SETTINGS, **settings),
    )
    assert (sample.played.end, len(sample.generated), sample.segments[-1].kind) == (end, turns, "generated")
    assert sample.played.over_turn
    assert sample.masked


def test_the_last_turn_has_the_room_that_is_left():
    _, engine = play(Scripted(told("no"), OVER), [said("5"), said("2")], settings=replace(SETTINGS, max_len=19))
    assert [parameters.max_tokens for _, parameters in engine.requests] == [4, 2]


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
    assert (scorer.asked[0]["response"], scorer.asked[0]["label"]) == ("2", "2")
    assert scorer.asked[0]["query"] == "u1+1?<end>\na5<end>\nuno<end>\na2<end>"
    assert (sample.scored.reward, sample.scored.score) == (1.75, 1.0)
    noted = {"turns": 2.0, "shown_images": 0.0, "over_turn": 0.0, "environment_failed": 0.0}
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


def test_a_tool_that_hangs_or_dies_costs_its_trajectory_its_deadline_and_nothing_else():
    go_on = threading.Event()

    def fetch(what: str) -> str:
        """Fetch something."""
        if what == "hangs":
            go_on.wait(60)
        if what == "dies":
            raise SystemExit(3)
        return what

    kinds = ("hangs", "dies", "works", "works on")
    calls = [f'<tool_call>{{"name": "fetch", "arguments": {{"what": "{what}"}}}}</tool_call>' for what in kinds]
    scripts = [[(text.encode(), "stop", "</tool_call>"), said("2")] for text in calls]
    settings = replace(SETTINGS, max_len=6000, sampling=replace(SETTINGS.sampling, max_new_tokens=200))
    ended: dict[str, float] = {}

    class Watched(LastTurnScorer):
        async def reward(self, **request: Any) -> Score:
            ended[next(what for what in reversed(kinds) if f'"{what}"' in request["query"])] = time.monotonic() - began
            return await super().reward(**request)

    began = time.monotonic()
    environment = ToolEnvironment([Tool(fetch, deadline_s=1.0)])
    samples, _ = play(environment, *scripts, settings=settings, scorer=Watched())
    go_on.set()
    by_kind = {next(what for what, text in zip(kinds, calls, strict=True) if text == one.played.said[0].text): one for one in samples}  # fmt: skip
    assert {what: one.played.counts["failed_calls"] for what, one in by_kind.items()} == {
        "hangs": 1, "dies": 1, "works": 0, "works on": 0
    }  # fmt: skip
    assert "it has not answered within 1 seconds" in by_kind["hangs"].played.said[1].text
    assert "it broke off" in by_kind["dies"].played.said[1].text
    assert all((one.played.end, one.response, one.scored.reward) == ("over", "2", 1.0) for one in samples)
    assert max(ended[what] for what in kinds[1:]) < 1.0 <= ended["hangs"] < 3.0


def test_a_prompt_that_is_no_conversation_is_refused():
    with pytest.raises(UserError, match="add --data.apply_chat_template"):
        play(Scripted(OVER), [said("2")], prompt=replace(PROMPT, plain=True))


def test_what_an_environment_gives_must_be_among_what_it_names():
    with pytest.raises(UserError, match="gives bonus, which its rewards do not name"):
        play(Scripted(Answered(rewards={"bonus": 1.0})), [said("2")])


def test_episodes_of_a_group_have_the_prompt_in_common_and_seeds_of_their_own():
    environment = Scripted(told("no"), OVER)
    samples, _ = play(environment, [said("5"), said("2")], [said("6"), said("3")])
    assert samples[0].segments[0] is samples[1].segments[0]
    assert len(set(environment.seeds)) == 2
    again = Scripted(told("no"), OVER)
    play(again, [said("5"), said("2")], [said("6"), said("3")])
    assert again.seeds == environment.seeds


def test_a_crop_that_the_policy_asks_for_is_shown_to_it_and_counted():
    call = b'<grounding>{"bbox_2d": [0.5, 0, 1, 0.5], "source": "original_image"}</grounding>'
    prompt = row(message("user", Image.new("RGB", (60, 40)), "?"), answer="2")
    settings = replace(SETTINGS, max_len=6000, sampling=replace(SETTINGS.sampling, max_new_tokens=200))
    turns = [(call, "stop", "</grounding>"), said("2")]
    (sample,), engine = play(
        load_environment("crop"), turns, prompt=prompt, settings=settings, scorer=LastTurnScorer()
    )
    cropped = engine.requests[1][0]["multi_modal_data"]["image"][1]
    assert cropped.size == (30, 20)
    assert engine.requests[0][1].stop == ["</grounding>", "</tool_call>"]
    assert (sample.played.end, sample.played.images, sample.scored.reward) == ("over", 1, 1.0)
    wanted = {"tool_calls": 1.0, "malformed_calls": 0.0, "failed_calls": 0.0, "shown_images": 1.0, "turns": 2.0}
    assert {name: sample.scored.parts[name] for name in wanted} == wanted
    assert "observation_1" in sample.played.said[1][1]
