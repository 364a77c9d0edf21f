"""Policy losses, and the correction for rollouts of an older policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from lmm_r1.config import PPOConfig
from lmm_r1.config.ppo import LossAggregation, PolicyLossName
from lmm_r1.errors import UserError
from lmm_r1.files.user_code import UserFunction, load_user_function

# As in OpenRLHF: probabilities stay this far from 0 and 1, whose logarithms would be infinite.
LEAST_PROBABILITY = 1e-6


@dataclass(frozen=True, kw_only=True)
class Correction:
    """The settings of `--algo.advantage.is_correction_*`."""

    level: Literal["off", "token", "seq"] = "off"
    mode: Literal["mask", "clip"] = "mask"
    gating: Literal["ratio", "binary_kl", "tv"] = "ratio"
    bounds: tuple[float, float] = (0.5, 5.0)


@dataclass(frozen=True, kw_only=True)
class CorrectionWeights:
    weights: torch.Tensor
    """(B, A) or (B, 1), of the tokens' losses."""
    filtered: torch.Tensor
    """The share of loss tokens, or of sequences with loss tokens, that is outside the bounds."""


def correction_weights(
    log_probs: torch.Tensor, rollout_log_probs: torch.Tensor, mask: torch.Tensor, correction: Correction
) -> CorrectionWeights:
    """Return the weights of token losses, from the trainer's and the engine's log-probs of the same tokens, (B, A).

    With r = pi_train / pi_engine of a token, each by the policy's own distribution, whatever a nucleus leaves of it:

    - level token, mode clip: r within the bounds (truncated importance sampling, fengyao.notion.site/off-policy-rl);
    - level token, mode mask: r, and 0 outside the bounds (IcePop);
    - level seq: the geometric mean of a sequence's r, which does not grow with its length as the product does ("When Speed
      Kills Stability", the geometric level of verl's rollout correction). Mode mask drops sequences whose mean is outside
      the bounds and weights the tokens of the others by r. Mode clip weights all tokens by the clipped mean.

    In mode mask the bounds may apply to a divergence of each token, or to its mean over a sequence, instead of r. All but
    the geometric mean as a weight is as in OpenRLHF.

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
    """Return each token's divergence, (B, A), between the two-valued distributions of being sampled or not."""
    engine, trainer = (
        values.exp().clamp(LEAST_PROBABILITY, 1 - LEAST_PROBABILITY) for values in (rollout_log_probs, log_probs)
    )
    if gating == "tv":
        return (engine - trainer).abs()
    return engine * (engine / trainer).log() + (1 - engine) * ((1 - engine) / (1 - trainer)).log()


# As in OpenRLHF: log-ratios are bounded before their exponential.
LARGEST_LOG_RATIO = 20.0
# As in OpenRLHF: added to lengths that divide, which may be 0.
NO_LENGTH = 1e-8


@dataclass(frozen=True, kw_only=True)
class PolicyPass:
    """The samples of a pass, all (B, A)."""

    log_probs: torch.Tensor
    """The policy's, with a gradient."""
    old_log_probs: torch.Tensor
    """Those of the policy before the update."""
    advantages: torch.Tensor
    mask: torch.Tensor
    """1 for loss tokens."""
    engine_log_probs: torch.Tensor | None = None
    """Those that the engine sampled by."""

    def log_ratios(self, *, to: torch.Tensor | None = None) -> torch.Tensor:
        """Return log pi - log pi_old, or the difference to other log-probs; 0 for tokens that are not in the loss."""
        before = self.old_log_probs if to is None else to
        return torch.where(self.mask.bool(), self.log_probs - before, 0.0)


