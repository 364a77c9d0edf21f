"""A group on a hand-written engine that streams as vLLM does."""

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import scripted_engines
from helpers.character_kit import AFTER_IMAGE, END, IMAGE, NEWLINE, PLACEHOLDER, CharacterKit
from helpers.conversations import message, row
from helpers.samples import media_ref

from lmm_r1.config.rewards import WeightedPart
from lmm_r1.data.sample import MediaRef, Sample
from lmm_r1.errors import UserError
from lmm_r1.generation.engine import SamplingSettings
from lmm_r1.generation.group import GroupRollout, GroupSettings
from lmm_r1.generation.ray_engines import KitRolloutActor
from lmm_r1.generation.request import EngineWeights, PromptCodec
from lmm_r1.scoring import ScoredResponse
from remote_rm.client import RewardUnavailable
from remote_rm.verifier import Score

SETTINGS = replace(
    scripted_engines.SETTINGS,
    sampling=SamplingSettings(n_samples=2, temperature=0.7, top_p=0.9, max_new_tokens=4),
    max_len=32,
)
PROMPT = row(message("user", "1+1?"), answer="2")
PICTURE = row(message("user", IMAGE, "?"), answer="2")
PROMPT_IDS = [*b"u1+1?", END, NEWLINE, ord("a")]


def delta(index: int, token_ids: Sequence[int], *, finish: str | None = None) -> SimpleNamespace:
    """A piece of one sample; the log-prob of a token is minus its id."""
    logprobs = [{token: SimpleNamespace(logprob=-float(token))} for token in token_ids]
    return SimpleNamespace(
        index=index, token_ids=list(token_ids), logprobs=logprobs, finish_reason=finish, stop_reason=None
    )


class StreamingEngine:
    """Streams the given pieces, and waits where an event stands among them."""

    def __init__(self, pieces: Sequence[SimpleNamespace | asyncio.Event]) -> None:
        self.pieces = pieces
        self.requests: list[tuple[Any, Any]] = []

    async def generate(self, request: Any, parameters: Any, request_id: str) -> AsyncIterator[SimpleNamespace]:
        self.requests.append((request, parameters))
        for piece in self.pieces:
            if isinstance(piece, asyncio.Event):
                await piece.wait()
            else:
                yield SimpleNamespace(outputs=[piece], prompt_token_ids=None)


class RecordingScorer:
    """Rewards 1 where the response is the label; sets an event at the first request."""

    one_by_one = True

    def __init__(self) -> None:
        self.requests: list[ScoredResponse] = []
        self.asked = asyncio.Event()

    async def rewards(self, batch: Sequence[ScoredResponse]) -> list[Score]:
        return [self.reward_of(item) for item in batch]

    def reward_of(self, item: ScoredResponse) -> Score:
        self.requests.append(item)
        self.asked.set()
        right = float(item.response == item.row.answer)
        return Score(reward=2 * right, score=right, parts={"accuracy": right})


class FailingScorer(RecordingScorer):
    def reward_of(self, item: ScoredResponse) -> Score:
        raise RewardUnavailable("http://127.0.0.1:1/get_reward does not answer")


TWO_SAMPLES = (delta(0, b"2"), delta(1, b"3"), delta(1, b"45", finish="length"), delta(0, [END], finish="stop"))


def no_store(media: Any) -> MediaRef:
    pytest.fail(f"nobody asks for {media}")


def run(
    prompt=PROMPT, *, pieces=TWO_SAMPLES, settings=SETTINGS, scorer=None, kit=None, banned=(), store=no_store
) -> tuple[list[Sample], StreamingEngine, GroupRollout]:
    engine = StreamingEngine(pieces)
    rollout = GroupRollout(
        codec=PromptCodec(kit=kit or CharacterKit(), processor=None, banned_token_ids=banned),
        scorer=scorer or RecordingScorer(),
        in_thread=asyncio.to_thread,
        store=store,
    )
    made = rollout.run(engine, prompt, settings, weight_version=7)
    return asyncio.run(asyncio.wait_for(made, timeout=10)), engine, rollout


