"""Evaluation during a supervised run: sums over all held-out rows, when they are computed, and the best checkpoint."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Generic, TypeVar

import torch
import torch.distributed as dist

from lmm_r1.config import SupervisedConfig, checkpoint_folder
from lmm_r1.errors import UserError
from lmm_r1.host.checkpoint_folder import best_metric

LOSS = "loss"
PREFIX = "eval_"

RunT = TypeVar("RunT", bound=Any)
SampleT = TypeVar("SampleT")


class HeldOut(ABC, Generic[RunT, SampleT]):
    """Evaluates the model of a run on held-out rows; each group of ranks with the same samples takes its share."""

    of_sources: ClassVar[tuple[str, ...] | None] = None
    """The metrics that are reported per data source if there are several; None for all."""

    def __init__(self, run: RunT, rows: Sequence[Any]) -> None:
        """Args: run: a `SupervisedRun`."""
        self.run = run
        self.config = run.config
        self.strategy = run.strategy
        self.rows = rows
        self.sources = sorted({row.datasource for row in rows})
        self.last: dict[str, float] | None = None
        """The metrics of the last evaluation."""

    @abstractmethod
    def _measured(self, samples: Sequence[SampleT]) -> torch.Tensor:
        """Return the values of each sample that are summed over rows, (B, K) in double precision; every rank calls it."""

    @abstractmethod
    def _metrics(self, sums: torch.Tensor) -> dict[str, float]:
        """Return the metrics of sums (K,) over rows, without the prefix of their names; empty if there are no rows."""

    def is_due(self, step: int, *, per_epoch: int, steps: int) -> bool:
        """Return whether a step is followed by an evaluation: every `--eval.steps`, or each epoch and the last step."""
        every = self.config.eval.steps
        return step % every == 0 if every > 0 else step % per_epoch == 0 or step == steps

    def evaluate(self, model: Any) -> dict[str, float]:
        """Return the metrics by name, the same on every rank; the model is in training mode afterwards.

        Raises UserError if no row fits into `--data.max_len`.
        """
        model.eval()
        try:
            self.last = self._all_metrics()
        finally:
            model.train()
        return self.last

    def _all_metrics(self) -> dict[str, float]:
        sums = self._sums()
        whole = self._metrics(sums[:, :-1].sum(0))
        if not whole:
            raise UserError(
                f"every row of --eval.dataset {self.config.eval.dataset} is longer than --data.max_len "
                f"{self.config.data.max_len}, or has no loss token; raise it"
            )
        metrics = {f"{PREFIX}{name}": value for name, value in whole.items()}
        metrics[f"{PREFIX}overlong_rows"] = float(sums[:, -1].sum())
        if len(self.sources) > 1:
            for source, of_source in zip(self.sources, sums, strict=True):
                for name, value in self._metrics(of_source[:-1]).items():
                    if self.of_sources is None or name in self.of_sources:
                        metrics[f"{PREFIX}{source}_{name}"] = value
        return metrics

    @property
    def _group(self) -> dist.ProcessGroup:
        return self.strategy.ds_device_mesh["dp"].get_group()

    def _own_rows(self) -> list[Any]:
        share = self.strategy.ds_device_mesh["dp"]
        return list(self.rows[share.get_local_rank() :: share.size()])

    @torch.no_grad()
    def _sums(self) -> torch.Tensor:
        """Return by data source the values summed over all ranks' rows, and the number of overlong rows, (S, K + 1)."""
        size = self.config.train.micro_batch_size
        own = self._own_rows()
        passes = math.ceil(len(self.rows) / self.strategy.ds_device_mesh["dp"].size() / size)
        sums: torch.Tensor | None = None
        for number in range(passes):
            part = own[number * size : (number + 1) * size]
            encoded = [(self.sources.index(row.datasource), self.run.taken(row)) for row in part]
            kept = [(source, sample) for source, sample in encoded if sample is not None]
            # All ranks make a pass together, so a rank without rows evaluates the filler.
            measured = self._measured([sample for _, sample in kept] or [self.run.filler])
            if sums is None:
                sums = measured.new_zeros(len(self.sources), measured.shape[1] + 1)
            for place, (source, _) in enumerate(kept):
                sums[source, :-1] += measured[place]
            for source, item in encoded:
                sums[source, -1] += item is None
        assert sums is not None, "there are rows, so that each rank makes a pass"
        dist.all_reduce(sums, group=self._group)
        return sums


class BestMetric:
    """The best value so far of the metric that `--ckpt.best_metric_key` names, also in the folder of checkpoints."""

    def __init__(self, config: SupervisedConfig) -> None:
        self.key = config.ckpt.best_metric_key or f"{PREFIX}{LOSS}"
        self.folder = checkpoint_folder(config)
        self.best: float | None = None

    def resume(self) -> None:
        """Read the value of the best checkpoint; every rank must call it."""
        found: list[float | None] = [best_metric(self.folder, key=self.key) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(found)
        self.best = found[0]

    def improves(self, metrics: dict[str, float]) -> bool:
        """Return whether an evaluation is the best so far, and keep its value; raises UserError if it lacks the metric.

        The smallest loss is best; of other metrics the largest value.
        """
        if self.key == "none":
            return False
        if self.key not in metrics:
            raise UserError(
                f"--ckpt.best_metric_key {self.key}: the evaluation has {', '.join(metrics)}; name one of them"
            )
        value = metrics[self.key]
        sign = -1 if self.key.endswith("_loss") else 1
        if not math.isfinite(value) or (self.best is not None and sign * value <= sign * self.best):
            return False
        self.best = value
        return True
