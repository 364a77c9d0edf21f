"""Environments that write all their text themselves, on a kit whose tokens are characters: every id is worked out by hand."""

import time
from dataclasses import replace
from functools import partial

import pytest
from helpers.character_kit import AFTER_IMAGE, END, IMAGE, NEWLINE, PATCHES, PLACEHOLDER
from helpers.conversations import message, row
from helpers.scripted_engines import LIMITS, SETTINGS, TalkingEngine, play_group
from vllm import SamplingParams

from lmm_r1.agents.environment import Answered, Environment, Episode, RawText
from lmm_r1.data.messages import ImagePart
from lmm_r1.data.sample import Said
from lmm_r1.errors import UserError
from lmm_r1.generation.episodes import EpisodeRollout
from lmm_r1.generation.request import sampling_params
from lmm_r1.generation.turns import as_asked
from lmm_r1.rl.rollouts import with_all_parts

PROMPT = row(message("user", "1+1?"), answer="2")
PROMPT_IDS = [*b"u1+1?", END, NEWLINE, ord("a")]
OVER = Answered()


class Raw(Environment):
    """Gives the same answers to every episode; opens it with a text, or a function of the prompt's, where it has one."""

    name = "raw"
    rewards = ("step",)
    raw = True

    def __init__(self, *answers, opens=None):
        self.answers, self.opens = answers, opens
        self.turns, self.prompts = [], []

    def begin(self, row, *, seed):
        return _RawEpisode(self)


class _RawEpisode(Episode):
    def __init__(self, environment):
        self.environment = environment

    async def open(self, prompt):
        self.environment.prompts.append(prompt)
        opens = self.environment.opens
        return prompt if opens is None else opens(prompt)

    async def answer(self, turn):
        self.environment.turns.append(turn)
        return self.environment.answers[turn.number]


def raw(text, *images, **more):
    return Answered(raw=RawText(text=text, images=tuple(map(ImagePart, images))), **more)


def play(environment, *turns, prompt=PROMPT, **more):
    engine = TalkingEngine(*turns)
    samples = play_group(partial(EpisodeRollout, environment=environment), engine, prompt, **more)
    return samples, engine


def test_raw_text_stands_behind_the_turn_as_it_is_and_is_not_learnt():
    environment = Raw(raw("\nu!\x01\na"), OVER)
    (sample,), engine = play(environment, "5", "2")
    shown = [NEWLINE, *b"u!", END, NEWLINE, ord("a")]
    assert sample.token_ids == [*PROMPT_IDS, ord("5"), END, *shown, ord("2"), END]
    assert [segment.kind for segment in sample.segments] == ["prompt", "generated", "observation", "generated"]
    assert sample.loss_mask == [False] * 8 + [True] * 2 + [False] * 6 + [True] * 2
    assert engine.prompts == [PROMPT_IDS, sample.token_ids[:-2]]
    assert environment.prompts == ["u1+1?\x01\na"]
    assert sample.played.said[1] == Said("user", "\nu!<end>\na")


def test_nothing_is_put_between_a_turn_that_was_cut_off_and_what_stands_behind_it():
    (sample,), engine = play(Raw(raw("!"), raw(""), OVER), b"12", "3", "4")
    # An empty text is no segment, and the next turn goes on behind the end token.
    assert sample.token_ids[8:] == [*b"12!3", END, ord("4"), END]
    assert [segment.kind for segment in sample.segments[1:]] == ["generated", "observation", "generated", "generated"]
    assert engine.prompts[2] == sample.token_ids[:-2]


def test_images_stand_where_the_text_has_their_marks():
    stored = []
    (sample,), engine = play(Raw(raw("\nu\x02\x03\x01\na", IMAGE), OVER), "5", "2", stored=stored)
    observed = [NEWLINE, ord("u"), *[PLACEHOLDER] * PATCHES, AFTER_IMAGE, END, NEWLINE, ord("a")]
    assert sample.segments[2].token_ids == tuple(observed)
    assert [(item.start, item.key) for item in sample.media] == [(10, "object 1")]
    assert stored == [{"pixels": 1}]
    assert engine.requests[1][0]["multi_modal_data"]["image"][0].size == IMAGE.size
    assert engine.prompts[1].count(PLACEHOLDER) == 1
    assert (sample.played.images, sample.played.said[1].text) == (1, "\nu<image></image><end>\na")


