"""Policy losses, and the correction for rollouts of an older policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Literal, get_args

import torch

from lmm_r1.config.ppo import LossAggregation, PolicyLossName
from lmm_r1.host.openrlhf_models import aggregate_loss

# As in OpenRLHF: probabilities are held this far from 0 and 1, whose logarithms would be infinite.
LEAST_PROBABILITY = 1e-6


@dataclass(frozen=True, kw_only=True)
class Correction:
    """As the flags `--algo.advantage.is_correction_*` say it."""

    level: Literal["off", "token", "seq"] = "off"
    mode: Literal["mask", "clip"] = "mask"
    gating: Literal["ratio", "binary_kl", "tv"] = "ratio"
    bounds: tuple[float, float] = (0.5, 5.0)


@dataclass(frozen=True, kw_only=True)
class CorrectionWeights:
    weights: torch.Tensor
    """(B, A) or (B, 1), of the tokens' losses."""
    filtered: torch.Tensor
    """The share that is outside the bounds, of loss tokens or of sequences that have some."""


def correction_weights(
    log_probs: torch.Tensor, rollout_log_probs: torch.Tensor, mask: torch.Tensor, correction: Correction
) -> CorrectionWeights:
    """Return what token losses are multiplied by, from the trainer's log-probs and the engine's of the same tokens, (B, A).

    With r = pi_train / pi_engine of a token:

    - level token, mode clip: r within the bounds (truncated importance sampling, fengyao.notion.site/off-policy-rl);
    - level token, mode mask: r, and 0 outside the bounds (IcePop);
    - level seq: by the geometric mean of a sequence's r, which length does not blow up as it does their product ("When Speed
      Kills Stability", the geometric level of verl's rollout correction). Mode mask leaves sequences out whose mean is
      outside the bounds, with tokens of others weighted by their r; mode clip weighs all tokens by the mean within the bounds.

    The bounds of mode mask may be those of a divergence of each token, or its mean over a sequence, in place of r. All but
    the geometric mean as a weight is OpenRLHF's.

    Args:
        mask: (B, A), 1 for loss tokens.
    """
    low, high = correction.bounds
    log_ratios = torch.where(mask.bool(), log_probs - rollout_log_probs, 0.0).detach()
    per_sequence = correction.level == "seq"
    if correction.gating == "ratio":
        found = (sequence_means(log_ratios, mask) if per_sequence else log_ratios).exp()
    else:
        found = _divergences(log_probs.detach(), rollout_log_probs, gating=correction.gating)
        found = sequence_means(found, mask) if per_sequence else found
    within = (found >= low) & (found <= high)
    units = (mask.sum(dim=-1, keepdim=True) > 0) if per_sequence else mask.bool()
    weights = found.clamp(low, high) if correction.mode == "clip" else torch.where(within, log_ratios.exp(), 0.0)
    return CorrectionWeights(weights=weights, filtered=(~within & units).sum() / units.sum().clamp(min=1))


