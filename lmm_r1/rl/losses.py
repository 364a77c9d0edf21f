"""Policy losses, and the correction for rollouts of an older policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch.nn.utils.rnn import pad_sequence

from lmm_r1.config import PPOConfig
from lmm_r1.config.ppo import KLConfig, LossAggregation, PolicyLossName
from lmm_r1.errors import UserError
from lmm_r1.files.user_code import UserFunction, load_user_function
from lmm_r1.train.update import Terms

if TYPE_CHECKING:
    from lmm_r1.rl.samples import TrainingSample

# As in OpenRLHF: probabilities stay this far from 0 and 1, whose logarithms would be infinite.
LEAST_PROBABILITY = 1e-6


@dataclass(frozen=True, kw_only=True)
class Correction:
    """The settings of `--algo.advantage.is_correction_*`."""

    level: Literal["off", "token", "seq"] = "off"
    mode: Literal["mask", "clip"] = "mask"
    gating: Literal["ratio", "binary_kl", "tv"] = "ratio"
    bounds: tuple[float, float] = (0.5, 5.0)


def correction_weights(
    log_probs: torch.Tensor, rollout_log_probs: torch.Tensor, mask: torch.Tensor, correction: Correction
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights of token losses, (B, A) or (B, 1), and the share of tokens or sequences outside the bounds.

    They are made of the trainer's and the engine's log-probs of the same tokens, (B, A). With r = pi_train / pi_engine of a
    token, each by the policy's own distribution, whatever a nucleus leaves of it:

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
    return weights, (~within & units).sum() / units.sum().clamp(min=1)


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
# The k3 estimator reaches its bound long before; a smaller log-ratio would overflow its exponential.
_LEAST_LOG_RATIO = -10.0
_LARGEST_KL = 10.0
# As in OpenRLHF: of an importance weight in the KL.
_LARGEST_KL_WEIGHT = 10.0


@dataclass(frozen=True, kw_only=True)
class PolicyPass:
    """The B samples of a pass; tensors are (B, A) unless stated otherwise."""

    log_probs: torch.Tensor
    """The policy's, with a gradient."""
    old_log_probs: torch.Tensor
    """Those of the policy before the update."""
    advantages: torch.Tensor
    mask: torch.Tensor
    """1 for loss tokens."""
    engine_log_probs: torch.Tensor | None = None
    """Those that the engine sampled by."""
    reference_log_probs: torch.Tensor | None = None
    """Those of the reference model; None if the run has none."""
    entropy: torch.Tensor | None = None
    """The policy's at each token, with a gradient; None if neither the loss nor `--actor.entropy_coef` uses it."""
    rewards: torch.Tensor | None = None
    """(B,)."""
    turns: torch.Tensor | None = None
    """The number of the policy's turn from 0; -1 for tokens that the policy did not generate."""
    columns: Sequence[Mapping[str, Any]] = ()
    """Of each sample's record."""

    @classmethod
    def of(
        cls, samples: Sequence[TrainingSample], *, log_probs: torch.Tensor, entropy: torch.Tensor | None
    ) -> PolicyPass:
        """Return the pass of samples; without old log-probs the policy is still the old one.

        Args:
            log_probs, entropy: the policy's, (B, A).
        """

        def part(name: str, *, padding: int = 0) -> torch.Tensor | None:
            values = [getattr(sample, name) for sample in samples]
            if values[0] is None:
                return None
            return pad_sequence(values, batch_first=True, padding_value=padding).to(log_probs.device)

        old, advantages, mask = part("log_probs"), part("advantages"), part("loss_mask")
        assert advantages is not None, "added before"
        assert mask is not None, "every sample has one"
        return cls(
            log_probs=log_probs,
            old_log_probs=log_probs.detach() if old is None else old,
            advantages=advantages,
            mask=mask.long(),
            engine_log_probs=part("engine_log_probs"),
            reference_log_probs=part("reference_log_probs"),
            entropy=entropy,
            rewards=torch.tensor([sample.reward for sample in samples], device=log_probs.device),
            turns=part("turns", padding=-1),
            columns=[sample.columns for sample in samples],
        )

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
    kl: KLConfig | None = None
    """Of the KL to the reference in the loss; None without it."""
    entropy_coef: float | None = None
    """The weight of the entropy; None if it is not computed."""

    @property
    def follows_advantages(self) -> bool:
        """Whether the gradient is 0 if all advantages are 0: one of `POLICY_LOSSES`, without a KL or entropy term."""
        return self.loss in POLICY_LOSSES and self.kl is None and not self.entropy_coef

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
            kl=config.algo.kl if config.algo.kl.use_loss and config.algo.kl.init_coef > 0 else None,
            entropy_coef=actor.entropy_coef,
        )

    @property
    def per_sequence(self) -> bool:
        """Whether the loss is a mean over sequences instead of tokens."""
        return self.aggregation != "token-mean" or self.loss in SEQUENCE_LOSSES

    def units(self, mask: torch.Tensor) -> int:
        """Return what the loss of a pass is the mean over: its loss tokens, or its sequences with loss tokens.

        Args:
            mask: (B, A).
        """
        return int((mask.sum(dim=-1) > 0).sum() if self.per_sequence else mask.sum())


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


