"""The scores of a set of judged responses: accuracy, pass@k, majority@k, format, length and truncation."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean

import numpy as np

from lmm_r1.agents.environment import Environment
from lmm_r1.config.generation import AGENT_VERIFIER, reward_part
from lmm_r1.data.sample import EpisodeResult
from lmm_r1.errors import UserError
from lmm_r1.records.responses import JudgedResponse, PlayedEpisode, ShownTurn, by_row
from remote_rm.answers.choice import read_choice
from remote_rm.answers.extraction import final_answer
from remote_rm.answers.reading import normalize
from remote_rm.responses import format_score
from remote_rm.service.pool import QUICK_CHARS
from remote_rm.verifier import Score

ENDS = ("over", "turns", "images", "tokens")
"""The valid ends of an episode: over, or at a limit. A row whose environment failed is left out."""


@dataclass(frozen=True, kw_only=True)
class EpisodeScores:
    """Means over the episodes of a set of rows."""

    turns: float
    shown_images: float
    counts: dict[str, float]
    """The environment's counts per episode: tool calls, malformed calls."""
    rewards: dict[str, float]
    ends: dict[str, float]


def episode_scores(responses: Sequence[JudgedResponse]) -> EpisodeScores | None:
    """Return the scores of the episodes among the responses; None if there are none."""
    episodes = [response.episode for response in responses if response.episode is not None]
    if not episodes:
        return None
    ended = Counter(episode.end for episode in episodes)
    return EpisodeScores(
        turns=fmean(episode.turns for episode in episodes),
        shown_images=fmean(episode.shown_images for episode in episodes),
        counts=_means(episodes, lambda episode: episode.counts),
        rewards=_means(episodes, lambda episode: episode.rewards),
        ends={end: ended[end] / len(episodes) for end in ENDS},
    )


def _means(episodes: Sequence[PlayedEpisode], values: Callable[[PlayedEpisode], dict]) -> dict[str, float]:
    names = dict.fromkeys(name for episode in episodes for name in values(episode))
    return {name: fmean(values(episode).get(name, 0) for episode in episodes) for name in names}


def default_verifiers(environment: Environment, *, otherwise: str) -> tuple[str, ...]:
    """Return the default verifiers for episodes: the first part of the environment's reward, if it gives any."""
    return (f"{AGENT_VERIFIER}:{environment.rewards[0]}",) if environment.rewards else (otherwise,)


def check_reward_parts(verifiers: Sequence[str], environment: Environment) -> None:
    """Raise UserError for a verifier that uses a part of the reward which the environment does not give."""
    for verifier in verifiers:
        part = reward_part(verifier)
        if part is not None and part not in environment.rewards:
            known = ", ".join(environment.rewards) or "none, so a verifier such as math is needed"
            raise UserError(f"--reward {verifier}: the parts that {environment.name} gives are {known}")


def environment_scores(verifier: str, played: Sequence[EpisodeResult | None]) -> list[Score]:
    """Return the scores of episodes by a verifier `agent:PART`: the part as it was earned."""
    part = reward_part(verifier)
    assert part is not None, f"{verifier} judges responses"
    scores = []
    for one in played:
        assert one is not None, "the config checks require episodes"
        value = one.rewards[part]
        scores.append(Score(reward=value, score=value, parts={part: value}))
    return scores


def episode_of(played: EpisodeResult) -> PlayedEpisode:
    """Return an episode in the form of the file of responses; its pictures must be files."""
    return PlayedEpisode(
        end=played.end,
        turns=played.turns,
        shown_images=played.images,
        rewards=dict(played.rewards),
        counts=dict(played.counts),
        said=tuple(
            ShownTurn(
                role=one.role,
                text=one.text,
                images=tuple(part.source for part in one.images if isinstance(part.source, str)),
            )
            for one in played.said
        ),
    )


QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
MAX_NORMALIZED_CHARS = 1000
"""A longer answer is compared character by character when votes are counted."""


