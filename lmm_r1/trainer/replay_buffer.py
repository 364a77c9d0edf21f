"""What a model worker trains on: the passes as they were planned, in order, with what their losses are divided by."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine
from openrlhf.trainer.ppo_utils import NaiveReplayBuffer
from openrlhf.trainer.ppo_utils.experience import Experience

from lmm_r1.trainer.strategy import KitStrategy


class GroupReplayBuffer(NaiveReplayBuffer):
    """OpenRLHF's replay buffer; each experience that is appended is one pass and stays one.

    The passes of an optimizer step come one after the other and hold `--train.batch_size` samples over all ranks.
    """

    def append(self, experience: Experience) -> None:
        """Add one forward and backward pass."""
        start = len(self.items)
        super().append(experience)
        self.dynamic_indices.append(list(range(start, len(self.items))))

    def clear(self) -> None:
        super().clear()
        self.dynamic_indices: list[list[int]] = []

    def announce_pass(self, engine: DeepSpeedEngine, *, step: int) -> None:
        """Tell DeepSpeed, before a pass, whether an optimizer step ends with it.

        OpenRLHF does not: under ZeRO 1 and 2, DeepSpeed 0.19.6 then drops the gradients of all passes but the last.
        """
        engine.set_gradient_accumulation_boundary(bool(self.dynamic_optimizer_step[step]))

    @torch.no_grad()
    def setup_dynamic_batch(self, strategy: KitStrategy) -> None:
        """Fill in which pass ends an optimizer step, and the tokens and samples of each step over all ranks."""
        dp_group = strategy.ds_device_mesh["dp"].get_group()
        batch_size = strategy.args.train.batch_size // dist.get_world_size(group=dp_group)
        # The data loader takes one entry, a pass, at a time.
        self.sample_batch_size = 1
        ends = _ends([len(batch) for batch in self.dynamic_indices], batch_size=batch_size)
        self.dynamic_optimizer_step = list(map(int, ends))
        self.dynamic_sample_loss_scale = [len(batch) / batch_size for batch in self.dynamic_indices]

        steps = [before - end for before, end in zip(accumulate(ends), ends, strict=True)]  # of each pass
        counts = torch.zeros(sum(ends), 2, dtype=torch.long, device=torch.cuda.current_device())
        for step, batch in zip(steps, self.dynamic_indices, strict=True):
            tokens = [int(self.items[index].action_mask.sum()) for index in batch]
            counts[step] += counts.new_tensor([sum(tokens), sum(count > 0 for count in tokens)])
        dist.all_reduce(counts, group=dp_group)
        # Of a step of masked samples alone, all losses are 0 divided by these.
        counts.clamp_(min=1)
        self.dynamic_batch_num_tokens = counts[steps, 0].float().tolist()
        self.dynamic_global_batch_size = counts[steps, 1].float().tolist()


def _ends(sizes: Sequence[int], *, batch_size: int) -> list[bool]:
    """Return for passes of these numbers of samples whether an optimizer step ends with them."""
    totals = list(accumulate(sizes))
    ends = [total % batch_size == 0 for total in totals]
    assert sum(ends) * batch_size == totals[-1], "the plan's steps have batch_size samples"
    return ends