@dataclass(frozen=True, kw_only=True)
class LossSettings:
    """The settings of a run's policy loss."""

    loss: PolicyLossName | UserFunction = "ppo"
    aggregation: LossAggregation = "token-mean"
    length: int = 1
    """The number that seq-mean-token-sum-norm divides by."""
    clip: tuple[float, float] = (0.2, 0.2)
    """How far ratios may be below and above 1."""
    dual_clip: float | None = None
    temperatures: tuple[float, float] = (1.0, 1.05)
    """SAPO's temperatures for positive advantages and for the others."""
    correction: Correction = Correction()

    @classmethod
    def of(cls, config: PPOConfig) -> LossSettings:
        """Return the settings of a run."""
        actor, advantage = config.actor, config.algo.advantage
        assert actor.eps_clip_low_high is not None, "config.resolve fills it in"
        least, most = advantage.is_correction_threshold
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
                bounds=(least, most),
            ),
        )

    def mean_of_other_terms(self, **batch: Any) -> dict[str, object]:
        """Return what makes OpenRLHF's `aggregate_loss` of KL and entropy the mean that the policy loss is.

        Args:
            batch: what it gets about the optimizer step.
        """
        if self.aggregation == "seq-mean-token-sum-norm":
            return batch | {"batch_num_tokens": self.length * batch["global_batch_size"]}
        return batch | {"token_level_loss": self.aggregation == "token-mean" and self.loss not in SEQUENCE_LOSSES}


@dataclass(frozen=True, kw_only=True)
class TokenLosses:
    losses: torch.Tensor
    """(B, A)."""
    clipped: torch.Tensor
    """(B, A), whether a bound of the ratio changes the token's gradient."""


PolicyLossFunction = Callable[[PolicyPass, LossSettings], TokenLosses]


def ppo(given: PolicyPass, settings: LossSettings) -> TokenLosses:
    """PPO (arXiv:1707.06347): -min(r A, clip(r, 1 - low, 1 + high) A), with r = pi / pi_old of each token.

    Bounds that differ are DAPO's (arXiv:2503.14476); with a dual clip c (arXiv:1912.09729), at most -c A where A < 0.
    """
    return _clipped(_exp(given.log_ratios()), given, settings)


def gspo(given: PolicyPass, settings: LossSettings) -> TokenLosses:
    """GSPO (arXiv:2507.18071): PPO's loss with s = (pi(y) / pi_old(y))^(1 / |y|) of the whole response y for r."""
    ratios = _exp(sequence_means(given.log_ratios(), given.mask))
    return _clipped(ratios * given.mask, given, settings)


def gspo_token(given: PolicyPass, settings: LossSettings) -> TokenLosses:
    """GSPO-token (arXiv:2507.18071, section 4.3): GSPO with s_t = sg(s) pi_t / sg(pi_t), each weighted by its own A_t.

    If all tokens of a response have the same advantage, loss and gradient are GSPO's.
    """
    means = sequence_means(given.log_ratios(), given.mask).detach()
    return _clipped(_exp(means + given.log_ratios(to=given.log_probs.detach())) * given.mask, given, settings)


def cispo(given: PolicyPass, settings: LossSettings) -> TokenLosses:
    """CISPO (MiniMax-M1, arXiv:2506.13585): -sg(clip(r, 1 - low, 1 + high)) A log pi: no token loses its gradient.

    The paper has an upper bound only: set the lower one to 1 or more.
    """
    low, high = settings.clip
    ratios = _exp(given.log_ratios()).detach()
    weights = ratios.clamp(1 - low, 1 + high)
    log_probs = torch.where(given.mask.bool(), given.log_probs, 0.0)
    return TokenLosses(losses=-weights * given.advantages * log_probs, clipped=weights != ratios)


def sapo(given: PolicyPass, settings: LossSettings) -> TokenLosses:
    """SAPO (arXiv:2511.20347): -(4 / tau) sigmoid(tau (r - 1)) A, with one tau for A > 0 and another for the rest.

    At r = 1 its gradient is the policy gradient; it fades smoothly as r moves away from 1.
    """
    positive, negative = settings.temperatures
    temperatures = torch.where(given.advantages > 0, positive, negative)
    gates = torch.sigmoid(temperatures * (_exp(given.log_ratios()) - 1)) * 4 / temperatures
    return TokenLosses(losses=-gates * given.advantages, clipped=torch.zeros_like(gates, dtype=torch.bool))