def test_the_prompt_is_encoded_once_and_asked_for_once_for_all_samples():
    put: list[Any] = []

    def store(media: Any) -> MediaRef:
        put.append(media)
        return media_ref(f"object {len(put)}")

    samples, engine, rollout = run(PICTURE, banned=(PLACEHOLDER, AFTER_IMAGE), store=store)
    assert rollout.codec.kit.encoded == 1
    ((request, parameters),) = engine.requests
    assert request["prompt_token_ids"] == [ord("u"), PLACEHOLDER, AFTER_IMAGE, ord("?"), END, NEWLINE, ord("a")]
    (image,) = request["multi_modal_data"]["image"]
    assert image.tobytes() == IMAGE.tobytes()
    assert (parameters.n, parameters.max_tokens, parameters.temperature, parameters.top_p) == (2, 4, 0.7, 0.9)
    assert parameters.logit_bias is None, "the workers ban tokens"
    expanded = [ord("u"), *[PLACEHOLDER] * 3, AFTER_IMAGE, ord("?"), END, NEWLINE, ord("a")]
    for sample in samples:
        assert sample.token_ids[: len(expanded)] == expanded
        assert sample.action_ranges[0][0] == len(expanded)
    assert put == [{"pixels": 1}]
    assert [[(item.start, item.key) for item in sample.media] for sample in samples] == [[(0, "object 1")]] * 2


def test_each_sample_holds_its_own_tokens_reward_and_log_probs():
    samples, _, _ = run()
    by_response = {sample.response: sample for sample in samples}
    right, wrong = by_response["2"], by_response["345"]
    assert right.token_ids == [*PROMPT_IDS, *b"2", END]
    assert right.action_ranges == [(8, 10)]
    assert right.log_probs == [0.0] * 8 + [-50.0, -1.0]
    assert right.reward == Score(reward=2.0, score=1.0, parts={"accuracy": 1.0})
    assert (right.finish_reason, right.truncated) == ("stop", False)
    assert wrong.token_ids == [*PROMPT_IDS, *b"345"]
    assert wrong.log_probs == [0.0] * 8 + [-51.0, -52.0, -53.0]
    assert (wrong.scored.reward, wrong.finish_reason, wrong.truncated) == (0.0, "length", True)
    assert right.label == wrong.label == "2"
    assert right.row is PROMPT
    assert right.weight_version == wrong.weight_version == 7
    assert right.segments[0] is wrong.segments[0]


def test_a_finished_sample_is_scored_while_the_others_are_generated():
    scorer = RecordingScorer()
    # The engine goes on only when the first sample's reward has been asked for.
    # (two end tokens: a model may have several)
    pieces = [delta(0, [*b"2", END], finish="stop"), scorer.asked, delta(1, [*b"3", NEWLINE], finish="stop")]
    samples, _, _ = run(pieces=pieces, scorer=scorer)
    assert [sample.response for sample in samples] == ["2", "3"]


class GreedyEngine(StreamingEngine):
    """Answers two samples, and one at temperature 0 otherwise, once it has been asked for both."""

    async def generate(self, request: Any, parameters: Any, request_id: str) -> AsyncIterator[SimpleNamespace]:
        self.requests.append((request, parameters))
        while len(self.requests) < 2:
            await asyncio.sleep(0)
        greedy = [delta(0, [*b"2", END], finish="stop")]
        for piece in greedy if parameters.temperature == 0 else self.pieces:
            yield SimpleNamespace(outputs=[piece], prompt_token_ids=None)