@dataclass(frozen=True, kw_only=True)
class ScoreEstimate:
    mean: float
    standard_error: float | None
    """None for a single row, which does not show the spread over rows."""


@dataclass(frozen=True, kw_only=True)
class VerifierScores:
    accuracy: ScoreEstimate
    """avg@k over all samples of each row; a mean of scores between 0 and 1 for a verifier that gives partial credit."""
    pass_at_k: dict[int, ScoreEstimate]
    majority_at_k: dict[int, ScoreEstimate]
    timed_out: int
    ungradable_rows: int
    """Rows whose label this verifier cannot read; every answer to them counts as wrong."""
    within_turns: dict[int, ScoreEstimate] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class SampleScores:
    """A set of rows; rates are between 0 and 1."""

    rows: int
    samples: int
    format: float
    """Share of responses with exactly one think block followed by one answer block."""
    no_answer_rate: float
    """Share of responses without an answer."""
    truncated_rate: float | None
    mean_response_tokens: float | None
    response_tokens: dict[str, float]
    """Quantiles of the same by the names of `QUANTILES`; empty if there are none."""
    verifiers: dict[str, VerifierScores]
    episodes: EpisodeScores | None = None


def summarize(
    responses: Sequence[JudgedResponse], *, verifiers: Sequence[str], ks: Sequence[int], most_turns: int = 0
) -> SampleScores:
    """Return the scores of one checkpoint's responses to one or more rows of one file."""
    rows = by_row(responses)
    tokens = [response.response_tokens for response in responses if response.response_tokens is not None]
    truncated = [response.truncated for response in responses if response.truncated is not None]
    votes = [vote_of(response.response, verifier="") for response in responses]
    return SampleScores(
        rows=len(rows),
        samples=len(responses),
        format=fmean(format_score(response.response) for response in responses),
        no_answer_rate=fmean(vote is None for vote in votes),
        truncated_rate=fmean(truncated) if truncated else None,
        mean_response_tokens=fmean(tokens) if tokens else None,
        response_tokens=(
            {name: float(np.quantile(tokens, share)) for name, share in QUANTILES.items()} if tokens else {}
        ),
        verifiers={name: _verifier_scores(rows, verifier=name, ks=ks, most_turns=most_turns) for name in verifiers},
        episodes=episode_scores(responses),
    )


def by_datasource(responses: Sequence[JudgedResponse]) -> dict[str, list[JudgedResponse]]:
    """Return the responses of each data source, in the order of first occurrence."""
    sources: dict[str, list[JudgedResponse]] = {}
    for response in responses:
        sources.setdefault(response.datasource, []).append(response)
    return sources


def _verifier_scores(
    rows: Sequence[Sequence[JudgedResponse]], *, verifier: str, ks: Sequence[int], most_turns: int
) -> VerifierScores:
    verdicts = [[response.verdicts[verifier] for response in row] for row in rows]
    ballots = [
        [
            Ballot(vote=vote_of(response.response, verifier=verifier), right=response.verdicts[verifier].right)
            for response in row
        ]
        for row in rows
    ]
    right = [[verdict.right for verdict in row] for row in verdicts]
    return VerifierScores(
        accuracy=clustered_mean([[verdict.score for verdict in row] for row in verdicts]),
        pass_at_k={
            k: clustered_mean([[pass_at_k(samples=len(row), right=sum(row), k=k)] for row in right]) for k in ks
        },
        majority_at_k={k: majority_at_k(ballots, k=k) for k in ks},
        timed_out=sum(verdict.timed_out for row in verdicts for verdict in row),
        ungradable_rows=sum(row[0].parts.get("ungradable", 0.0) > 0 for row in verdicts),
        within_turns={
            turns: clustered_mean(
                [
                    [
                        float(one.verdicts[verifier].right and (one.episode.turns if one.episode else 1) <= turns)
                        for one in row
                    ]
                    for row in rows
                ]
            )
            for turns in range(1, most_turns + 1)
        },
    )


