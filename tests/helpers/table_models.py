"""Models whose log-probs stand in a table, and a strategy that takes gradients as DeepSpeed does, for runs worked out by hand."""

import torch
from torch.distributed.device_mesh import init_device_mesh

from lmm_r1.supervised.samples import SFTBatch, SFTSample

POLICY, REFERENCE = [0.0, -1.0, -2.0, -4.0], [0.0, -1.5, -2.0, -3.0]
"""Log-probs of the tokens 0 to 3: their log-ratios are 0, 0.5, 0 and -1."""


class AccumulatingStrategy:
    """Takes a step's gradients as DeepSpeed does: the mean over its micro-batches."""

    ring_attn_group = None

    def __init__(self, *, micro_batches: int = 1) -> None:
        self.ds_device_mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        self.micro_batches = micro_batches
        self.steps = 0

    def is_rank_0(self) -> bool:
        return True

    def backward(self, loss: torch.Tensor, model: object, optimizer: object) -> None:
        (loss / self.micro_batches).backward()

    def optimizer_step(self, optimizer: object, model: object, scheduler: object) -> None:
        self.steps += 1


class TableActor:
    """A model whose log-prob of a loss token is its entry in a table, whatever came before."""

    def __init__(self, table: list[float]) -> None:
        self.table = torch.tensor(table, requires_grad=True)
        self.modes: list[str] = []

    def __call__(self, sequences: torch.Tensor, action_mask: torch.Tensor, **arguments: object) -> torch.Tensor:
        return self.table[sequences[:, 1:]] * action_mask

    def eval(self) -> None:
        self.modes.append("eval")

    def train(self) -> None:
        self.modes.append("train")


class TableReference:
    """A reference whose log-probs stand in a table; it counts the conversations of each batch that it is asked for."""

    def __init__(self, table: list[float] | None = None) -> None:
        self.table = torch.tensor(REFERENCE if table is None else table)
        self.asked: list[int] = []

    def log_probs(self, batch: SFTBatch) -> torch.Tensor:
        self.asked.append(len(batch.sequences))
        return self.table[batch.sequences[:, 1:]] * batch.loss_mask


def responding(ids: list[int]) -> SFTSample:
    """A response behind a prompt of the token 0."""
    return SFTSample(token_ids=[0, *ids], loss_mask=[False, *[True] * len(ids)], media=None)
