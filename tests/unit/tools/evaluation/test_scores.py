import math
from fractions import Fraction

import pytest
from helpers.run_folders import judged, judged_rows

from lmm_r1.records.responses import VerifierVerdict
from lmm_r1.tools.evaluation.scores import (
    Ballot,
    clustered_mean,
    majority_at_k,
    majority_is_right,
    pass_at_k,
    summarize,
    vote_of,
)


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
        "math": VerifierVerdict(score=1.0, parts={"accuracy": 1.0, "ungradable": 0.0}),
        "choice": VerifierVerdict(score=0.0, parts={"accuracy": 0.0, "ungradable": 1.0}, timed_out=True),
    }
    responses = [judged(verdicts=verdicts, sample=sample) for sample in range(2)]
    scores = summarize(responses, verifiers=["math", "choice"], ks=[1]).verifiers
    assert list(summarize(responses, verifiers=["choice"], ks=[1]).verifiers) == ["choice"]
    assert (scores["math"].accuracy.mean, scores["math"].ungradable_rows, scores["math"].timed_out) == (1.0, 0, 0)
    assert (scores["choice"].accuracy.mean, scores["choice"].ungradable_rows) == (0.0, 1)
    assert scores["choice"].timed_out == 2


@pytest.mark.parametrize(
    ("samples", "right", "k", "expected"),
    [
        (5, 2, 2, Fraction(7, 10)),  # 1 - 3/10
        (10, 3, 4, Fraction(5, 6)),  # 1 - 35/210
        (8, 3, 1, Fraction(3, 8)),
        (8, 0, 8, Fraction(0)),
        (8, 1, 8, Fraction(1)),
        (4, 3, 2, Fraction(1)),
    ],
)
def test_it_is_the_share_of_subsets_with_a_right_sample(samples, right, k, expected):
    assert expected == 1 - Fraction(math.comb(samples - right, k), math.comb(samples, k))
    assert pass_at_k(samples=samples, right=right, k=k) == pytest.approx(float(expected), abs=1e-15)


RIGHT, WRONG, OTHER = Ballot(vote="4", right=True), Ballot(vote="5", right=False), Ballot(vote="6", right=False)
SILENT = Ballot(vote=None, right=False)


@pytest.mark.parametrize(
    ("ballots", "is_right"),
    [
        ([WRONG, RIGHT, OTHER, RIGHT], True),
        ([WRONG, RIGHT, WRONG], False),
        # Of a tie, the answer given first counts.
        ([RIGHT, WRONG, WRONG, RIGHT], True),
        ([WRONG, RIGHT, RIGHT, WRONG], False),
        ([SILENT, SILENT, RIGHT], True),
        ([SILENT, SILENT], False),
    ],
)
def test_most_votes_win(ballots, is_right):
    assert majority_is_right(ballots) is is_right


def test_samples_are_cut_into_groups_of_k():
    rows = [[RIGHT, RIGHT, WRONG, WRONG, RIGHT], [WRONG] * 5]
    assert majority_at_k(rows, k=1).mean == pytest.approx(0.3)
    # Of the first row, the pairs (right, right) and (wrong, wrong); the fifth sample is left over.
    assert majority_at_k(rows, k=2).mean == 0.25
    assert majority_at_k(rows, k=5).mean == 0.5


def test_equal_answers_vote_alike():
    half = {vote_of(text, verifier="math") for text in (r"So \boxed{\dfrac12}", r"<answer>$\frac{1}{2}$</answer>")}
    assert len(half) == 1
    assert vote_of("<answer>0.5</answer>", verifier="math") not in half


def test_a_choice_votes_by_its_letter():
    votes = {vote_of(text, verifier="choice") for text in ("<answer>(b)</answer>", "<answer>B. 12 cm</answer>")}
    assert votes == {"B"}


def test_samples_of_one_row_do_not_count_as_independent():
    estimate = clustered_mean([[1, 0], [1, 1], [0, 0]])
    assert estimate.mean == 0.5
    # The rows' means are 1/2, 1 and 0: their standard deviation is 1/2. Six independent samples would give 0.224.
    assert estimate.standard_error == pytest.approx(0.5 / math.sqrt(3))


def test_one_sample_per_row_gives_the_usual_standard_error():
    # Variance of 1, 0, 0, 0 around 1/4: (9/16 + 3/16) / 3 = 1/4.
    assert clustered_mean([[1], [0], [0], [0]]).standard_error == pytest.approx(math.sqrt(1 / 4 / 4))


def test_a_single_row_has_no_standard_error():
    assert clustered_mean([[1, 0, 1, 1]]).standard_error is None