def pass_at_k(*, samples: int, right: int, k: int) -> float:
    """Return the unbiased estimate 1 - C(n - c, k) / C(n, k) for n samples of which c are right.

    Computed as a product of factors in [0, 1], which neither overflows nor cancels: Chen et al. 2021, arXiv 2107.03374.

    Raises:
        ValueError: k is not from 1 to `samples`, or `right` not from 0 to `samples`.
    """
    if not 1 <= k <= samples or not 0 <= right <= samples:
        raise ValueError(f"pass@{k} cannot be computed from {samples} samples of which {right} are right")
    if samples - right < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / place for place in range(samples - right + 1, samples + 1))


def powers_of_two(limit: int) -> list[int]:
    """Return 1, 2, 4, ... up to a limit."""
    return [2**exponent for exponent in range(limit.bit_length())]


@dataclass(frozen=True, kw_only=True)
class Ballot:
    """The vote of one sample, and whether it is correct."""

    vote: str | None
    """None if the response states no answer; it then does not vote."""
    right: bool


def vote_of(response: str, *, verifier: str) -> str | None:
    r"""Return the answer that a response votes for, in a form in which equal answers are mostly equal.

    It is extracted as by the verifiers, and normalised as by the math verifier: `\boxed{\dfrac12}` and
    `<answer>$\frac{1}{2}$</answer>` vote alike, `0.5` does not. For the choice verifier it is the letter.
    """
    # The pool reads this many characters without a time limit; the answer is at the end.
    answer = final_answer(response[-QUICK_CHARS:])
    if answer is None or not answer.strip():
        return None
    if len(answer) > MAX_NORMALIZED_CHARS:
        return answer.strip()
    choice = read_choice(answer) if verifier == "choice" else None
    return choice.letter if choice else normalize(answer).casefold() or answer.strip()


def majority_is_right(ballots: Sequence[Ballot]) -> bool:
    """Return whether the answer with the most votes is correct; of equally frequent ones, the first counts."""
    votes = Counter(ballot.vote for ballot in ballots if ballot.vote is not None)
    if not votes:
        return False
    # Counter keeps the order of first occurrence, and most_common is stable.
    winner = votes.most_common(1)[0][0]
    return next(ballot.right for ballot in ballots if ballot.vote == winner)


def majority_at_k(rows: Sequence[Sequence[Ballot]], *, k: int) -> ScoreEstimate:
    """Return the mean of `majority_is_right` over groups of k samples and over rows.

    The samples of a row are split, in order, into groups of k; a remainder is not used.

    Raises:
        ValueError: k is below 1, or some row has fewer samples than k.
    """
    fewest = min(map(len, rows))
    if not 1 <= k <= fewest:
        raise ValueError(f"majority@{k} cannot be computed from {fewest} samples")
    return clustered_mean(
        [[fmean(majority_is_right(row[start : start + k]) for start in range(0, len(row) - k + 1, k))] for row in rows]
    )


def clustered_mean(rows: Sequence[Sequence[float]]) -> ScoreEstimate:
    """Return the mean over the samples of all rows, with its standard error clustered over rows.

    Samples of one row are correlated, so the squared sums of each row's deviations are added up (Miller 2024, arXiv
    2411.00640), times R / (R - 1) for R rows. With the same number of samples per row, this is the sample standard
    deviation of the rows' means divided by the root of R.

    Args:
        rows: the samples of each row; at least one row, and at least one sample in each.
    """
    assert rows, "there is no mean of no rows"
    assert all(rows), "every row needs a sample"
    total = sum(map(len, rows))
    mean = math.fsum(value for row in rows for value in row) / total
    if len(rows) == 1:
        return ScoreEstimate(mean=mean, standard_error=None)
    squared = math.fsum(math.fsum(value - mean for value in row) ** 2 for row in rows)
    return ScoreEstimate(mean=mean, standard_error=math.sqrt(squared * len(rows) / (len(rows) - 1)) / total)
