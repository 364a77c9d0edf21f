"""The passes that a worker trains on are those that were planned, with the counts of their whole optimizer step."""

from types import SimpleNamespace

import pytest
import torch
from helpers.rl_steps import group, sample, trained
from openrlhf.models import aggregate_loss
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.utils.loss_utils import get_loss_batch_info
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader

from lmm_r1 import dotted
from lmm_r1.config import PPOConfig
from lmm_r1.rl.workers import GroupReplayBuffer

pytestmark = pytest.mark.usefixtures("one_process")


def strategy(*, batch_size: int) -> SimpleNamespace:
    mesh = init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=("dp", "sp", "tp"))
    return SimpleNamespace(config=dotted.replace(PPOConfig(), {"train.batch_size": batch_size}), ds_device_mesh=mesh)


def passes_of(samples: list[Experience], *sizes: int) -> list[Experience]:
    """The samples as passes of these sizes, one after the other."""
    starts = [sum(sizes[:place]) for place in range(len(sizes) + 1)]
    return [
        trained(Experience.concat_experiences(samples[start:end], 0))
        for start, end in zip(starts[:-1], starts[1:], strict=True)
    ]


def filled(passes: list[Experience], *, batch_size: int) -> GroupReplayBuffer:
    buffer = GroupReplayBuffer(7, dynamic_batch=True)
    for experience in passes:
        buffer.append(experience)
    buffer.setup_dynamic_batch(strategy(batch_size=batch_size))
    return buffer


def test_each_pass_knows_what_its_optimizer_step_holds():
    # Two steps of 4 samples: responses of 3, 1, 2 and 4 tokens, then of 5, none, 1 and 1.
    samples = [*group([1, 2], [3, 1, 2, 4]), sample([3], [4] * 5), sample([3], []), *group([5, 6], [1, 1])]
    buffer = filled(passes_of(samples, 3, 1, 2, 2), batch_size=4)
    assert [len(item.sequences) for item in buffer.items] == [3, 1, 2, 2]
    assert buffer.dynamic_optimizer_step == [0, 1, 0, 1]
    assert buffer.dynamic_batch_num_tokens == [10, 10, 7, 7]
    # The sample without a response is none for the loss.
    assert buffer.dynamic_global_batch_size == [4, 4, 3, 3]
    assert buffer.dynamic_sample_loss_scale == [3 / 4, 1 / 4, 2 / 4, 2 / 4]
    # The last of two steps has 2 of 8 samples; both are whole means.
    buffer = filled(passes_of(samples, 3, 3, 1, 1), batch_size=6)
    assert buffer.dynamic_optimizer_step == [0, 1, 0, 1]
    assert buffer.dynamic_batch_num_tokens == [15, 15, 2, 2]
    assert buffer.dynamic_sample_loss_scale == [3 / 6, 3 / 6, 1 / 2, 1 / 2]


def test_the_data_loader_of_openrlhf_gives_the_passes_in_order_without_padding_between_them():
    samples = [*group([1, 2], [3, 1]), *group([4], [6, 6])]
    # Appended as workers get them: padded to the longest sample of both.
    buffer = filled(passes_of(samples, 2, 2), batch_size=4)
    loader = DataLoader(buffer, batch_size=buffer.sample_batch_size, drop_last=True, collate_fn=buffer.collate_fn)
    first, second = loader
    assert first.sequences.tolist() == [[1, 2, 50, 50, 50], [1, 2, 51, 0, 0]]
    assert first.action_mask.tolist() == [[0, 1, 1, 1], [0, 1, 0, 0]]
    assert second.sequences.tolist() == [[4, *[50] * 6], [4, *[51] * 6]]


def test_a_cleared_buffer_takes_the_next_rollout():
    buffer = filled(passes_of(group([1], [1, 1]), 2), batch_size=2)
    buffer.clear()
    assert len(buffer) == 0
    buffer.append(*passes_of(group([1], [2, 4]), 2))
    buffer.setup_dynamic_batch(strategy(batch_size=2))
    assert len(buffer) == 1
    assert buffer.dynamic_batch_num_tokens == [6]


@pytest.mark.parametrize("per_token", [True, False])
@pytest.mark.parametrize("sizes", [(4,), (3, 1), (1, 1, 1, 1)])
def test_the_losses_of_a_steps_passes_add_up_to_the_mean_over_the_step(sizes, per_token):
    samples = group([1, 2], [3, 1, 2, 4])
    plan = strategy(batch_size=4)
    buffer = filled(passes_of(samples, *sizes), batch_size=4)
    # The loss of each token is its id: 50, 51, 52 and 53, 3, 1, 2 and 4 times.
    total = 0.0
    for step in range(len(buffer)):
        experience = buffer.collate_fn([buffer[step]])
        info = get_loss_batch_info(plan, experience.action_mask, replay_buffer=buffer, step=step, dynamic_batch=True)
        losses = experience.sequences[:, 1:].float()
        total += aggregate_loss(losses, experience.action_mask, token_level_loss=per_token, **info)
    mean = (3 * 50 + 51 + 2 * 52 + 4 * 53) / 10 if per_token else (50 + 51 + 52 + 53) / 4
    torch.testing.assert_close(total, torch.tensor(mean))