def test_a_greedy_response_stands_in_the_engine_beside_its_group_and_is_scored_like_it():
    scorer, engine = RecordingScorer(), GreedyEngine(TWO_SAMPLES)
    room = {"codec": PromptCodec(kit=CharacterKit(), processor=None, banned_token_ids=(PLACEHOLDER,))}
    rollout = GroupRollout(**room, scorer=scorer, in_thread=asyncio.to_thread, store=no_store)
    settings = replace(
        SETTINGS, greedy=True, part_weights=(WeightedPart(name="accuracy", factors=("accuracy",), weight=0.5),)
    )
    made = rollout.run(engine, PROMPT, settings, weight_version=7)
    samples = asyncio.run(asyncio.wait_for(made, timeout=10))
    assert sorted(sample.response for sample in samples) == ["2", "345"]
    (greedy,) = {id(sample.greedy): sample.greedy for sample in samples}.values()
    assert (greedy.response, greedy.reward.reward, greedy.weight_version, greedy.greedy) == ("2", 2.5, 7, None)
    assert greedy.segments[0] is samples[0].segments[0]
    # Only what is trained on needs them.
    assert (greedy.log_probs, samples[0].log_probs is None) == (None, False)
    of_group, of_greedy = sorted((parameters for _, parameters in engine.requests), key=lambda one: -one.n)
    assert (of_greedy.n, of_greedy.temperature, of_greedy.max_tokens) == (1, 0.0, of_group.max_tokens)
    assert len(scorer.requests) == 3
    # Without a reward of its own, nothing of the group is given.
    failing = GroupRollout(**room, scorer=FailingScorer(), in_thread=asyncio.to_thread, store=no_store)
    with pytest.raises(RewardUnavailable, match="^rows.jsonl, line 1: "):
        asyncio.run(failing.run(GreedyEngine(TWO_SAMPLES), PROMPT, settings, weight_version=7))


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("abort", "1 ended in abort"),
        ("error", "1 ended in error"),
        ("repetition", "1 ended in repetition"),
        (None, "1 never ended"),
    ],
)
def test_a_group_of_which_a_response_is_broken_off_is_none(end, said):
    pieces = [delta(0, [*b"2", END], finish="stop"), delta(1, b"345", finish=end)]
    with pytest.raises(UserError, match=rf"^rows.jsonl, line 1: the engine completed 1 of 2 responses \({said}\)"):
        run(pieces=pieces)


class GivingScorer(RecordingScorer):
    """Gives the first response what it is told to, and all others 1."""

    def __init__(self, given: Score) -> None:
        super().__init__()
        self.given = given

    def reward_of(self, item: ScoredResponse) -> Score:
        return self.given if item.response == "2" else Score(reward=1.0, score=1.0, parts={})


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ((math.nan, 1.0, 1.0), "reward nan"),
        ((-math.inf, 1.0, 1.0), "reward -inf"),
        ((1.0, math.nan, 1.0), "score nan"),
        ((math.inf, 1.0, math.nan), "reward inf, accuracy nan"),
    ],
)
def test_a_reward_that_is_no_finite_number_stops_with_its_row(values, said):
    reward, score, accuracy = values
    scorer = GivingScorer(Score(reward=reward, score=score, parts={"accuracy": accuracy}))
    with pytest.raises(UserError, match=rf"^rows.jsonl, line 1: --reward.remote_url gives {said} for a response"):
        run(scorer=scorer)


def test_a_prompt_that_leaves_no_room_is_refused_or_skipped_and_never_cut():
    # 8 prompt tokens and 4 new ones need 12.
    assert len(run(settings=replace(SETTINGS, max_len=12))[0]) == 2
    tight = replace(SETTINGS, max_len=11)
    with pytest.raises(UserError, match=r"rows.jsonl, line 1: the prompt takes 8 tokens.*--data.max_len 11"):
        run(settings=tight)
    samples, engine, _ = run(settings=replace(tight, overlong_prompts="skip"))
    assert samples == []
    assert engine.requests == []


