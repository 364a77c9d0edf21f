"""Two updates by each algorithm of the shipped settings, from rewards to weights: the same however they are cut into passes.

Padded, packed, with shared prompts and as trees, in micro-batches of 1, 2 and all.
"""

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from helpers.commands import STAGES
from helpers.conversations import message, picture
from helpers.played_updates import PlayedStrategy
from helpers.rl_steps import StepParts, numbered, sample
from helpers.samples import generated_sample, media_ref
from helpers.tiny_models import encode, make_actor

from lmm_r1 import dotted
from lmm_r1.cli.arguments import parse
from lmm_r1.config import PPOConfig, resolve
from lmm_r1.generation.media_store import compact, fetched
from lmm_r1.lmm_kits import get_kit
from lmm_r1.models.actor import KitActor
from lmm_r1.rl.losses import PolicyLoss
from lmm_r1.rl.samples import TrainingSample
from lmm_r1.rl.workers import KitPolicyActor

pytestmark = pytest.mark.full

ALGORITHMS = sorted((STAGES / "configs/algorithms").glob("*.yaml"))
PROMPTS, SAMPLES = 2, 4
# Of the samples of each group: one wrong in four, another with a part of the reward, one empty response.
REWARDS = ((1.0, 0.0, 0.5, 1.0), (0.0, 1.0, 1.0, 0.0))
LENGTHS = ((3, 6, 1, 5), (4, 0, 2, 7))
BEGINNING = (30, 40)
SETTINGS: dict[str, object] = {
    "actor.model_name_or_path": "model",
    "actor.num_gpus_per_node": 1,
    "critic.num_gpus_per_node": 1,
    "ref.num_gpus_per_node": 1,
    "data.prompt_dataset": "rows.jsonl",
    "reward.remote_url": "http://127.0.0.1:5000/get_reward",
    "rollout.batch_size": PROMPTS,
    "rollout.n_samples_per_prompt": SAMPLES,
    "rollout.max_new_tokens": 4096,
    "train.batch_size": PROMPTS * SAMPLES // 2,
    "algo.advantage.is_correction_level": "seq",
    "algo.advantage.is_correction_mode": "clip",
}


@dataclass(frozen=True, kw_only=True)
class Policy:
    """A tiny policy, and a rollout of it."""

    actor: KitActor
    weights: dict[str, torch.Tensor]
    """As they were before any update."""
    samples: list[TrainingSample]


@pytest.fixture(scope="module", params=["llm", "qwen2_5_vl"])
def policy(request: pytest.FixtureRequest, tiny_checkpoint: Any) -> Iterator[Policy]:
    kit, folder = get_kit(request.param), tiny_checkpoint(request.param)
    processor = kit.load_processor(str(folder), trust_remote_code=False)
    pictures = [[picture(56 + 28 * place, 56)] if kit.takes_images else [] for place in range(PROMPTS)]
    prompts = [
        encode(kit, processor, [message("user", *shown, f"{place} + 1?")]) for place, shown in enumerate(pictures)
    ]
    generator = torch.Generator().manual_seed(0)
    stored = {f"image {place}": prompt.media for place, prompt in enumerate(prompts)}
    refs = [
        # What stands for the stored object is its key.
        None if prompt.media is None else replace(media_ref(f"image {place}"), stored=f"image {place}")
        for place, prompt in enumerate(prompts)
    ]
    samples = [
        sample(prompt.token_ids, _tokens(length, generator), media=ref, reward=reward, group=place)
        for place, (prompt, ref) in enumerate(zip(prompts, refs, strict=True))
        for length, reward in zip(LENGTHS[place], REWARDS[place], strict=True)
    ]
    actor = make_actor(folder, packing_samples=True, share_prefix=True)
    actor.model.set_gradient_accumulation_boundary, actor.model.get_lr = lambda last: None, lambda: [0.1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray, "get", lambda keys: [compact(stored[key]) for key in keys])
        yield Policy(actor=actor, weights=deepcopy(actor.model.state_dict()), samples=numbered(samples))