COSTLY = ("entropy", "reference_log_probs")
"""What is computed only for a loss that reads it."""


def loss_named(name: str) -> tuple[PolicyLossFunction, frozenset[str]]:
    """Return the function that `--actor.policy_loss_type` names, and which of `COSTLY` it reads.

    A user's function gets the pass and returns the tokens' losses (B, A) or `TokenLosses`; it is tried with two samples.
    Raises UserError if it cannot be used.
    """
    if name in POLICY_LOSSES:
        return POLICY_LOSSES[name], frozenset()
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
    tried = _WatchedPass(
        log_probs=torch.full((2, 3), -1.0, requires_grad=True),
        old_log_probs=-ones,
        advantages=ones,
        mask=ones.long(),
        engine_log_probs=-ones,
        reference_log_probs=-ones,
        entropy=torch.ones(2, 3, requires_grad=True),
        rewards=torch.ones(2),
        turns=torch.zeros(2, 3, dtype=torch.long),
        columns=({}, {}),
    )
    loss(tried, LossSettings())
    return loss, frozenset(tried.__dict__.pop("used", ()))


class _WatchedPass(PolicyPass):
    """A pass that notes what a loss reads of it."""

    def __getattribute__(self, name: str) -> Any:
        if name in COSTLY:
            self.__dict__.setdefault("used", set()).add(name)
        return super().__getattribute__(name)


class PolicyLoss:
    """The policy loss of a run, with the KL to the reference and the entropy as its flags ask."""

    def __init__(self, settings: LossSettings) -> None:
        """Raises UserError if the loss cannot be used."""
        self.settings = settings
        self._function, uses = loss_named(settings.loss)
        self.needs_entropy = settings.entropy_coef is not None or "entropy" in uses
        self._needs_reference = "reference_log_probs" in uses

    @classmethod
    def of(cls, config: PPOConfig) -> PolicyLoss:
        """Return the loss of a run; raises UserError if it cannot be used."""
        loss = cls(LossSettings.of(config))
        if loss._needs_reference and not config.algo.kl.init_coef:
            raise UserError(
                f"--actor.policy_loss_type {config.actor.policy_loss_type} reads reference_log_probs, and "
                "--algo.kl.init_coef 0 loads no reference; with 1e-9 there is one, and its own penalty adds nothing"
            )
        return loss

    def __call__(self, given: PolicyPass, *, kl_weight: float) -> Terms:
        """Return the losses of a pass, and what is logged.

        Args:
            kl_weight: of the KL to the reference in the loss.
        """
        mask, settings, correction = given.mask, self.settings, self.settings.correction
        found = self._function(given, settings)
        losses = found.losses
        old_ratios = given.log_ratios().detach()
        token_sums = {"ppo_clip_ratio": _sum(found.clipped.float(), mask), "ppo_kl": _sum(-old_ratios, mask)}
        if correction.level != "off":
            assert given.engine_log_probs is not None, "engines report log-probs in training"
            weights, filtered = correction_weights(given.old_log_probs, given.engine_log_probs, mask, correction)
            losses = losses * weights
            token_sums["vllm_kl"] = _sum(given.engine_log_probs - given.old_log_probs, mask)
            token_sums["is_filter_ratio"] = filtered * mask.sum()
        loss = policy_loss = aggregated(losses, mask, settings=settings)
        sums = {"policy_loss": policy_loss.detach()}
        if settings.kl is not None:
            assert given.reference_log_probs is not None, "a run with a KL has a reference"
            kl = aggregated(_kl(given, settings.kl), mask, settings=settings)
            loss = loss + kl * kl_weight
            sums["kl"] = kl.detach()
            token_sums["logprobs_diff"] = _sum(given.log_ratios(to=given.reference_log_probs).detach(), mask)
        if settings.entropy_coef is not None:
            assert given.entropy is not None, "computed where it is needed"
            entropy = aggregated(given.entropy, mask, settings=settings)
            sums["entropy_loss"] = entropy.detach()
            if settings.entropy_coef:
                loss = loss - entropy * settings.entropy_coef
        return Terms(loss=loss, sums=sums, token_sums=token_sums)


