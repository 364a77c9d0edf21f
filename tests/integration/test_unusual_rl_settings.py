"""Two updates of a policy with settings that few runs have, from rewards to weights, against a few lines of plain PyTorch.

Episodes of two turns, of which nothing that stands between them is learned; three samples an update in passes of one, two or
all of them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import transformers
from helpers.rl_steps import StepParts, numbered, sample
from helpers.tiny_models import make_actor

from lmm_r1 import dotted
from lmm_r1.config import PPOConfig, resolve
from lmm_r1.host.models import whole_state_dict
from lmm_r1.host.strategy import make_strategy
from lmm_r1.rl.losses import PolicyLoss
from lmm_r1.rl.samples import TrainingSample
from lmm_r1.rl.workers import KitPolicyActor

pytestmark = pytest.mark.usefixtures("one_process")

PROMPTS, SAMPLES, BATCH = 2, 3, 3
REWARDS = (1.0, 0.0, 0.5, 0.0, 1.0, 1.0)
# Of each response; what the environment says are the third and the fourth of its tokens, where it is longer than that.
LENGTHS = (9, 5, 7, 2, 8, 6)
OBSERVED = slice(2, 4)
LR, BETAS, EPS, KL = 2e-3, (0.7, 0.8), 1e-4, 0.3
SETTINGS: dict[str, object] = {
    "actor.num_gpus_per_node": 1,
    "critic.num_gpus_per_node": 1,
    "ref.num_gpus_per_node": 1,
    "data.prompt_dataset": "rows.jsonl",
    "reward.remote_url": "http://127.0.0.1:5000/get_reward",
    "rollout.batch_size": PROMPTS,
    "rollout.n_samples_per_prompt": SAMPLES,
    "train.batch_size": BATCH,
    "train.shared_prefix_enable": False,
    "ds.param_dtype": "fp32",
    "ds.attn_implementation": "sdpa",
    "algo.kl.init_coef": KL,
    "actor.adam.lr": LR,
    "actor.adam.betas": BETAS,
    "actor.adam.eps": EPS,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    flags: dict[str, object] = field(default_factory=dict)
    rates: tuple[float, float] = (LR, LR)
    decay: float = 0.0
    max_norm: float = math.inf


CASES = {
    # The KL is a part of tokens' rewards. Both updates are of the warm-up.
    "gae": Case(
        flags={
            "algo.advantage.estimator": "gae",
            "algo.advantage.gamma": 0.9,
            "algo.advantage.lambd": 0.8,
            "actor.lr_warmup_ratio": 1.0,
            "actor.adam.weight_decay": 0.5,
            "actor.max_norm": 0.05,
        },
        rates=(LR / 2, LR),
        decay=0.5,
        max_norm=0.05,
    ),
    # The KL is a loss, over sequences as the policy's, with a wider clip range above 1, and a bonus on entropy.
    "group_norm": Case(
        flags={
            "algo.advantage.estimator": "group_norm",
            "algo.kl.use_loss": True,
            "algo.kl.estimator": "k3",
            "actor.loss_agg_mode": "seq-mean-token-mean",
            "actor.eps_clip_low_high": (0.02, 0.08),
            "actor.entropy_coef": 0.1,
            "actor.lr_scheduler": "constant",
            "actor.max_norm": 0.0,
        }
    ),
}


@dataclass(frozen=True, kw_only=True)
class Told:
    """One sample: its tokens, and what is known of those that the policy has written, (A,)."""

    ids: torch.Tensor
    written: torch.Tensor
    """Their places in `ids`."""
    old: torch.Tensor
    base: torch.Tensor
    values: torch.Tensor


def rollout() -> list[TrainingSample]:
    """Samples with log-probs and values as models could give them."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for place, (length, reward) in enumerate(zip(LENGTHS, REWARDS, strict=True)):
        prompt = [5 + place // SAMPLES, 6, 7]
        response = torch.randint(20, 60, (length,), generator=generator).tolist()
        one = sample(prompt, response, reward=reward, group=place // SAMPLES)
        mask = one.loss_mask
        if length > OBSERVED.stop:
            mask[mask.nonzero().flatten()[OBSERVED]] = False
        # Near to the log-probs of a policy that knows nothing of some hundred tokens.
        drawn = (-6 + 0.1 * torch.randn(mask.shape, generator=generator) for _ in range(2))
        one.log_probs, one.reference_log_probs = (values * mask for values in drawn)
        one.values = torch.rand(mask.shape, generator=generator) * mask
        made.append(one)
    return numbered(made)


def told(samples: Sequence[TrainingSample]) -> list[Told]:
    found = []
    for one in samples:
        mask = one.loss_mask
        old, base, values = (part[mask].double() for part in (one.log_probs, one.reference_log_probs, one.values))
        written = mask.nonzero().flatten() + 1
        found.append(Told(ids=one.token_ids, written=written, old=old, base=base, values=values))
    return found


def near_policy(samples: Sequence[TrainingSample], folder: Path, *, kl_in_rewards: bool) -> None:
    """Let the old log-probs be near those of the checkpoint, so that ratios are near 1."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for one, its in zip(samples, told(samples), strict=True):
        with torch.no_grad():
            log_probs, _ = written_log_probs(model, its)
        for part in (one.log_probs, one.reference_log_probs):
            part[one.loss_mask] += 6 + log_probs.float()
        one.engine_log_probs = one.log_probs.clone()
        one.kl = (one.log_probs - one.reference_log_probs) * kl_in_rewards


def written_log_probs(model: torch.nn.Module, one: Told) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probs of the tokens that the policy has written, and the entropies of what they were drawn from."""
    logits = model(input_ids=one.ids[None]).logits[0, one.written - 1].log_softmax(-1)
    entropies = -(logits.exp() * logits).sum(-1)
    return logits.gather(1, one.ids[one.written][:, None]).squeeze(1), entropies


def generalized(one: Told, reward: float) -> torch.Tensor:
    """GAE of gamma 0.9 and lambda 0.8 from one written token to the next; each pays its KL."""
    rewards = -KL * (one.old - one.base)
    rewards[-1] += reward
    advantages, later, next_value = [], 0.0, 0.0
    for reward_here, value in zip(rewards.flip(0).tolist(), one.values.flip(0).tolist(), strict=True):
        later = reward_here + 0.9 * next_value - value + 0.9 * 0.8 * later
        next_value = value
        advantages.insert(0, later)
    return torch.tensor(advantages, dtype=torch.double)


def advantages_by_hand(name: str, samples: Sequence[Told]) -> list[torch.Tensor]:
    if name == "group_norm":
        # 1, 0 and 0.5: mean 0.5, deviation 0.5. 0, 1 and 1: mean 2/3, deviation sqrt(1/3).
        each = (1.0, -1.0, 0.0, -2 / 3 * math.sqrt(3), math.sqrt(3) / 3, math.sqrt(3) / 3)
        return [torch.full_like(one.old, value) for one, value in zip(samples, each, strict=True)]
    found = [generalized(one, reward) for one, reward in zip(samples, REWARDS, strict=True)]
    every = torch.cat(found)
    return [(values - every.mean()) / every.std(correction=0) for values in found]


def loss_by_hand(
    name: str, model: torch.nn.Module, samples: Sequence[Told], advantages: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of an update, and the KL of each of its tokens, or of each response if the loss is over these."""
    low, high = (0.02, 0.08) if name == "group_norm" else (0.2, 0.2)
    losses, kls, entropies = [], [], []
    for one, advantage in zip(samples, advantages, strict=True):
        log_probs, entropy = written_log_probs(model, one)
        ratio = (log_probs - one.old).exp()
        losses.append(-torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage))
        kls.append((one.base - log_probs).exp() - 1 - (one.base - log_probs))
        entropies.append(entropy)
    if name == "gae":
        return torch.cat(losses).mean(), torch.cat(kls)
    policy, kl, entropy = (torch.stack([value.mean() for value in values]) for values in (losses, kls, entropies))
    return policy.mean() + KL * kl.mean() - 0.1 * entropy.mean(), kl


def by_hand(
    name: str, folder: Path, rolled: Sequence[TrainingSample], updates: Sequence[Sequence[int]]
) -> tuple[dict[str, torch.Tensor], float]:
    """Return the weights after updates on samples, named by their places, and their mean KL."""
    case, samples = CASES[name], told(rolled)
    advantages = advantages_by_hand(name, samples)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    groups = [{"params": [weight], "weight_decay": case.decay * (weight.dim() > 1)} for weight in model.parameters()]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS)
    kls = []
    for places, rate in zip(updates, case.rates, strict=True):
        optimizer.zero_grad()
        loss, kl = loss_by_hand(
            name, model, [samples[place] for place in places], [advantages[place] for place in places]
        )
        loss.backward()
        # The log weighs updates by their tokens.
        kls.append(kl.detach().mean().expand(sum(len(samples[place].written) for place in places)))
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), case.max_norm)
        assert case.max_norm == math.inf or norm > case.max_norm, "it is to be clipped"
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
    weights = {key: value.detach().clone() for key, value in model.state_dict().items()}
    return weights, float(torch.cat(kls).mean())


def as_trained(
    config: PPOConfig, folder: Path, samples: list[TrainingSample]
) -> tuple[dict[str, torch.Tensor], list[list[int]], dict[str, float]]:
    """Return the weights that the policy's worker makes, which samples were in its updates, and what it logs."""
    worker = object.__new__(KitPolicyActor)
    worker.strategy = make_strategy(config)
    worker.strategy.setup_distributed()
    worker._prepare(make_actor(folder), config.actor, steps=2)
    worker.loss, worker.gaps, worker.average = PolicyLoss.of(config), {}, None
    maker = StepParts(config, kl_weight=KL)
    steps = [passes for [passes] in maker.update_passes(maker.with_advantages(samples), step=0).steps]
    metrics = worker.fit(steps, kl_weight=KL)
    updates = [[one.place for part in passes for one in part] for passes in steps]
    weights = {key: value.detach().clone() for key, value in whole_state_dict(worker.engine).items()}
    return weights, updates, metrics


@pytest.mark.parametrize("micro_batch", [1, 2, BATCH])
@pytest.mark.parametrize("name", CASES)
def test_the_weights_after_two_updates_are_those_worked_out_by_hand(name, micro_batch, tiny_checkpoint):
    folder, case = tiny_checkpoint("llm"), CASES[name]
    given = {"actor.model_name_or_path": str(folder), "train.micro_batch_size": micro_batch}
    config = resolve(dotted.replace(PPOConfig(), SETTINGS | given | case.flags))
    samples = rollout()
    near_policy(samples, folder, kl_in_rewards=not config.algo.kl.use_loss)
    start = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    weights, updates, status = as_trained(config, folder, samples)
    assert sorted(place for update in updates for place in update) == list(range(PROMPTS * SAMPLES))
    assert [len(update) for update in updates] == [BATCH, BATCH]
    assert status["actor_lr"] == pytest.approx(case.rates[-1])
    expected, kl = by_hand(name, folder, samples, updates)
    if config.algo.kl.use_loss:
        assert status["kl"] == pytest.approx(kl, rel=1e-3)
    for key, value in expected.items():
        moved = (value - start[key]).norm()
        assert (weights[key] - value).norm() <= 2e-3 * moved, key
    assert any(not torch.equal(value, start[key]) for key, value in expected.items())