def _tokens(length: int, generator: torch.Generator) -> list[int]:
    """A response that begins as others do, so that a group is a tree."""
    return [*BEGINNING, *torch.randint(20, 60, (length,), generator=generator).tolist()][:length]


def settings_of(file: Path, **changes: object) -> PPOConfig:
    config = parse(PPOConfig, ["--config", str(file)], prog="p", description="")
    return resolve(dotted.replace(config, SETTINGS | {key.replace("__", "."): to for key, to in changes.items()}))


def with_models(policy: Policy, *, values: bool) -> list[TrainingSample]:
    """The rollout's samples with what policy, engine, reference and critic say of them."""
    samples = deepcopy(policy.samples)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        media = fetched([one.media for one in samples])
        every = policy.actor([replace(one, media=items) for one, items in zip(samples, media, strict=True)])
    for one, own in zip(samples, every, strict=True):
        width = len(one.loss_mask)
        # The policy has learnt since: ratios are not 1 in the first update.
        one.log_probs, one.engine_log_probs, one.reference_log_probs = (
            (own[:width] + 0.1 * torch.randn(width, generator=generator)) * one.loss_mask for _ in range(3)
        )
        one.kl = one.log_probs - one.reference_log_probs
        one.values = torch.rand(width, generator=generator) if values else None
    return samples


def updated(policy: Policy, config: PPOConfig) -> tuple[torch.Tensor, dict[str, float], int]:
    """All weights after the updates of one rollout, what is logged, and how many updates there were."""
    actor = policy.actor
    actor.model.load_state_dict(policy.weights)
    shared = config.train.shared_prefix_enable
    actor.packing_samples, actor.share_prefix = shared or config.ds.packing_samples, shared
    maker = StepParts(config, share_prefix=shared)
    if config.algo.advantage.estimator == "remax":
        maker.greedy = [generated_sample(reward=0.25)] * PROMPTS
    with_values = config.algo.advantage.estimator == "gae"
    samples = maker.with_advantages(with_models(policy, values=with_values))
    worker = object.__new__(KitPolicyActor)
    worker.model, worker.loss, worker.average, worker.empty_cache = actor, PolicyLoss.of(config), None, lambda: None
    worker.strategy = strategy = _Strategy(config, actor)
    steps = maker.update_passes(samples, step=0).steps
    metrics = worker.fit([passes for (passes,) in steps], kl_weight=0.1)
    weights = torch.cat([value.detach().flatten() for value in actor.model.parameters()])
    return weights.double(), metrics, strategy.updates


class _Strategy(PlayedStrategy):
    def __init__(self, config: PPOConfig, actor: KitActor) -> None:
        super().__init__(config)
        self.optimizer = torch.optim.SGD(actor.model.parameters(), lr=0.1)
        self.updates = 0

    def optimizer_step(self, *given: Any, **named: Any) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.updates += 1


WAYS: Sequence[dict[str, object]] = (
    {"train__shared_prefix_enable": False, "train__micro_batch_size": 1},
    {"train__shared_prefix_enable": False, "train__micro_batch_size": 2, "ds__packing_samples": True},
    {"train__shared_prefix_enable": True, "train__micro_batch_size": 1},
    {"train__shared_prefix_enable": True, "train__micro_batch_size": 8},
)


@pytest.mark.parametrize("file", ALGORITHMS, ids=lambda path: path.stem)
def test_two_updates_are_made_and_are_the_same_in_every_way(file, policy, one_process):
    whole = settings_of(file, train__shared_prefix_enable=False, train__micro_batch_size=8)
    expected, logged, updates = updated(policy, whole)
    start = torch.cat([policy.weights[name].flatten().double() for name, _ in policy.actor.model.named_parameters()])
    assert updates == 2
    assert expected.isfinite().all()
    moved = (expected - start).norm()
    assert moved > 0
    assert all(isinstance(value, float) and value == value for value in logged.values())
    for way in WAYS:
        found, others, _ = updated(policy, settings_of(file, **way))
        # In single precision; sums are in another order.
        assert (found - expected).norm() < 1e-3 * moved, way
        assert others["policy_loss"] == pytest.approx(logged["policy_loss"], rel=1e-3, abs=1e-5), way
