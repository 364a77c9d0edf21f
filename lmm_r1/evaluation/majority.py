"""majority@k: whether the answer that most of k samples give is right (self-consistency, arXiv 2203.11171)."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from lmm_r1.evaluation.clustered_mean import Estimate, clustered_mean
from remote_rm.answers.extraction import final_answer
from remote_rm.answers.normalization import normalize
from remote_rm.choice_verifier import read_choice
from remote_rm.service.pool import QUICK_CHARS

MAX_NORMALIZED_CHARS = 1000
"""A longer answer is a vote for itself, character by character."""


@dataclass(frozen=True, kw_only=True)
class Ballot:
    """What one sample votes for, and whether it is right."""

    vote: str | None
    """None where the response states no answer: it does not vote."""
    right: bool


def vote_of(response: str, *, verifier: str) -> str | None:
    r"""Return the answer that a response votes for, in a form in which equal answers are mostly equal.

    It is found as the verifiers find it, and normalised as the math verifier does it: `\boxed{\dfrac12}` and
    `<answer>$\frac{1}{2}$</answer>` vote alike, `0.5` does not. For the choice verifier it is the letter.
    """
    # As long as the pool would read it without a time limit; an answer stands at the end.
    answer = final_answer(response[-QUICK_CHARS:])
    if answer is None or not answer.strip():
        return None
    if len(answer) > MAX_NORMALIZED_CHARS:
        return answer.strip()
    choice = read_choice(answer) if verifier == "choice" else None
    return choice.letter if choice else normalize(answer).casefold() or answer.strip()


def majority_is_right(ballots: Sequence[Ballot]) -> bool:
    """Return whether the answer with the most votes is right; of several with as many, the one given first counts.

    False where nobody votes.
    """
    votes = Counter(ballot.vote for ballot in ballots if ballot.vote is not None)
    if not votes:
        return False
    # Counter keeps the order of first occurrence, and most_common is stable.
    winner = votes.most_common(1)[0][0]
    return next(ballot.right for ballot in ballots if ballot.vote == winner)


def majority_at_k(rows: Sequence[Sequence[Ballot]], *, k: int) -> Estimate:
    """Return the mean of `majority_is_right` over groups of k samples and over rows.

    The samples of a row, in their order, are cut into as many groups of k as they give; what is left over is not used.

    Raises:
        ValueError: k is below 1, or some row has fewer samples than k.
    """
    fewest = min(map(len, rows))
    if not 1 <= k <= fewest:
        raise ValueError(f"majority@{k} cannot be told from {fewest} samples")
    return clustered_mean(
        [[fmean(majority_is_right(row[start : start + k]) for start in range(0, len(row) - k + 1, k))] for row in rows]
    )