def aggregated(losses: torch.Tensor, mask: torch.Tensor, *, settings: LossSettings) -> torch.Tensor:
    """Return the sum of a pass's token losses (B, A) over its units, tokens or sequences; see `LossSettings.units`.

    Args:
        mask: (B, A), 1 for loss tokens.
    """
    if settings.aggregation == "seq-mean-token-sum-norm":
        # Dr. GRPO (arXiv:2503.20783): divided by lengths, long wrong responses would weigh less than short ones.
        return (losses * mask).sum() / settings.length
    if not settings.per_sequence:
        return (losses * mask).sum()
    lengths = mask.sum(dim=-1)
    # A sequence without loss tokens counts 0.
    means = (losses * mask).sum(dim=-1) / (lengths + NO_LENGTH) * (lengths > 0).float()
    return means.sum()


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor, *, clip: float | None
) -> torch.Tensor:
    """Return PPO's loss of values (arXiv:1707.06347, with values clipped around the old ones), summed over loss tokens.

    Args:
        values, old_values, returns, mask: (B, A).
        clip: how far values may move without a larger loss; None for any.
    """
    losses = (values - returns).square()
    if clip is not None:
        held = old_values + (values - old_values).clamp(-clip, clip)
        losses = torch.max(losses, (held - returns).square())
    return 0.5 * (losses * mask).sum()


def estimated_kl(log_ratios: torch.Tensor, *, estimator: str) -> torch.Tensor:
    """Return the KL divergence of each token by the log-ratios log p - log q of samples from p.

    The estimators are those of joschu.net/blog/kl-approx.html, bounded as in OpenRLHF.
    """
    if estimator == "k1":
        found = log_ratios
    elif estimator == "k2":
        found = log_ratios**2 / 2.0
    else:
        assert estimator == "k3", "refused by config.resolve"
        bounded = log_ratios.clamp(min=_LEAST_LOG_RATIO)
        found = (-bounded).exp() - 1 + bounded
    return found.clamp(min=-_LARGEST_KL, max=_LARGEST_KL)


def _kl(given: PolicyPass, settings: KLConfig) -> torch.Tensor:
    """Return the KL to the reference of each token, (B, A).

    With an unbiased gradient the value is that of the estimator, and the gradient that of KL(pi || reference) by samples of
    the old policy: k2's, weighted by pi / pi_old.
    """
    assert given.reference_log_probs is not None, "a run with a KL has a reference"
    log_ratios = given.log_probs.float() - given.reference_log_probs.float()
    value = estimated_kl(log_ratios, estimator=settings.estimator)
    if not settings.unbiased_gradient:
        return value
    weights = (given.log_probs.float() - given.old_log_probs.float()).exp().clamp(max=_LARGEST_KL_WEIGHT).detach()
    surrogate = weights * (log_ratios**2 / 2.0)
    return value.detach() + surrogate - surrogate.detach()


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


def _sum(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the sum over loss tokens."""
    return torch.where(mask.bool(), values, 0.0).sum()
