"""What every command that samples asks of its sampling flags."""

import math

from lmm_r1.errors import UserError


def check_sampling(*, temperature: float | None, top_p: float) -> None:
    """Raise UserError for a temperature or a nucleus that nothing can be sampled with; None is left open."""
    if temperature is not None and not (math.isfinite(temperature) and temperature >= 0):
        raise UserError(f"--temperature {temperature}: must be 0 or more")
    if not 0 < top_p <= 1:
        raise UserError(f"--top_p {top_p}: must be above 0 and at most 1")