def test_an_episode_may_open_with_a_text_of_its_own():
    prompt = row(message("user", IMAGE, "1+1?"), answer="2")
    stored = []
    environment = Raw(OVER, opens=lambda text: text.replace("1+1", "2"))
    (sample,), engine = play(environment, "5", prompt=prompt, stored=stored)
    assert environment.prompts == ["u\x02\x031+1?\x01\na"]
    opened = [ord("u"), *[PLACEHOLDER] * PATCHES, AFTER_IMAGE, *b"2?", END, NEWLINE, ord("a")]
    assert sample.segments[0].token_ids == tuple(opened)
    # The row's own image, put aside once for the group.
    assert [(item.start, item.key) for item in sample.media] == [(0, "object 1")]
    assert stored == [{"pixels": 1}]
    assert len(engine.requests[0][0]["multi_modal_data"]["image"]) == 1
    assert sample.played.said[0] == Said("user", "u<image></image>2?<end>\na")


def test_a_row_of_plain_text_goes_to_the_tokenizer_as_it_stands():
    environment = Raw(raw("!"), OVER)
    (sample,), _ = play(environment, "5", "2", prompt=replace(PROMPT, plain=True))
    assert environment.prompts == ["1+1?"]
    assert sample.token_ids == [*b"1+1?5", END, ord("!"), ord("2"), END]


def test_an_environment_says_what_turns_are_sampled_by():
    environment = Raw(raw("!", parameters=SamplingParams(temperature=0.5, max_tokens=2, stop=["."])), raw("!"), OVER)
    _, engine = play(environment, "5", "5", "5")
    first, second, third = (parameters for _, parameters in engine.requests)
    assert (first.temperature, first.max_tokens, first.stop) == (1.0, 4, [])
    for later in (second, third):
        assert (later.temperature, later.max_tokens, later.stop, later.logprobs) == (0.5, 2, ["."], 0)
        assert later.stop_token_ids == [END]
    assert environment.turns[0].parameters == first
    assert environment.turns[0].parameters is not first


def test_what_training_needs_goes_before_what_an_agent_asks_for():
    needed = sampling_params(SETTINGS.sampling, max_tokens=5, end_token_id=END, output_per="response", logprobs=True)
    asked = SamplingParams(n=3, max_tokens=9, min_tokens=8, logit_bias={7: 1.0, 8: 2.0}, stop_token_ids=[4], top_p=0.5)
    got = as_asked(asked, needed=needed)
    assert (got.n, got.max_tokens, got.min_tokens, got.logprobs, got.top_p) == (1, 5, 5, 0, 0.5)
    assert (got.logit_bias, got.stop_token_ids) == ({7: 1.0, 8: 2.0}, [END, 4])
    assert (got.output_kind, got.stream_interval) == (needed.output_kind, needed.stream_interval)
    assert as_asked(SamplingParams(max_tokens=None), needed=needed).max_tokens == 5
    # One that was handed out has no text; with stop texts it needs some.
    changed = sampling_params(SETTINGS.sampling, max_tokens=5, end_token_id=END, output_per="response", logprobs=True)
    changed.stop = "."
    assert (as_asked(changed, needed=needed).stop, as_asked(changed, needed=needed).detokenize) == (["."], True)


def test_what_some_episodes_log_is_a_part_of_all_of_a_step_and_their_score_is_their_own():
    first, _ = play(
        Raw(raw("!", logs={"seen": 1.0}), Answered(rewards={"step": 2.0}, logs={"seen": 3.0}, score=0.5)), "5", "5"
    )
    second, _ = play(Raw(Answered(rewards={"step": 1.0})), "5")
    groups = with_all_parts([first, second])
    assert [sample.scored.parts["agent/seen"] for group in groups for sample in group] == [3.0, 0.0]
    assert [(sample.scored.reward, sample.scored.score) for (sample,) in groups] == [(2.0, 0.5), (1.0, 1.0)]
    assert with_all_parts([second]) == [second]


def test_an_environment_that_takes_too_long_to_show_a_row_stops_the_run_by_its_place():
    class Slow(Raw):
        waits = True

        def shown_row(self, row):
            time.sleep(1.0 if self.answers else 0.0)
            return replace(row, messages=(message("user", "2?"),))

    (sample,), _ = play(Slow(), b"5")
    assert sample.segments[0].token_ids == (*b"u2?", END, NEWLINE, ord("a"))
    with pytest.raises(UserError, match="rows.jsonl, line 1, environment raw: it has not shown the row in 0.2 s"):
        play(Slow(OVER), "5", limits=replace(LIMITS, answer_s=0.2))