def sequence_means(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return each sequence's mean over its loss tokens, (B, 1), of values and mask (B, A); 0 for one that has none."""
    kept = torch.where(mask.bool(), values, 0.0)
    return kept.sum(dim=-1, keepdim=True) / mask.sum(dim=-1, keepdim=True).clamp(min=1)


def _divergences(log_probs: torch.Tensor, rollout_log_probs: torch.Tensor, *, gating: str) -> torch.Tensor:
    """Return the divergence of each token, (B, A), of the two-valued distributions of being sampled or not."""
    engine, trainer = (
        values.exp().clamp(LEAST_PROBABILITY, 1 - LEAST_PROBABILITY) for values in (rollout_log_probs, log_probs)
    )
    if gating == "tv":
        return (engine - trainer).abs()
    return engine * (engine / trainer).log() + (1 - engine) * ((1 - engine) / (1 - trainer)).log()


# As in OpenRLHF: of a log-ratio, beyond which its exponential says nothing.
LARGEST_LOG_RATIO = 20.0


@dataclass(frozen=True, kw_only=True)
class PolicyPass:
    """The samples of a pass, all (B, A)."""

    log_probs: torch.Tensor
    """The policy's, with a gradient."""
    old_log_probs: torch.Tensor
    """Those of the policy before the update."""
    rollout_log_probs: torch.Tensor | None
    """The engine's, which a correction of the mismatch needs."""
    advantages: torch.Tensor
    mask: torch.Tensor
    """1 for loss tokens."""

    def log_ratios(self, *, to: torch.Tensor | None = None) -> torch.Tensor:
        """Return log pi - log pi_old, 0 where there is no loss token; or minus other log-probs than the old ones."""
        before = self.old_log_probs if to is None else to
        return torch.where(self.mask.bool(), self.log_probs - before, 0.0)


@dataclass(frozen=True, kw_only=True)
class LossSettings:
    """What a run's flags say of its policy loss."""

    loss: PolicyLossName = "ppo"
    aggregation: LossAggregation = "token-mean"
    length: int = 1
    """Tokens that seq-mean-token-sum-norm divides by."""
    clip: tuple[float, float] = (0.2, 0.2)
    """How far below and above 1 ratios count."""
    dual_clip: float | None = None
    temperatures: tuple[float, float] = (1.0, 1.05)
    """Of SAPO's gate, where the advantage is positive and where it is not."""
    correction: Correction = Correction()

    @classmethod
    def of(cls, args: SimpleNamespace) -> LossSettings:
        """Return those of a run, by its arguments as OpenRLHF's workers have them."""
        actor, advantage = args.actor, args.algo.advantage
        return cls(
            loss=actor.policy_loss_type,
            aggregation=actor.loss_agg_mode,
            length=actor.loss_agg_length or 1,
            clip=actor.eps_clip_low_high,
            dual_clip=actor.dual_clip,
            temperatures=(actor.sapo_temperature_pos, actor.sapo_temperature_neg),
            correction=Correction(
                level=advantage.is_correction_level,
                mode=advantage.is_correction_mode,
                gating=advantage.is_correction_gating,
                bounds=advantage.is_correction_threshold,
            ),
        )


@dataclass(frozen=True, kw_only=True)
class TokenLosses:
    losses: torch.Tensor
    """(B, A)."""
    clipped: torch.Tensor
    """(B, A), where a bound of the ratio holds a gradient back or its weight."""


PolicyLossFunction = Callable[[PolicyPass, LossSettings], TokenLosses]


def ppo(given: PolicyPass, settings: LossSettings) -> TokenLosses:
    """PPO (arXiv:1707.06347): -min(r A, clip(r, 1 - low, 1 + high) A), with r = pi / pi_old of each token.

    Bounds that differ are DAPO's (arXiv:2503.14476); with a dual clip c (arXiv:1912.09729), at most -c A where A < 0.
    """
    return _clipped(_exp(given.log_ratios()), given, settings)


def gspo(given: PolicyPass, settings: LossSettings) -> TokenLosses:
    """GSPO (arXiv:2507.18071): PPO's loss with s = (pi(y) / pi_old(y))^(1 / |y|) of the whole response y for r."""
    ratios = _exp(sequence_means(_response_log_ratios(given, settings), given.mask))
    return _clipped(ratios * given.mask, given, settings)


def gspo_token(given: PolicyPass, settings: LossSettings) -> TokenLosses:
    """GSPO-token (arXiv:2507.18071, section 4.3): GSPO with s_t = sg(s) pi_t / sg(pi_t), of which A_t weighs each by itself.

    Where all tokens of a response have one advantage, loss and gradient are GSPO's.
    """
    means = sequence_means(_response_log_ratios(given, settings), given.mask).detach()
    return _clipped(_exp(means + given.log_ratios(to=given.log_probs.detach())) * given.mask, given, settings)


def cispo(given: PolicyPass, settings: LossSettings) -> TokenLosses:
    """CISPO (MiniMax-M1, arXiv:2506.13585): -sg(clip(r, 1 - low, 1 + high)) A log pi: no token loses its gradient.

    The paper bounds from above alone: low of 1 or more.
    """
    low, high = settings.clip
    ratios = _exp(given.log_ratios()).detach()
    weights = ratios.clamp(1 - low, 1 + high)
    log_probs = torch.where(given.mask.bool(), given.log_probs, 0.0)
    return TokenLosses(losses=-weights * given.advantages * log_probs, clipped=weights != ratios)


def sapo(given: PolicyPass, settings: LossSettings) -> TokenLosses:
    """SAPO (arXiv:2511.20347): -(4 / tau) sigmoid(tau (r - 1)) A, with one tau where A > 0 and another where it is not.

    At r = 1 its gradient is that of the policy gradient, and fades as r leaves 1, without a bound.
    """
    positive, negative = settings.temperatures
    temperatures = torch.where(given.advantages > 0, positive, negative)
    gates = torch.sigmoid(temperatures * (_exp(given.log_ratios()) - 1)) * 4 / temperatures
    return TokenLosses(losses=-gates * given.advantages, clipped=torch.zeros_like(gates, dtype=torch.bool))


POLICY_LOSSES: dict[str, PolicyLossFunction] = {name: globals()[name] for name in get_args(PolicyLossName)}
"""The functions above that `--actor.policy_loss_type` names."""
SEQUENCE_LOSSES = ("gspo", "gspo_token")
"""Those whose ratio is that of a sequence: OpenRLHF takes the mean over sequences of them in any case."""


class PolicyLoss:
    """The policy loss of a run, called as OpenRLHF's."""

    def __init__(self, settings: LossSettings) -> None:
        self.settings = settings

    def __call__(
        self,
        log_probs: torch.Tensor,
        old_log_probs: torch.Tensor,
        advantages: torch.Tensor,
        action_mask: torch.Tensor,
        rollout_log_probs: torch.Tensor | None = None,
        dp_size: int = 1,
        batch_num_tokens: torch.Tensor | float | None = None,
        global_batch_size: torch.Tensor | float | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Return the pass's part of the step's loss, and over its loss tokens the share that is clipped and the KL to the old
        policy; with a correction, the KL to the engine's and the share that is filtered, of tokens or of sequences.

        Args:
            log_probs, old_log_probs, advantages, action_mask, rollout_log_probs: (B, A).
            dp_size: over how many ranks gradients are averaged.
            batch_num_tokens, global_batch_size: loss tokens of the whole optimizer step, and its sequences that have some.
        """
        given = PolicyPass(
            log_probs=log_probs,
            old_log_probs=old_log_probs,
            rollout_log_probs=rollout_log_probs,
            advantages=advantages,
            mask=action_mask,
        )
        found = POLICY_LOSSES[self.settings.loss](given, self.settings)
        losses, engine_kl, filtered = found.losses, None, None
        correction = self.settings.correction
        if correction.level != "off" and self.settings.loss not in SEQUENCE_LOSSES:
            assert rollout_log_probs is not None, "engines report log-probs in training"
            weights = correction_weights(old_log_probs, rollout_log_probs, action_mask, correction)
            losses, filtered = losses * weights.weights, weights.filtered
            engine_kl = _mean(rollout_log_probs - old_log_probs, action_mask)
        loss = aggregated(
            losses,
            action_mask,
            settings=self.settings,
            dp_size=dp_size,
            tokens=action_mask.sum() if batch_num_tokens is None else batch_num_tokens,
            sequences=(action_mask.sum(dim=-1) > 0).sum() if global_batch_size is None else global_batch_size,
        )
        old_kl = _mean(-given.log_ratios().detach(), action_mask)
        return loss, _mean(found.clipped.float(), action_mask), old_kl, engine_kl, filtered


def aggregated(
    losses: torch.Tensor,
    mask: torch.Tensor,
    *,
    settings: LossSettings,
    dp_size: int,
    tokens: torch.Tensor | float,
    sequences: torch.Tensor | float,
) -> torch.Tensor:
    """Return the part of an optimizer step's loss that a pass's token losses (B, A) are; parts of all passes add up to it.

    Args:
        mask: (B, A), 1 for loss tokens.
        tokens, sequences: of the whole optimizer step.
    """
    if settings.aggregation == "seq-mean-token-sum-norm":
        # Dr. GRPO (arXiv:2503.20783): divided by lengths, long wrong responses would weigh less than short ones.
        return (losses * mask).sum() / (settings.length * sequences) * dp_size
    per_token = settings.aggregation == "token-mean" and settings.loss not in SEQUENCE_LOSSES
    counts = {"batch_num_tokens": tokens, "global_batch_size": sequences}
    return aggregate_loss(losses, mask, token_level_loss=per_token, dp_size=dp_size, **counts)


def _clipped(ratios: torch.Tensor, given: PolicyPass, settings: LossSettings) -> TokenLosses:
    low, high = settings.clip
    plain = ratios * given.advantages
    held = ratios.clamp(1 - low, 1 + high) * given.advantages
    objective = torch.min(plain, held)
    if settings.dual_clip is not None:
        bounded = torch.max(objective, settings.dual_clip * given.advantages)
        objective = torch.where(given.advantages < 0, bounded, objective)
    return TokenLosses(losses=-objective, clipped=held < plain)


def _response_log_ratios(given: PolicyPass, settings: LossSettings) -> torch.Tensor:
    """Return the log-ratios to the old policy or, where the mismatch is corrected, to the engine's, as OpenRLHF does."""
    return given.log_ratios(to=None if settings.correction.level == "off" else given.rollout_log_probs)


def _exp(log_ratios: torch.Tensor) -> torch.Tensor:
    return log_ratios.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()


def _mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the mean over loss tokens, 0 where there is none."""
    return torch.where(mask.bool(), values, 0.0).sum() / mask.sum().clamp(min=1)
