"""Two updates by each algorithm of the shipped settings, from rewards to weights: the same however they are cut into passes.

Padded, packed, with shared prompts and as trees, in micro-batches of 1, 2 and all.
"""

import contextlib
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from helpers.commands import STAGES
from helpers.conversations import message, picture
from helpers.rl_steps import StepParts, sample
from helpers.samples import generated_sample, media_ref
from helpers.tiny_models import encode, make_actor
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ray import ppo_actor
from torch.distributed.device_mesh import init_device_mesh

from lmm_r1 import dotted
from lmm_r1.cli.arguments import parse
from lmm_r1.config import PPOConfig, resolve
from lmm_r1.generation.media_store import compact
from lmm_r1.host.seams import to_openrlhf_args
from lmm_r1.lmm_kits import get_kit
from lmm_r1.models.actor import KitActor
from lmm_r1.rl.workers import GroupReplayBuffer, KitActorPPOTrainer, media_per_row, no_loss

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
    samples: list[Experience]


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
        sample(prompt.token_ids, _tokens(length, generator), media=ref, reward=reward)
        for prompt, ref, lengths, rewards in zip(prompts, refs, LENGTHS, REWARDS, strict=True)
        for length, reward in zip(lengths, rewards, strict=True)
    ]
    for place, experience in enumerate(samples):
        experience.prompts = [str(place // SAMPLES)]
    actor = make_actor(folder, packing_samples=True, share_prefix=True)
    actor.model.set_gradient_accumulation_boundary = lambda ends: None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray, "get", lambda keys: [compact(stored[key]) for key in keys])
        yield Policy(actor=actor, weights=deepcopy(actor.model.state_dict()), samples=samples)


def _tokens(length: int, generator: torch.Generator) -> list[int]:
    """A response that begins as others do, so that a group is a tree."""
    return [*BEGINNING, *torch.randint(20, 60, (length,), generator=generator).tolist()][:length]


def settings_of(file: Path, **changes: object) -> PPOConfig:
    config = parse(PPOConfig, ["--config", str(file)], prog="p", description="")
    return resolve(dotted.replace(config, SETTINGS | {key.replace("__", "."): to for key, to in changes.items()}))


def with_models(policy: Policy, *, values: bool) -> list[Experience]:
    """The rollout's samples in one pass, with what policy, engine, reference and critic say of them."""
    whole = Experience.concat_experiences(deepcopy(policy.samples), 0)
    whole.index = list(range(len(policy.samples)))
    generator = torch.Generator().manual_seed(1)
    mask = whole.action_mask
    with torch.no_grad():
        old = policy.actor(
            whole.sequences, mask, attention_mask=whole.attention_mask, **media_per_row(whole.mm_train_inputs, "cpu")
        )

    def near() -> torch.Tensor:
        return (old + 0.1 * torch.randn(mask.shape, generator=generator)) * mask

    # The policy has learnt since: ratios are not 1 in the first update.
    whole.action_log_probs, whole.rollout_log_probs, whole.base_action_log_probs = near(), near(), near()
    whole.kl = (whole.action_log_probs - whole.base_action_log_probs) * mask
    whole.values = torch.rand(mask.shape, generator=generator) if values else None
    return [whole]


def updated(policy: Policy, config: PPOConfig) -> tuple[torch.Tensor, dict[str, Any], int]:
    """All weights after the updates of one rollout, what is logged, and how many updates there were."""
    actor = policy.actor
    actor.model.load_state_dict(policy.weights)
    shared = config.train.shared_prefix_enable
    actor.packing_samples, actor.share_prefix = shared or config.ds.packing_samples, shared
    strategy = _Strategy(config, actor)
    maker = StepParts(config, share_prefix=shared)
    if config.algo.advantage.estimator == "remax":
        maker.greedy = [generated_sample(reward=0.25)] * PROMPTS
    with_values = config.algo.advantage.estimator == "gae"
    experiences = maker.with_advantages(with_models(policy, values=with_values))
    trainer = KitActorPPOTrainer(
        strategy,
        actor,
        None,
        strategy.optimizer,
        SimpleNamespace(get_last_lr=lambda: [1.0]),
        dataloader_pin_memory=False,
    )
    for step in maker.update_passes(experiences, step=0).steps:
        for experience in step:
            trainer.replay_buffer.append(experience)
    status = trainer.ppo_train(kl_ctl=0.1)
    weights = torch.cat([value.detach().flatten() for value in actor.model.parameters()])
    return weights.double(), status, strategy.updates


class _Strategy:
    """What a trainer asks of DeepSpeed, of one process by torch alone."""

    def __init__(self, config: PPOConfig, actor: KitActor) -> None:
        self.args, self.config = to_openrlhf_args(config), config
        # As `KitStrategy` has it: passes come as they were planned.
        self.args.train.dynamic_batch_enable = True
        self.ring_attn_group = None
        self.accumulated_gradient = 1
        self.ds_device_mesh = init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=("dp", "sp", "tp"))
        self.optimizer = torch.optim.SGD(actor.model.parameters(), lr=0.1)
        self.updates = 0

    def backward(self, loss: torch.Tensor, *rest: Any) -> None:
        loss.backward()

    def optimizer_step(self, *rest: Any, **settings: Any) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.updates += 1

    def get_grad_norm(self, model: Any) -> float:
        return 0.0

    def is_rank_0(self) -> bool:
        return False

    def all_reduce(self, values: dict[str, float]) -> dict[str, float]:
        return values


@contextlib.contextmanager
def seams() -> Iterator[None]:
    """The names that workers have in the place of OpenRLHF's."""
    ours = {"PolicyLoss": no_loss, "NaiveReplayBuffer": GroupReplayBuffer, "merge_mm_train_inputs": media_per_row}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ours.items():
            patch.setattr(ppo_actor, name, value)
        yield


WAYS: Sequence[dict[str, object]] = (
    {"train__shared_prefix_enable": False, "train__micro_batch_size": 1},
    {"train__shared_prefix_enable": False, "train__micro_batch_size": 2, "ds__packing_samples": True},
    {"train__shared_prefix_enable": True, "train__micro_batch_size": 1},
    {"train__shared_prefix_enable": True, "train__micro_batch_size": 8},
)


@pytest.mark.parametrize("file", ALGORITHMS, ids=lambda path: path.stem)
def test_two_updates_are_made_and_are_the_same_in_every_way(file, policy, one_process):
    with seams():
        whole = settings_of(file, train__shared_prefix_enable=False, train__micro_batch_size=8)
        expected, status, updates = updated(policy, whole)
        start = torch.cat(
            [policy.weights[name].flatten().double() for name, _ in policy.actor.model.named_parameters()]
        )
        assert updates == 2
        assert expected.isfinite().all()
        moved = (expected - start).norm()
        assert moved > 0
        assert all(isinstance(value, float) and value == value for value in status.values())
        for way in WAYS:
            found, logged, _ = updated(policy, settings_of(file, **way))
            # In single precision; sums are in another order.
            assert (found - expected).norm() < 1e-3 * moved, way
            assert logged["policy_loss"] == pytest.approx(status["policy_loss"], rel=1e-3, abs=1e-5), way
