"""How far the engines' log-probs of the sampled tokens are from the trainer's: measured and checked in every step.

Both sides compute the same policy, so anything beyond rounding is a fault: different weights, positions or images. Policy
gradients would then be those of a model that did not write the samples. What top_p and the like leave of the policy is in
neither: the engine reports log-probs of the whole policy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import torch

from lmm_r1.config import PPOConfig, mismatch_limit
from lmm_r1.data.messages import Row, images_of, videos_of
from lmm_r1.errors import UserError

if TYPE_CHECKING:
    from lmm_r1.rl.samples import TrainingSample

Modality = Literal["text", "image", "video"]
MODALITIES: tuple[Modality, ...] = get_args(Modality)
# The logged values of samples that mark rows of a modality; their means are the shares of such rows.
ROWS_WITH: dict[Modality, str] = {"image": "rows/image", "video": "rows/video"}
WHERE_TO_LOOK = (
    "Compare the weights of both sides, positions and rope settings, --rollout.temperature, and, if only rows with images "
    "are off, the processor files and the inputs that the kit gives to the model's forward"
)


@dataclass(frozen=True, kw_only=True)
class Gap:
    """The distances |trainer's - engine's log-prob| over some sampled tokens, in nats."""

    tokens: int
    total: float
    total_exp: float
    """The sum of their exponentials, the factors between the probabilities."""
    largest: float

    @classmethod
    def of(cls, distances: torch.Tensor) -> Gap:
        """Return the gap of a tensor of distances (K,)."""
        # The exponential of 100, a banned token's distance, overflows single precision.
        exact = distances.double()
        return cls(
            tokens=len(exact),
            total=exact.sum().item(),
            total_exp=exact.exp().sum().item(),
            largest=exact.max().item() if len(exact) else 0.0,
        )

    def __add__(self, other: Gap) -> Gap:
        return Gap(
            tokens=self.tokens + other.tokens,
            total=self.total + other.total,
            total_exp=self.total_exp + other.total_exp,
            largest=max(self.largest, other.largest),
        )

    @property
    def mean(self) -> float:
        return self.total / self.tokens

    def statistics(self) -> dict[str, float]:
        """Return the metrics of the gap."""
        return {"mean": self.mean, "mean_exp": self.total_exp / self.tokens, "max": self.largest}


Gaps = dict[Modality, Gap]
"""The gap of each kind of rows that occurs; rows with images and videos are video rows."""


def modality_of(row: Row) -> Modality:
    """Return the modality that a row counts as."""
    if videos_of(row.messages):
        return "video"
    return "image" if images_of(row.messages) else "text"


def gaps_of(samples: Sequence[TrainingSample], log_probs: Sequence[torch.Tensor]) -> Gaps:
    """Return the gaps over the loss tokens of samples.

    Args:
        log_probs: the trainer's of each sample, (A,) or more columns.
    """
    gaps: Gaps = {}
    for kind in MODALITIES:
        apart = [
            (own[: len(its.loss_mask)].float() - _known(its.engine_log_probs)).abs()[its.loss_mask]
            for its, own in zip(samples, log_probs, strict=True)
            if its.modality == kind
        ]
        if apart:
            gaps[kind] = Gap.of(torch.cat(apart))
    return gaps


def merged(parts: Iterable[Mapping[Modality, Gap]]) -> Gaps:
    """Return the gaps over the tokens of all parts."""
    whole: Gaps = {}
    for part in parts:
        for kind, gap in part.items():
            whole[kind] = whole[kind] + gap if kind in whole else gap
    return whole


class Mismatch:
    """The gap of a run: collected over a step, checked and logged in every step."""

    def __init__(self, config: PPOConfig, *, unchecked: frozenset[Modality] = frozenset()) -> None:
        """Args: unchecked: modalities for which the kit knows that this engine cannot agree with the trainer."""
        self.limit = mismatch_limit(config)
        self.unchecked = unchecked
        # After the first step, samples of older weights differ from the policy, which is not a fault.
        self._drifts = config.train.async_enable
        self.checked = False
        # Whether the step's gaps were measured before its update, whose passes measure them again.
        self.measured = False
        self._gaps: Gaps = {}
        # Those of the last step, if its own passes measured them.
        self._late: Gaps = {}

    def measure(self, samples: Sequence[TrainingSample]) -> None:
        """Note the gap of a rollout whose log-probs were computed before its update.

        Raises UserError if it is beyond the limit.
        """
        self._gaps = merged((self._gaps, gaps_of(samples, [_known(sample.log_probs) for sample in samples])))
        self.measured = True
        if not (self.checked and self._drifts):
            self._check(self._gaps, outcome="No weight was changed")
        self.checked = True

    def take_metrics(self, update_gaps: Iterable[Mapping[Modality, Gap]] = ()) -> dict[str, float]:
        """Return the step's metrics and begin the next step.

        Args:
            update_gaps: of the update's passes, which count if the step was not measured before its update.
        """
        if not self.measured:
            self._gaps = merged((self._gaps, *update_gaps))
        self._late = {} if self.measured or self._drifts else self._gaps
        gaps = {kind: gap for kind, gap in self._gaps.items() if gap.tokens}
        self._gaps, self.measured = {}, False
        if not gaps:
            return {}
        whole = sum(list(gaps.values())[1:], start=next(iter(gaps.values())))
        named = {"mismatch": whole, **{f"mismatch/{kind}": gap for kind, gap in gaps.items()}}
        return {f"{name}/{key}": value for name, gap in named.items() for key, value in gap.statistics().items()}

    def hold(self, step: int) -> None:
        """Raise UserError after a step whose update's passes have measured a gap beyond the limit."""
        self._check(self._late, outcome=f"Step {step} was trained with them")

    def _check(self, gaps: Gaps, *, outcome: str) -> None:
        """Raise UserError if the mean distance of the rows of a kind is beyond the limit or is not a number.

        The mean is over the tokens of each kind separately: a fault with images shows only in rows with images. The largest
        distance says little: rounding moves the log-probs of rare tokens by more than many faults do.
        """
        counted = {kind: gap for kind, gap in sorted(gaps.items()) if gap.tokens and kind not in self.unchecked}
        if beyond := {kind: gap for kind, gap in counted.items() if not gap.mean <= self.limit}:
            found = ", ".join(
                f"{gap.mean:.3g} on average over {gap.tokens} tokens of {kind} rows (largest {gap.largest:.3g})"
                for kind, gap in beyond.items()
            )
            raise UserError(
                f"the engine and the trainer disagree on the log-probs of a step's samples: {found}; rounding makes less "
                f"than --algo.mismatch_limit {self.limit:g}. {outcome}. {WHERE_TO_LOOK}. If both sides are right, raise the "
                "limit"
            )


def _known(log_probs: torch.Tensor | None) -> torch.Tensor:
    assert log_probs is not None, "both sides have given them"
    return log_probs
