"""Losses are divided by what is learnt from: a masked sample is in no numerator and in no denominator, whatever the passes."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from helpers.rl_steps import StepParts, sample, trained
from helpers.samples import media_ref
from openrlhf.models import aggregate_loss
from openrlhf.trainer.ppo_utils.experience import Experience
from torch.distributed.device_mesh import init_device_mesh

from lmm_r1 import dotted
from lmm_r1.config import PPOConfig, resolve
from lmm_r1.data.sample import MediaRef, PlacedRef
from lmm_r1.rl.experiences import ModelOutputs, add_outputs
from lmm_r1.rl.workers import GroupReplayBuffer

pytestmark = pytest.mark.usefixtures("one_process")

# Two groups of two; a token's loss is its id. Of each group one is masked.
KEPT = {50: 3, 53: 4}
MASKED = {51: 1, 52: 2}
IMAGE, CROP = media_ref("image"), media_ref("crop")


def experience(prompt: list[int], response: list[int], *, masked: bool, media: MediaRef | None = None) -> Experience:
    made = sample(prompt, response, media=media)
    made.info["masked"] = torch.tensor([masked])
    return made


def rollout() -> Experience:
    """The four samples as one pass of the rollout's models has them, with what these say."""
    samples = [
        experience([1, 2], [50] * KEPT[50], masked=False),
        experience([1, 2], [51] * MASKED[51], masked=True),
        experience([3, 4, 5], [52] * MASKED[52], masked=True),
        experience([3, 4, 5], [53] * KEPT[53], masked=False),
    ]
    together = trained(Experience.concat_experiences(samples, 0))
    together.index = list(range(len(samples)))
    return together


def maker(*, ranks: int, share_prefix: bool, **flags: object) -> StepParts:
    given = {
        "actor.model_name_or_path": "model",
        "actor.num_gpus_per_node": ranks,
        "ref.num_gpus_per_node": ranks,
        "data.prompt_dataset": "rows.jsonl",
        "reward.remote_url": "http://127.0.0.1:5000/get_reward",
        "rollout.batch_size": 2,
        "rollout.n_samples_per_prompt": 2,
        "train.batch_size": 4,
        "train.shared_prefix_enable": share_prefix,
    }
    config = resolve(
        dotted.replace(PPOConfig(), given | {name.replace("__", "."): value for name, value in flags.items()})
    )
    workers = SimpleNamespace(_actor_handlers=[object()] * ranks, duplicate_actors=1)
    return StepParts(config, share_prefix=share_prefix, policy=workers)


def buffers_of(passes: list[Experience], *, ranks: int, monkeypatch: pytest.MonkeyPatch) -> list[GroupReplayBuffer]:
    """The replay buffer of each rank, which know what all ranks have together."""
    mesh = init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=("dp", "sp", "tp"))
    strategy = SimpleNamespace(config=dotted.replace(PPOConfig(), {"train.batch_size": 4}), ds_device_mesh=mesh)
    each = len(passes) // ranks
    buffers = []
    for rank in range(ranks):
        buffers.append(GroupReplayBuffer(7, dynamic_batch=True))
        for one in passes[rank * each : (rank + 1) * each]:
            buffers[-1].append(one)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: ranks)
    # What is summed over ranks is first noted from each, and then given to all.
    noted: list[torch.Tensor] = []
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group=None: noted.append(tensor.clone()))
    for buffer in buffers:
        buffer.setup_dynamic_batch(strategy)
    whole = sum(noted)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group=None: tensor.copy_(whole))
    for buffer in buffers:
        buffer.setup_dynamic_batch(strategy)
    return buffers


def loss_of(buffers: list[GroupReplayBuffer], *, per_token: bool) -> float:
    """The sum over passes, and the mean over ranks, as DeepSpeed makes it of gradients."""
    total = 0.0
    for buffer in buffers:
        for step in range(len(buffer)):
            one = buffer.collate_fn([buffer[step]])
            total += aggregate_loss(
                one.sequences[:, 1:].float(),
                one.action_mask,
                token_level_loss=per_token,
                dp_size=len(buffers),
                batch_num_tokens=buffer.dynamic_batch_num_tokens[step],
                global_batch_size=buffer.dynamic_global_batch_size[step],
            ).item()
    return total / len(buffers)


