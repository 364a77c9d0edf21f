import pytest
from helpers.judged_responses import judged, judged_rows

from lmm_r1.evaluation.scores import by_datasource, summarize
from lmm_r1.records.responses import Verdict

pytestmark = pytest.mark.unit


def test_rows_and_samples_come_down_to_their_means():
    scores = summarize(judged_rows([[True, False], [True, True], [False, False]]), verifiers=["math"], ks=[1, 2])
    math = scores.verifiers["math"]
    assert (scores.rows, scores.samples) == (3, 6)
    assert (math.accuracy.mean, math.accuracy.standard_error) == (0.5, pytest.approx(0.5 / 3**0.5))
    assert math.pass_at_k[1].mean == pytest.approx(0.5)
    assert math.pass_at_k[2].mean == pytest.approx(2 / 3)
    # In the first row, right was said first.
    assert math.majority_at_k[2].mean == pytest.approx(2 / 3)


def test_format_length_truncation_and_missing_answers():
    responses = [
        judged(index=0, response_tokens=10),
        judged(index=1, response_tokens=20, response="<answer>4</answer>"),
        judged(index=2, response_tokens=30, response="<think>", finish_reason="length"),
        judged(index=3, response_tokens=40),
        judged(index=4, response_tokens=50),
    ]
    scores = summarize(responses, verifiers=["math"], ks=[1])
    assert (scores.format, scores.truncated_rate, scores.no_answer_rate) == (0.6, 0.2, 0.2)
    assert scores.mean_response_tokens == 30
    assert scores.response_tokens == {"p10": 14, "p50": 30, "p90": 46, "p99": pytest.approx(49.6), "max": 50}


def test_every_verifier_has_its_own_scores():
    verdicts = {
        "math": Verdict(score=1.0, parts={"accuracy": 1.0, "ungradable": 0.0}),
        "choice": Verdict(score=0.0, parts={"accuracy": 0.0, "ungradable": 1.0}, timed_out=True),
    }
    responses = [judged(verdicts=verdicts, sample=sample) for sample in range(2)]
    scores = summarize(responses, verifiers=["math", "choice"], ks=[1]).verifiers
    assert list(summarize(responses, verifiers=["choice"], ks=[1]).verifiers) == ["choice"]
    assert (scores["math"].accuracy.mean, scores["math"].ungradable_rows, scores["math"].timed_out) == (1.0, 0, 0)
    assert (scores["choice"].accuracy.mean, scores["choice"].ungradable_rows) == (0.0, 1)
    assert scores["choice"].timed_out == 2


def test_data_sources_are_told_apart():
    responses = [*judged_rows([[True], [True]]), judged(False, index=2, datasource="words")]
    sources = by_datasource(responses, verifiers=["math"], ks=[1])
    assert list(sources) == ["sums", "words"]
    assert [scores.verifiers["math"].accuracy.mean for scores in sources.values()] == [1.0, 0.0]
    assert [scores.rows for scores in sources.values()] == [2, 1]
