"""Optimizer steps as `train.update` makes them, by torch alone; ranks are threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist

from lmm_r1.config import PPOConfig
from lmm_r1.models.packed.packing import stacked
from lmm_r1.rl.losses import LossSettings, aggregated
from lmm_r1.rl.samples import Pass
from lmm_r1.train.update import Counts, Step, Terms, update

T = TypeVar("T")


class PlayedEngine:
    """What an update asks of DeepSpeed's engine; notes which passes are said to be the last."""

    def __init__(self, **parts: Any) -> None:
        self.boundaries: list[bool] = []
        self.steps = 0
        self.module = SimpleNamespace(computed_tokens=7)
        vars(self).update(parts)

    def set_gradient_accumulation_boundary(self, last: bool) -> None:
        self.boundaries.append(last)

    def get_lr(self) -> list[float]:
        return [0.5 if self.steps else 0.25]

    def step(self) -> None:
        self.steps += 1

    def train(self) -> None:
        pass

    eval = train


class PlayedStrategy:
    """What an update asks of the strategy."""

    ring_attn_group = None

    def __init__(self, config: PPOConfig | None = None, *, ranks: int = 1) -> None:
        self.config = config
        self.ds_device_mesh = {"dp": SimpleNamespace(get_group=lambda: None, size=lambda: ranks)}

    def backward(self, loss: torch.Tensor, model: object, optimizer: object) -> None:
        loss.backward()

    def optimizer_step(self, optimizer: object, model: Any, scheduler: object, *, name: str) -> None:
        model.step()

    def get_grad_norm(self, model: object) -> float:
        return 3.0


def on_ranks(work: Sequence[Callable[[], T]], monkeypatch: pytest.MonkeyPatch) -> list[T]:
    """Run the function of each rank, with sums over all of them, and return what they return."""
    barrier, given = threading.Barrier(len(work), timeout=30), []

    def all_reduce(tensor: torch.Tensor, group: object = None) -> None:
        given.append(tensor.clone())
        barrier.wait()
        total = torch.stack(given[-len(work) :]).sum(dim=0)
        barrier.wait()
        tensor.copy_(total)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    with ThreadPoolExecutor(len(work)) as pool:
        return list(pool.map(lambda one: one(), work))


def update_by_ids(
    ranks: Sequence[Sequence[Pass]], *, per_token: bool, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[Step, PlayedEngine]]:
    """Make a step on each rank's passes, where a token's loss is its id times a weight of 1, and its logged value is its id.

    Args:
        per_token: whether the loss is a mean over tokens, or over sequences.
    """
    settings = LossSettings(aggregation="token-mean" if per_token else "seq-mean-token-mean")

    def mask_of(samples: Pass) -> torch.Tensor:
        return stacked(samples, lambda one: one.loss_mask.long())

    def counts(samples: Pass) -> Counts:
        mask = mask_of(samples)
        return Counts(units=settings.units(mask), tokens=int(mask.sum()), samples=len(samples))

    def made(passes: Sequence[Pass]) -> tuple[Step, PlayedEngine]:
        engine = PlayedEngine(weight=torch.ones((), requires_grad=True))

        def terms(samples: Pass) -> Terms:
            ids, mask = stacked(samples, lambda one: one.token_ids)[:, 1:].float(), mask_of(samples)
            engine.module.computed_tokens += sum(len(one.token_ids) for one in samples)
            loss = aggregated(ids, mask, settings=settings)
            return Terms(loss=loss * engine.weight, sums={"unit": loss}, token_sums={"token": (ids * mask).sum()})

        return update(PlayedStrategy(ranks=len(ranks)), engine, passes, counts=counts, terms=terms), engine

    return on_ranks([lambda passes=passes: made(passes) for passes in ranks], monkeypatch)