POLICY_LOSSES: dict[str, PolicyLossFunction] = {name: globals()[name] for name in get_args(PolicyLossName)}
"""The functions above that `--actor.policy_loss_type` names."""
SEQUENCE_LOSSES = ("gspo", "gspo_token")
"""The losses with one ratio per sequence, which are always averaged over sequences, as in OpenRLHF."""


def loss_named(name: str) -> PolicyLossFunction:
    """Return the function that `--actor.policy_loss_type` names; a user's is tried with two samples.

    A user's function gets the pass alone, and returns the losses of the tokens, (B, A), or `TokenLosses`. Raises UserError if
    it cannot be used.
    """
    if name in POLICY_LOSSES:
        return POLICY_LOSSES[name]
    function = load_user_function(name, default="policy_loss", flag="--actor.policy_loss_type")

    def loss(given: PolicyPass, settings: LossSettings) -> TokenLosses:
        found, shape = function(given), given.mask.shape
        if isinstance(found, torch.Tensor) and found.shape == shape:
            return TokenLosses(losses=found, clipped=torch.zeros_like(given.mask, dtype=torch.bool))
        if not isinstance(found, TokenLosses):
            raise UserError(
                f"{name}: a policy loss returns a tensor of the tokens' shape {tuple(shape)}, or TokenLosses"
            )
        return found

    ones = torch.ones(2, 3)
    old = {"old_log_probs": -ones, "advantages": ones, "mask": ones.long(), "engine_log_probs": -ones}
    loss(PolicyPass(log_probs=torch.full((2, 3), -1.0, requires_grad=True), **old), LossSettings())
    return loss


class PolicyLoss:
    """The policy loss of a run, called as OpenRLHF's."""

    def __init__(self, settings: LossSettings) -> None:
        self.settings = settings
        self._function = loss_named(settings.loss)

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
        """Return the pass's part of the step's loss, the share of clipped tokens and the KL to the old policy.

        With a correction, also return the KL to the engine and the share of filtered tokens or sequences, else None.

        Args:
            log_probs, old_log_probs, advantages, action_mask, rollout_log_probs: (B, A).
            dp_size: over how many ranks gradients are averaged.
            batch_num_tokens, global_batch_size: loss tokens of the whole optimizer step, and its sequences with loss tokens.
        """
        given = PolicyPass(
            log_probs=log_probs,
            old_log_probs=old_log_probs,
            advantages=advantages,
            mask=action_mask,
            engine_log_probs=rollout_log_probs,
        )
        found = self._function(given, self.settings)
        losses, engine_kl, filtered = found.losses, None, None
        correction = self.settings.correction
        if correction.level != "off":
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
    if settings.aggregation == "token-mean" and settings.loss not in SEQUENCE_LOSSES:
        return (losses * mask).sum() / tokens * dp_size
    lengths = mask.sum(dim=-1)
    # A sequence without loss tokens counts 0.
    means = (losses * mask).sum(dim=-1) / (lengths + NO_LENGTH) * (lengths > 0).float()
    return means.sum() / sequences * dp_size


def _clipped(ratios: torch.Tensor, given: PolicyPass, settings: LossSettings) -> TokenLosses:
    low, high = settings.clip
    plain = ratios * given.advantages
    held = ratios.clamp(1 - low, 1 + high) * given.advantages
    objective = torch.min(plain, held)
    if settings.dual_clip is not None:
        bounded = torch.max(objective, settings.dual_clip * given.advantages)
        objective = torch.where(given.advantages < 0, bounded, objective)
    return TokenLosses(losses=-objective, clipped=held < plain)


def _exp(log_ratios: torch.Tensor) -> torch.Tensor:
    return log_ratios.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()


def _mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the mean over loss tokens, 0 if there are none."""
    return torch.where(mask.bool(), values, 0.0).sum() / mask.sum().clamp(min=1)