@pytest.mark.parametrize("per_token", [True, False])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("share_prefix", [True, False])
@pytest.mark.parametrize("samples", [1, 2, 4])
def test_a_mean_is_over_what_is_not_masked(samples, share_prefix, ranks, per_token, monkeypatch):
    made = maker(ranks=ranks, share_prefix=share_prefix, train__micro_batch_size=min(samples, 4 // ranks))
    (passes,) = made.update_passes([rollout()], step=0).steps
    buffers = buffers_of(passes, ranks=ranks, monkeypatch=monkeypatch)
    expected = (50 * 3 + 53 * 4) / 7 if per_token else (50 + 53) / 2
    assert loss_of(buffers, per_token=per_token) == pytest.approx(expected, rel=1e-6)


def test_a_masked_sample_takes_no_more_than_the_prompt_that_its_group_computes(monkeypatch):
    passes = maker(ranks=1, share_prefix=True, train__micro_batch_size=4).update_passes([rollout()], step=0)
    ((one,),) = passes.steps
    rows = {
        tuple(ids[: int(mask.sum())].tolist()) for ids, mask in zip(one.sequences, one.attention_mask, strict=True)
    }
    assert rows == {(1, 2, 50, 50, 50), (1, 2), (3, 4, 5), (3, 4, 5, 53, 53, 53, 53)}
    # Prompts of 2 and 3, responses of 3 and 4.
    assert passes.unique_tokens == 2 + 3 + 3 + 4
    # What is logged of it stays: how long it was, and that it was masked.
    assert sorted(one.response_length.tolist()) == [1, 2, 3, 4]
    assert sorted(map(bool, one.info["masked"])) == [False, False, True, True]


def test_a_masked_sample_brings_the_medias_of_its_prompt_alone():
    masked = experience([1, 2], [51, 6, 6, 51], masked=True, media=IMAGE)
    masked.mm_train_inputs = [(PlacedRef(0, IMAGE, end=2), PlacedRef(3, CROP, end=4))]
    others = [experience([1, 2], [50], masked=False, media=IMAGE) for _ in range(3)]
    together = trained(Experience.concat_experiences([masked, *others], 0))
    together.index = list(range(4))
    made = maker(ranks=1, share_prefix=True, train__micro_batch_size=4)
    ((one,),) = made.update_passes([together], step=0).steps
    assert one.mm_train_inputs == [(PlacedRef(0, IMAGE, end=2),)] * 4


def test_a_step_of_masked_samples_alone_is_worth_nothing_and_stays_a_number(monkeypatch):
    samples = [experience([1, 2], [50] * length, masked=True) for length in (1, 2, 3, 4)]
    together = trained(Experience.concat_experiences(samples, 0))
    together.index = list(range(4))
    (passes,) = maker(ranks=1, share_prefix=True, train__micro_batch_size=2).update_passes([together], step=0).steps
    buffers = buffers_of(passes, ranks=1, monkeypatch=monkeypatch)
    assert [loss_of(buffers, per_token=per_token) for per_token in (True, False)] == [0.0, 0.0]


def test_a_sample_without_loss_tokens_has_a_mean_of_zero():
    outputs = ModelOutputs(
        rewards=None, values=None, log_probs=[torch.full((2, 3), -2.0)], reference_log_probs=[torch.full((2, 3), -3.0)]
    )
    one = Experience(sequences=torch.zeros(2, 4), action_mask=torch.tensor([[0, 1, 1], [0, 0, 0]]), info={})
    add_outputs([one], outputs, maker(ranks=1, share_prefix=True).config)
    assert one.info["kl"].tolist() == [1.0, 0.0]
    assert not any(math.isnan(value) for value in one.info["logprobs_diff"])