def test_samples_are_stamped_with_the_updates_that_their_engine_has_had():
    async def done(reset_running_requests: bool = False) -> None:
        """Empties nothing."""

    class Groups:
        async def run(self, engine: Any, row: Any, settings: GroupSettings, *, weight_version: int) -> list[int]:
            return [weight_version]

    actor = object.__new__(KitRolloutActor)
    actor.llm = SimpleNamespace(**dict.fromkeys(("reset_prefix_cache", "reset_encoder_cache", "reset_mm_cache"), done))
    actor.groups, actor.weights, actor.paused = Groups(), EngineWeights(), False

    async def two_updates() -> list[list[int]]:
        stamped = [(await actor.generate_group(PROMPT, SETTINGS)).samples]
        for _ in range(2):
            await actor.reset_caches(keep_images=False)
            stamped.append((await actor.generate_group(PROMPT, SETTINGS)).samples)
        return stamped

    assert asyncio.run(two_updates()) == [[0], [1], [2]]


def test_keys_and_values_of_old_weights_are_never_kept_in_silence():
    async def refused(reset_running_requests: bool) -> bool:
        """As vLLM's does while a request holds blocks of the cache."""
        return False

    actor = object.__new__(KitRolloutActor)
    actor.llm, actor.paused = SimpleNamespace(reset_prefix_cache=refused), False
    with pytest.raises(RuntimeError, match="still had requests"):
        asyncio.run(actor.reset_caches(keep_images=False))


def test_an_engine_that_is_held_up_keeps_its_requests_while_it_sleeps():
    asked: list[tuple[str, dict]] = []

    class Engine:
        def __getattr__(self, name: str) -> Any:
            async def called(**arguments: Any) -> None:
                asked.append((name, arguments))

            return called

    actor = object.__new__(KitRolloutActor)
    actor.llm, actor.paused = Engine(), False

    async def rollouts() -> None:
        await actor.sleep()
        await actor.pause_generation()
        await actor.sleep()
        await actor.resume_generation()

    asyncio.run(rollouts())
    assert asked == [
        ("sleep", {"level": 1, "mode": "abort"}),
        ("pause_generation", {"mode": "keep", "clear_cache": False}),
        ("sleep", {"level": 1, "mode": "keep"}),
        ("resume_generation", {}),
    ]


def test_responses_go_on_from_what_the_row_says_they_begin_with_and_are_scored_with_it():
    scorer = RecordingScorer()
    begun = replace(row(message("user", IMAGE, "?"), answer="<t>2"), prefill="<t>")
    settings = replace(SETTINGS, media=False)
    samples, engine, _ = run(begun, scorer=scorer, settings=settings)
    ((request, _),) = engine.requests
    assert request["prompt_token_ids"][-4:] == [ord("a"), *b"<t>"]
    assert request["prompt_token_ids"].count(PLACEHOLDER) == 1
    cut, ended = samples
    assert ended.token_ids[-6:] == [ord("a"), *b"<t>", ord("2"), END]
    assert (sum(ended.loss_mask), sum(cut.loss_mask)) == (2, 3)
    assert (ended.response, cut.response) == ("<t>2", "<t>345")
    assert (ended.scored.score, cut.scored.score) == (1.0, 0.0)
    assert all(request.query.count("<t>") == 1 for request in scorer.requests)


class WholeGroupScorer:
    """Rewards by the place in the group, and keeps what it was given."""

    one_by_one = False

    def __init__(self) -> None:
        self.batches: list[Sequence[ScoredResponse]] = []

    async def rewards(self, batch: Sequence[ScoredResponse]) -> list[Score]:
        self.batches.append(batch)
        return [Score(reward=float(place), score=0.0, parts={}) for place in range(len(batch))]

    async def check_health(self) -> None: ...

    async def close(self) -> None: ...


def test_a_source_of_whole_groups_is_asked_once_for_all_samples():
    scorer = WholeGroupScorer()
    samples, _, _ = run(scorer=scorer)
    (batch,) = scorer.batches
    # In the order in which they were finished.
    assert [(item.response, item.num_tokens) for item in batch] == [("345", 3), ("2", 2)]
    assert all(item.row is PROMPT for item in batch)
    assert [sample.scored.reward for sample in samples] == [0.0, 1.0]
    assert [item.response for item in batch] == [sample.response for sample in samples]
