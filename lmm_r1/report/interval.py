"""How far a share that was counted in some rows may lie from the true one."""

import math

# The 97.5 % quantile of the normal distribution.
Z = 1.96


def wilson_interval(share: float, *, count: int) -> tuple[float, float]:
    """Return the 95 % confidence interval of a share seen in `count` rows (Wilson, 1927, J. Am. Stat. Assoc. 22)."""
    if count == 0:
        return 0.0, 1.0
    middle = (share + Z**2 / (2 * count)) / (1 + Z**2 / count)
    half = Z * math.sqrt(share * (1 - share) / count + Z**2 / (4 * count**2)) / (1 + Z**2 / count)
    return max(0.0, middle - half), min(1.0, middle + half)


def difference_interval(share: float, *, count: int, reference: float, reference_count: int) -> tuple[float, float]:
    """Return the 95 % confidence interval of `share - reference` (Newcombe, 1998, Stat. Med. 17, method 10)."""
    low, high = wilson_interval(share, count=count)
    reference_low, reference_high = wilson_interval(reference, count=reference_count)
    difference = share - reference
    return (
        difference - math.hypot(share - low, reference_high - reference),
        difference + math.hypot(high - share, reference - reference_low),
    )
