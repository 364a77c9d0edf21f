"""What a set of judged responses amounts to: accuracy, pass@k, majority@k, format, length and truncation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from lmm_r1.evaluation.clustered_mean import Estimate, clustered_mean
from lmm_r1.evaluation.majority import Ballot, majority_at_k, vote_of
from lmm_r1.evaluation.pass_at_k import mean_pass_at_k
from lmm_r1.records.responses import JudgedResponse, by_row
from remote_rm.format_check import format_score

QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}


@dataclass(frozen=True, kw_only=True)
class VerifierScores:
    """What one verifier says of a set of rows."""

    accuracy: Estimate
    """avg@k over all samples of each row."""
    pass_at_k: dict[int, Estimate]
    majority_at_k: dict[int, Estimate]
    timed_out: int
    """Responses that were not judged in time; they count as wrong."""
    ungradable_rows: int
    """Rows whose label this verifier cannot read; every answer to them is wrong."""


@dataclass(frozen=True, kw_only=True)
class SampleScores:
    """A set of rows; rates are between 0 and 1."""

    rows: int
    samples: int
    """Responses over all rows."""
    format: float
    """Share of responses that keep to one think block and then one answer block."""
    no_answer_rate: float
    """Share of responses in which no answer is found."""
    truncated_rate: float
    mean_response_tokens: float
    response_tokens: dict[str, float]
    """Quantiles by the names of `QUANTILES`."""
    verifiers: dict[str, VerifierScores]


def summarize(responses: Sequence[JudgedResponse], *, verifiers: Sequence[str], ks: Sequence[int]) -> SampleScores:
    """Return the scores of the responses to one or more rows of one file by one checkpoint.

    Args:
        verifiers: by whose verdicts; every response has theirs.
        ks: the k of pass@k and majority@k; no row may have fewer samples.
    """
    rows = by_row(responses)
    tokens = [response.response_tokens for response in responses]
    votes = [vote_of(response.response, verifier="") for response in responses]
    return SampleScores(
        rows=len(rows),
        samples=len(responses),
        format=fmean(format_score(response.response) for response in responses),
        no_answer_rate=fmean(vote is None for vote in votes),
        truncated_rate=fmean(response.truncated for response in responses),
        mean_response_tokens=fmean(tokens),
        response_tokens={name: float(np.quantile(tokens, share)) for name, share in QUANTILES.items()},
        verifiers={name: _verifier_scores(rows, verifier=name, ks=ks) for name in verifiers},
    )


def by_datasource(
    responses: Sequence[JudgedResponse], *, verifiers: Sequence[str], ks: Sequence[int]
) -> dict[str, SampleScores]:
    """Return `summarize` of each data source, in the order of first occurrence."""
    sources: dict[str, list[JudgedResponse]] = {}
    for response in responses:
        sources.setdefault(response.datasource, []).append(response)
    return {name: summarize(own, verifiers=verifiers, ks=ks) for name, own in sources.items()}


def _verifier_scores(rows: Sequence[Sequence[JudgedResponse]], *, verifier: str, ks: Sequence[int]) -> VerifierScores:
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
        pass_at_k={k: mean_pass_at_k(right, k=k) for k in ks},
        majority_at_k={k: majority_at_k(ballots, k=k) for k in ks},
        timed_out=sum(verdict.timed_out for row in verdicts for verdict in row),
        ungradable_rows=sum(row[0].parts.get("ungradable", 0.0) > 0 for row in verdicts),
    )
