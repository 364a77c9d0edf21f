"""How far the engines' log-probs of the sampled tokens are from the trainer's: measured and checked in every step.

Both sides compute the same policy, so anything beyond rounding is a fault: different weights, positions or images. Policy
gradients would then be those of a model that did not write the samples. What top_p and the like leave of the policy is in
neither: the engine reports log-probs of the whole policy.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
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
WHERE_TO_LOOK = {
    "media": "the engine and the trainer see different images: compare the checkpoint's processor files with those it was "
    "trained with, and the inputs that the kit gives to the model's forward",
    "late": "it grows along the sequence: compare the checkpoint's rope settings, positions and attention window",
    "all": "compare the weights of both (did the last ones reach the engine?), positions, and --rollout.temperature",
}


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
        # What was beyond the limit in the last step, if its own passes measured that.
        self._beyond: Gaps = {}

    def measure(self, samples: Sequence[TrainingSample]) -> None:
        """Note the gap of a rollout whose log-probs were computed before its update.

        Raises UserError if it is beyond the limit.
        """
        self.add([gaps_of(samples, [_known(sample.log_probs) for sample in samples])])
        self.measured = True
        if not (self.checked and self._drifts):
            check(self._gaps, samples, limit=self.limit, unchecked=self.unchecked)
        self.checked = True

    def add(self, parts: Iterable[Mapping[Modality, Gap]]) -> None:
        """Add gaps of any rank and pass to the step."""
        self._gaps = merged((self._gaps, *parts))

    def take_metrics(self, update_gaps: Iterable[Mapping[Modality, Gap]] = ()) -> dict[str, float]:
        """Return the step's metrics and begin the next step.

        Args:
            update_gaps: of the update's passes, which count if the step was not measured before its update.
        """
        if not self.measured:
            self.add(update_gaps)
            if not self._drifts:
                self._beyond = _beyond(self._gaps, limit=self.limit, unchecked=self.unchecked)
        gaps = {kind: gap for kind, gap in self._gaps.items() if gap.tokens}
        self._gaps, self.measured = {}, False
        if not gaps:
            return {}
        whole = sum(list(gaps.values())[1:], start=next(iter(gaps.values())))
        named = {"mismatch": whole, **{f"mismatch/{kind}": gap for kind, gap in gaps.items()}}
        return {f"{name}/{key}": value for name, gap in named.items() for key, value in gap.statistics().items()}

    def hold(self, step: int) -> None:
        """Raise UserError after a step whose update's passes have measured a gap beyond the limit."""
        if self._beyond:
            raise UserError(
                _message(self._beyond, limit=self.limit, hint="all", outcome=f"Step {step} was trained with them")
            )


def check(
    gaps: Mapping[Modality, Gap], samples: Sequence[TrainingSample], *, limit: float, unchecked: frozenset[Modality]
) -> None:
    """Raise UserError if the mean distance of the rows of a kind is beyond the limit or is not a number.

    The mean is over the tokens of each kind separately: a fault with images shows only in rows with images. The largest
    distance says little: rounding moves the log-probs of rare tokens by more than many faults do.
    """
    off = _beyond(gaps, limit=limit, unchecked=unchecked)
    if not off:
        return
    if "text" in gaps and gaps["text"].tokens and "text" not in off:
        hint = "media"
    else:
        early, late = _halves(samples, kinds=off)
        hint = "late" if late > 2 * max(early, limit / 2) else "all"
    raise UserError(_message(off, limit=limit, hint=hint, outcome="No weight was changed"))


def _beyond(gaps: Mapping[Modality, Gap], *, limit: float, unchecked: frozenset[Modality]) -> Gaps:
    """Return the gaps of the kinds whose mean is beyond the limit or is not a number."""
    return {
        kind: gap
        for kind, gap in sorted(gaps.items())
        if gap.tokens and kind not in unchecked and not gap.mean <= limit
    }


def _message(beyond: Mapping[Modality, Gap], *, limit: float, hint: str, outcome: str) -> str:
    return (
        f"the engine and the trainer disagree on the log-probs of a step's samples: {_text(beyond)}; rounding makes less "
        f"than --algo.mismatch_limit {limit:g}. {outcome}. {WHERE_TO_LOOK[hint][0].upper()}{WHERE_TO_LOOK[hint][1:]}. If both "
        "sides are right, raise the limit"
    )


def _halves(samples: Sequence[TrainingSample], *, kinds: Collection[Modality]) -> tuple[float, float]:
    """Return the mean distance over the first and over the second half of the positions of the loss tokens."""
    counted = [sample for sample in samples if sample.modality in kinds]
    places = torch.cat([sample.loss_mask.nonzero().flatten() for sample in counted])
    values = torch.cat(
        [(_known(one.log_probs) - _known(one.engine_log_probs)).abs()[one.loss_mask] for one in counted]
    )
    first = places <= places.median()
    return values[first].mean().item(), values[~first].mean().item() if (~first).any() else 0.0


def _known(log_probs: torch.Tensor | None) -> torch.Tensor:
    assert log_probs is not None, "both sides have given them"
    return log_probs


def _text(gaps: Mapping[Modality, Gap]) -> str:
    return ", ".join(
        f"{gap.mean:.3g} on average over {gap.tokens} tokens of {kind} rows (largest {gap.largest:.3g})"
        for kind, gap in gaps.items()
    )
