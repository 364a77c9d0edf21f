import pytest

from lmm_r1.evaluation.majority import Ballot, majority_at_k, majority_is_right, vote_of

pytestmark = pytest.mark.unit

RIGHT, WRONG, OTHER = Ballot(vote="4", right=True), Ballot(vote="5", right=False), Ballot(vote="6", right=False)
SILENT = Ballot(vote=None, right=False)


def test_most_votes_win():
    assert majority_is_right([WRONG, RIGHT, OTHER, RIGHT])
    assert not majority_is_right([WRONG, RIGHT, WRONG])


def test_a_tie_goes_to_the_answer_given_first():
    assert majority_is_right([RIGHT, WRONG, WRONG, RIGHT])
    assert not majority_is_right([WRONG, RIGHT, RIGHT, WRONG])


def test_a_response_without_an_answer_does_not_vote():
    assert majority_is_right([SILENT, SILENT, RIGHT])
    assert not majority_is_right([SILENT, SILENT])


def test_samples_are_cut_into_groups_of_k():
    rows = [[RIGHT, RIGHT, WRONG, WRONG, RIGHT], [WRONG] * 5]
    assert majority_at_k(rows, k=1).mean == pytest.approx(0.3)
    # Of the first row, the pairs (right, right) and (wrong, wrong); the fifth sample is left over.
    assert majority_at_k(rows, k=2).mean == 0.25
    assert majority_at_k(rows, k=5).mean == 0.5


def test_more_samples_than_there_are_is_refused():
    with pytest.raises(ValueError, match="majority@3 cannot be told from 2 samples"):
        majority_at_k([[RIGHT] * 4, [RIGHT] * 2], k=3)


def test_equal_answers_vote_alike():
    half = {vote_of(text, verifier="math") for text in (r"So \boxed{\dfrac12}", r"<answer>$\frac{1}{2}$</answer>")}
    assert len(half) == 1
    assert vote_of("<answer>0.5</answer>", verifier="math") not in half


def test_a_choice_votes_by_its_letter():
    votes = {vote_of(text, verifier="choice") for text in ("<answer>(b)</answer>", "<answer>B. 12 cm</answer>")}
    assert votes == {"B"}


def test_no_answer_is_no_vote():
    assert vote_of("<think>I wonder", verifier="math") is None
    assert vote_of("<answer> </answer>", verifier="math") is None
