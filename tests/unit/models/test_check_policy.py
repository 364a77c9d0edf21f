"""The policy of `benchmarks/gpu_check.py` gives the log-probs and the loss of the one that is trained."""

import sys
from pathlib import Path

import pytest
import torch
from helpers.tiny_models import build_checkpoint, make_actor
from openrlhf.models import PolicyLoss

from lmm_r1.lmm_kits import get_kit

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))

from gpu_stages.policy import LAYOUTS, LOGITS, Policy, policy_loss
from train_batches import groups_of, make_batch

SETTINGS = {
    "padded": {},
    "packed": {"packing_samples": True},
    "shared": {"packing_samples": True, "share_prefix": True},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_its_log_probs_are_the_actors(layout, tmp_path):
    kit = get_kit("qwen2_5_vl")
    build_checkpoint(kit, tmp_path)
    actor = make_actor(tmp_path, temperature=0.7, ban_media_tokens=True, **SETTINGS[layout])
    processor = kit.load_processor(str(tmp_path), trust_remote_code=False)
    batch = make_batch(kit, processor, actor.model_config, groups=groups_of("image", scale=0.05), samples=2)
    banned = tuple(actor.banned_token_ids.tolist())
    assert banned, "what the rollout never samples has a part in every log-prob"
    policy = Policy.of(kit, actor.model, banned=banned, temperature=0.7)
    with torch.no_grad():
        theirs = actor(batch.for_model)
        for logits in LOGITS:
            mine = policy.log_probs(batch, layout=layout, logits=logits)
            torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-5)


def test_its_loss_is_openrlhfs_at_the_first_step():
    generator = torch.Generator().manual_seed(0)
    mask = torch.tensor([[1, 1, 0], [0, 1, 1]])
    advantages = torch.tensor([[2.0], [-1.0]])
    values = -torch.rand(2, 3, generator=generator)
    mine, theirs = (values.clone().requires_grad_() for _ in range(2))
    loss = policy_loss(mine, advantages, mask)
    expected, *_ = PolicyLoss()(theirs, theirs.detach(), advantages.expand(2, 3), action_mask=mask)
    torch.testing.assert_close(loss, expected)
    # Of four tokens: -(2 + 2 - 1 - 1) / 4.
    assert loss.item() == -0.5
    loss.backward()
    expected.backward()
    torch.testing.assert_close(mine.grad, theirs.grad)
    assert mine.grad[0].tolist() == [-0.5, -0.5, 0.0]
