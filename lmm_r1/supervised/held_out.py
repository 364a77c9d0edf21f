"""Evaluation during a supervised run: sums over all held-out rows, when they are made, and which checkpoint is best."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from lmm_r1.config import SupervisedConfig, checkpoint_folder
from lmm_r1.errors import UserError
from lmm_r1.host.checkpoint_folder import best_metric
from lmm_r1.host.strategy import KitStrategy

LOSS = "eval_loss"
OVERLONG = "eval_overlong_rows"

RowT = TypeVar("RowT")
SampleT = TypeVar("SampleT")


class HeldOut(ABC, Generic[RowT, SampleT]):
    """Evaluates the model on all rows, of which each group of ranks with the same samples takes its share."""

    def __init__(
        self,
        config: SupervisedConfig,
        strategy: KitStrategy,
        *,
        rows: Sequence[RowT],
        source_of: Callable[[RowT], str],
        encode: Callable[[RowT], SampleT | None],
        filler: SampleT,
    ) -> None:
        """Args:
        source_of: gives the name by which the metrics of a row are told apart.
        filler: a sample that counts for nothing, for a rank that has run out of rows: all ranks make a pass at once.
        """
        self.config = config
        self.strategy = strategy
        self.rows = rows
        self.source_of = source_of
        self.encode = encode
        self.filler = filler
        self.sources = sorted({source_of(row) for row in rows})

    @abstractmethod
    def _measured(self, samples: Sequence[SampleT]) -> torch.Tensor:
        """Return what is summed over rows for each sample of a pass, (B, K) in double precision; every rank calls it."""

    @abstractmethod
    def _metrics(self, sums: torch.Tensor, *, source: str | None) -> dict[str, float]:
        """Return the metrics of sums (K,) over rows, empty where they are of no row.

        Args:
            source: of the rows; None for all rows.
        """

    def is_due(self, step: int, *, per_epoch: int, steps: int) -> bool:
        """Say whether the model is evaluated after a step: every `--eval.steps`, else after each epoch and the last step."""
        every = self.config.eval.steps
        return step % every == 0 if every > 0 else step % per_epoch == 0 or step == steps

    def run(self, model: Any) -> dict[str, float]:
        """Return the metrics by name, the same on every rank; the model is in training mode afterwards.

        Raises UserError where no row fits into `--data.max_len`.
        """
        model.eval()
        try:
            return self._all_metrics()
        finally:
            model.train()

    def _all_metrics(self) -> dict[str, float]:
        sums = self._sums()
        whole = self._metrics(sums[:, :-1].sum(0), source=None)
        if not whole:
            raise UserError(
                f"every row of --eval.dataset {self.config.eval.dataset} is longer than --data.max_len "
                f"{self.config.data.max_len}, or has no loss token; raise it"
            )
        metrics = {**whole, OVERLONG: float(sums[:, -1].sum())}
        if len(self.sources) > 1:
            for name, of_source in zip(self.sources, sums, strict=True):
                metrics |= self._metrics(of_source[:-1], source=name)
        return metrics

    @property
    def _group(self) -> dist.ProcessGroup:
        return self.strategy.ds_device_mesh["dp"].get_group()

    def _own_rows(self) -> list[RowT]:
        share = self.strategy.ds_device_mesh["dp"]
        return list(self.rows[share.get_local_rank() :: share.size()])

    @torch.no_grad()
    def _sums(self) -> torch.Tensor:
        """Return by data source what is measured, summed over all ranks' rows, and how many are too long, (S, K + 1)."""
        size = self.config.train.micro_batch_size
        own = self._own_rows()
        passes = math.ceil(len(self.rows) / self.strategy.ds_device_mesh["dp"].size() / size)
        sums: torch.Tensor | None = None
        for number in range(passes):
            part = own[number * size : (number + 1) * size]
            encoded = [(self.sources.index(self.source_of(row)), self.encode(row)) for row in part]
            kept = [(source, sample) for source, sample in encoded if sample is not None]
            measured = self._measured([sample for _, sample in kept] or [self.filler])
            if sums is None:
                sums = measured.new_zeros(len(self.sources), measured.shape[1] + 1)
            for place, (source, _) in enumerate(kept):
                sums[source, :-1] += measured[place]
            for source, item in encoded:
                sums[source, -1] += item is None
        assert sums is not None, "there are rows, so that each rank makes a pass"
        dist.all_reduce(sums, group=self._group)
        return sums


class RunHeldOut(HeldOut[RowT, SampleT]):
    """Evaluates the model of a run on rows that say where they are from, encoded as those that it learns from."""

    def __init__(
        self, run: Any, *, rows: Sequence[RowT], source_of: Callable[[Any], str] = attrgetter("datasource")
    ) -> None:
        """Args: run: a `SupervisedRun`."""
        super().__init__(
            run.config, run.strategy, rows=rows, source_of=source_of, encode=run.encode, filler=run.filler
        )


class BestMetric:
    """The best value so far of what `--ckpt.best_metric_key` names, in the folder of checkpoints too."""

    def __init__(self, config: SupervisedConfig) -> None:
        self.key = config.ckpt.best_metric_key or LOSS
        self.folder = checkpoint_folder(config)
        self.best: float | None = None

    def resume(self) -> None:
        """Take up the value of the best checkpoint that is there; every rank must call it."""
        found: list[float | None] = [best_metric(self.folder, key=self.key) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(found)
        self.best = found[0]

    def improves(self, metrics: dict[str, float]) -> bool:
        """Note an evaluation and say whether it is the best; raises UserError where it lacks the metric.

        Of a loss the least is best, of all others the largest.
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
