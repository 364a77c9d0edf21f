"""What follows from a sample's segments, by hand, for one response and for turns with an environment between them."""

import copy
import pickle
from dataclasses import replace

import pytest
from helpers.conversations import message, row
from helpers.samples import media_ref

from lmm_r1.data.sample import Sample, Segment, WeightSpan
from remote_rm.verifier import Score

IMAGE, SCREEN = media_ref("prompt's"), media_ref("observation's")
PROMPT = Segment(kind="prompt", token_ids=(1, 2, 3), media=IMAGE)
QUESTION = row(message("user", "?"), answer="2")


def sample(*segments: Segment, finish_reason: str = "stop") -> Sample:
    return Sample(
        row=QUESTION, segments=segments, response="2", finish_reason=finish_reason, weight_version=4, reward=None
    )


def generated(*token_ids: int, log_probs: bool = True) -> Segment:
    """The log-prob of a token is minus its id."""
    known = tuple(-float(token) for token in token_ids) if log_probs else None
    return Segment(kind="generated", token_ids=token_ids, log_probs=known)


TURNS = sample(
    PROMPT,
    generated(4, 5),
    Segment(kind="observation", token_ids=(6, 7, 8), media=SCREEN),
    generated(9),
    Segment(kind="observation", token_ids=(10,)),
    generated(11, 12, 13),
    finish_reason="length",
)


def test_one_response_behind_its_prompt():
    one = sample(PROMPT, generated(4, 5))
    assert one.token_ids == [1, 2, 3, 4, 5]
    assert one.loss_mask == [False, False, False, True, True]
    assert one.action_ranges == [(3, 5)]
    assert one.log_probs == [0.0, 0.0, 0.0, -4.0, -5.0]
    assert [(item.start, item.ref) for item in one.media] == [(0, IMAGE)]
    assert (one.generated_tokens, one.truncated) == (2, False)
    assert (one.prompt, one.label) == ('[{"role":"user","content":"?"}]', "2")


def test_the_weights_of_turns_are_those_of_their_tokens_one_behind_the_other():
    spans = ([WeightSpan(4, 2)], [WeightSpan(4, 1)], [WeightSpan(4, 1), WeightSpan(6, 2)])
    noted = iter(spans)
    segments = [
        replace(segment, weights=tuple(next(noted))) if segment.kind == "generated" else segment
        for segment in TURNS.segments
    ]
    assert replace(TURNS, segments=tuple(segments)).weights == ((4, 4), (6, 2))
    assert TURNS.weights == ()


def test_turns_with_observations_between_them():
    assert TURNS.token_ids == list(range(1, 14))
    assert TURNS.loss_mask == [token in (4, 5, 9, 11, 12, 13) for token in range(1, 14)]
    assert TURNS.action_ranges == [(3, 5), (8, 9), (10, 13)]
    assert TURNS.log_probs == [0, 0, 0, -4, -5, 0, 0, 0, -9, 0, -11, -12, -13]
    assert [(item.start, item.ref) for item in TURNS.media] == [(0, IMAGE), (5, SCREEN)]
    assert (TURNS.generated_tokens, TURNS.truncated) == (6, True)
    assert [len(segment.token_ids) for segment in TURNS.generated] == [2, 1, 3]


def test_a_response_of_no_token_has_an_empty_range():
    nothing = sample(PROMPT, generated())
    assert (nothing.token_ids, nothing.action_ranges, nothing.generated_tokens) == ([1, 2, 3], [(3, 3)], 0)
    assert nothing.log_probs == [0.0] * 3


def test_a_reward_may_come_later():
    assert TURNS.reward is None
    with pytest.raises(AssertionError, match="rows.jsonl, line 1: a sample has no reward"):
        _ = TURNS.scored
    reward = Score(reward=1.5, score=1.0, parts={"accuracy": 1.0})
    assert replace(TURNS, reward=reward).scored is reward


def test_what_cannot_be_is_refused():
    with pytest.raises(AssertionError, match="a segment of kind observation was not sampled"):
        Segment(kind="observation", token_ids=(1,), log_probs=(0.0,))
    with pytest.raises(AssertionError, match="every sampled token has a log-prob"):
        Segment(kind="generated", token_ids=(1, 2), log_probs=(0.0,))
    with pytest.raises(AssertionError, match="a sample begins with its prompt"):
        sample(generated(1), PROMPT)
    with pytest.raises(AssertionError, match="a sample has one prompt"):
        sample(PROMPT, PROMPT)
    with pytest.raises(AssertionError, match="of all generated segments or of none"):
        sample(PROMPT, generated(4), generated(5, log_probs=False))


def test_the_prompt_of_a_group_stays_one_object_on_its_way():
    group = [sample(PROMPT, generated(4)), sample(PROMPT, generated(5))]
    for one, other in (pickle.loads(pickle.dumps(group)), copy.deepcopy(group)):
        assert one.segments[0] is other.segments[0]
        assert one.media[0].key == other.media[0].key == "prompt's"
