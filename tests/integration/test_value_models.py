"""Critics under DeepSpeed: what a run trains, saves and resumes from, with ZeRO 2 and 3, adapters and rates of their own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.commands import flags
from helpers.conversations import message, picture
from helpers.packed_batches import Batch, groups
from helpers.tiny_models import encode, flat_value_model
from helpers.value_models import HEAD, make_value_model
from safetensors.torch import load_file

from lmm_r1 import dotted
from lmm_r1.cli import merge
from lmm_r1.config import PPOConfig, resolve
from lmm_r1.host.models import whole_state_dict
from lmm_r1.host.strategy import KitStrategy, make_strategy
from lmm_r1.lmm_kits import get_kit
from lmm_r1.models.actor import KitValueModel

KIT = "qwen2_5_vl"


@pytest.fixture(scope="module")
def batch(tiny_checkpoint: Callable[[str], Path]) -> Batch:
    kit = get_kit(KIT)
    processor = kit.load_processor(str(tiny_checkpoint(KIT)), trust_remote_code=False)
    chats = [message("user", "What is 12 + 34?")], [message("user", picture(84, 56), "Which digit is this?")]
    return Batch(tuple(groups([encode(kit, processor, chat) for chat in chats], [(5, 3), (4, 6)])))


def make_run(stage: int, folder: Path, **changes: object) -> KitStrategy:
    settings = {
        "actor.model_name_or_path": str(folder),
        "actor.num_gpus_per_node": 1,
        "critic.num_gpus_per_node": 1,
        "critic.adam.lr": 1e-2,
        "critic.lr_scheduler": "constant",
        "ref.num_gpus_per_node": 1,
        "data.prompt_dataset": "rows.jsonl",
        "reward.remote_url": "reward.py",
        "algo.advantage.estimator": "gae",
        "rollout.batch_size": 4,
        "train.batch_size": 4,
        "train.micro_batch_size": 4,
        "ds.zero_stage": stage,
        "ds.param_dtype": "fp32",
    }
    strategy = make_strategy(resolve(dotted.replace(PPOConfig(), settings | changes)))
    strategy.setup_distributed()
    return strategy


def prepared(strategy: KitStrategy, folder: Path) -> Any:
    """Return the engine around a critic, built from what upstream's worker hands on."""
    args = strategy.args
    critic = flat_value_model(
        str(folder),
        "critic",
        attn_implementation="sdpa",
        param_dtype="fp32",
        lora_rank=args.ds.lora.rank,
        ds_config=strategy.get_ds_train_config(),
        value_head_prefix=args.ds.value_head_prefix,
        share_prefix=True,
    )
    settings = {
        "optim": args.critic.optim,
        "muon": vars(args.critic.muon),
        "adam": vars(args.critic.adam),
        "lr_scheduler": args.critic.lr_scheduler,
        "lr_warmup_ratio": 0.0,
        "min_lr_ratio": 0.1,
        "max_norm": 1.0,
        "scheduler_steps": 10,
    }
    return strategy.prepare((critic, settings))[0]


def values(critic: Any, batch: Batch) -> torch.Tensor:
    return critic(batch.for_model)


def train(strategy: KitStrategy, critic: Any, batch: Batch, *, steps: int) -> list[float]:
    """Pull all values to 1 and return the losses."""
    losses = []
    critic.train()
    for _ in range(steps):
        # Every pass ends an optimizer step.
        critic.set_gradient_accumulation_boundary(True)
        loss = ((values(critic, batch) - 1) ** 2 * batch.wanted).sum() / batch.wanted.sum()
        strategy.backward(loss, critic, None)
        strategy.optimizer_step(None, critic, None)
        losses.append(loss.item())
    critic.eval()
    return losses


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("stage", [2, 3])
def test_a_critic_learns_resumes_and_is_saved_whole(stage, rank, tiny_checkpoint, batch, tmp_path, capfd):
    folder = tiny_checkpoint(KIT)
    strategy = make_run(stage, folder, **{"ds.lora.rank": rank})
    critic = prepared(strategy, folder)
    assert isinstance(critic.module, KitValueModel)
    before = {name: weight.clone() for name, weight in whole_state_dict(critic).items()}
    # A head of OpenRLHF's size, and whole: under ZeRO-3 the ranks hold shards of it.
    assert before["head.weight"].shape == (1, 64)
    assert 0.5 / 65 < before["head.weight"].std() < 2 / 65

    losses = train(strategy, critic, batch, steps=4)
    assert losses[-1] < losses[0] / 2
    changed = {name for name, weight in whole_state_dict(critic).items() if not torch.equal(weight, before[name])}
    assert "head.weight" in changed, "the head trains whatever else does"
    assert all("lora_" in name or name == "head.weight" for name in changed) == bool(rank)

    strategy.save_ckpt(critic, str(tmp_path / "states"), "global_step4")
    expected = train(strategy, critic, batch, steps=2)
    resumed = prepared(strategy, folder)
    strategy.load_ckpt(resumed, str(tmp_path / "states"))
    assert train(strategy, resumed, batch, steps=2) == pytest.approx(expected, abs=1e-5)

    saved = tmp_path / "saved"
    processor = get_kit(KIT).load_processor(str(folder), trust_remote_code=False)
    strategy.save_model(critic, processor, str(saved))
    names, original = (load_file(place / "model.safetensors").keys() for place in (saved, folder))
    assert names - original == {f"{HEAD}.weight"}
    assert original - names == {"lm_head.weight"}
    strategy.save_ckpt(critic, str(tmp_path / "states"), "global_step6")
    merged = {"checkpoint": tmp_path / "states", "base": folder, "output": tmp_path / "merged"}
    merge.main(flags(merged | ({"lora_alpha": 8} if rank else {})))
    assert "and its value head" in capfd.readouterr().out
    weights, expected_weights = (load_file(tmp_path / place / "model.safetensors") for place in ("merged", "saved"))
    assert weights.keys() == expected_weights.keys()
    assert all(torch.equal(weights[name], weight) for name, weight in expected_weights.items())
    with torch.no_grad():
        wanted = values(critic, batch)
        torch.testing.assert_close(values(make_value_model(tmp_path / "merged"), batch), wanted, atol=1e-4, rtol=0)
        for kind in ("critic", "reward"):
            torch.testing.assert_close(values(make_value_model(saved, kind), batch), wanted, atol=1e-4, rtol=0)
