"""pass@k: how likely at least one of k samples is right."""

import math
from collections.abc import Sequence

from lmm_r1.evaluation.clustered_mean import Estimate, clustered_mean


def pass_at_k(*, samples: int, right: int, k: int) -> float:
    """Return the unbiased estimate 1 - C(n - c, k) / C(n, k) for n samples of which c are right.

    As a product of factors in [0, 1], which neither overflows nor cancels: Chen et al. 2021, arXiv 2107.03374.

    Raises:
        ValueError: k is not from 1 to `samples`, or `right` not from 0 to `samples`.
    """
    if not 1 <= k <= samples or not 0 <= right <= samples:
        raise ValueError(f"pass@{k} cannot be told from {samples} samples of which {right} are right")
    if samples - right < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / place for place in range(samples - right + 1, samples + 1))


def mean_pass_at_k(verdicts: Sequence[Sequence[bool]], *, k: int) -> Estimate:
    """Return the mean of `pass_at_k` over rows, each given by whether its samples are right."""
    return clustered_mean([[pass_at_k(samples=len(row), right=sum(row), k=k)] for row in verdicts])


def powers_of_two(limit: int) -> list[int]:
    """Return 1, 2, 4, ... up to a limit."""
    return [2**exponent for exponent in range(limit.bit_length())]
