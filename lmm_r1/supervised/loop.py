"""The loop of every supervised trainer: updates, logs, evaluations on held-out rows, checkpoints and stops."""

from __future__ import annotations

import itertools
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import torch
import torch.distributed as dist
from rich.console import Console

from lmm_r1 import cpu
from lmm_r1.config import SupervisedConfig, checkpoint_folder
from lmm_r1.data.messages import Row
from lmm_r1.data.training_rows import KeptRows
from lmm_r1.errors import UserError
from lmm_r1.host.checkpoint_folder import best_metric
from lmm_r1.host.optimizer import LossScaling, loss_scaling
from lmm_r1.lmm_kits import Checkpoint
from lmm_r1.models.packed.packing import ModelSample
from lmm_r1.supervised import (
    RowCheck,
    SampleEncoder,
    attempt,
    batch_indices,
    check_left_out,
    passes,
    read_ahead,
    updates_per_epoch,
)
from lmm_r1.supervised.start import ConfigT
from lmm_r1.train.start import Frame, blended_rows, evaluation_rows
from lmm_r1.train.stopping import Progress, SaveSchedule
from lmm_r1.train.update import Counts, Step, Terms, update

if TYPE_CHECKING:
    from typing_extensions import Self


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

    @torch.no_grad()
    def _sums(self) -> torch.Tensor:
        """Return by data source the values summed over all ranks' rows, and the number of overlong rows, (S, K + 1)."""
        size, share = self.config.train.micro_batch_size, self.strategy.ds_device_mesh["dp"]
        own = self.rows[share.get_local_rank() :: share.size()]
        passes = math.ceil(len(self.rows) / share.size() / size)
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
        dist.all_reduce(sums, group=share.get_group())
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


RowT = TypeVar("RowT")
BatchT = TypeVar("BatchT")


@dataclass(frozen=True, kw_only=True)
class TokenTerms:
    """The result of a forward pass for each token, (B, T - 1), 0 for tokens that are no loss tokens."""

    loss: torch.Tensor
    parts: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Other logged values by name."""
    aux_loss: torch.Tensor | float = 0.0
    """The load-balancing loss of experts."""


class SupervisedRun(ABC, Generic[ConfigT, RowT, SampleT, BatchT]):
    """The training loop; a trainer defines its rows, its models, its batches and its loss.

    An update's loss is the mean over the units of all micro-batches of all ranks, however they are spread.
    """

    kind: ClassVar[str]
    """The kind of the stage in stage.json."""
    encoder: ClassVar[type[SampleEncoder]]
    evaluator: ClassVar[type[HeldOut[Any, Any]]]
    shown: ClassVar[tuple[str, ...]] = ()
    """The names in `Terms.sums` that are printed with each step."""

    def __init__(
        self,
        session: Frame[ConfigT],
        actor: Any,
        *,
        rows: Sequence[RowT],
        encode: Callable[[RowT], SampleT | None],
        filler: SampleT,
    ) -> None:
        """Args:
        actor: the trained model under DeepSpeed.
        encode: returns a row's sample, None if it is too long.
        filler: a sample without loss tokens, for a micro-batch in which no row fits: DeepSpeed counts micro-batches.
        """
        self.config = config = session.config
        self.strategy = strategy = session.strategy
        self.checkpoint = session.checkpoint
        self.folder = session.folder
        self.stops = session.stops
        self.trackers = session.trackers
        self.actor = actor
        self.rows = rows
        self.encode = encode
        self.filler = filler
        # Samples of the following steps, if worker processes encode them; None encodes each step's when it begins.
        self.ahead: Generator[SampleT | UserError | None, None, None] | None = None
        # Errors of this rank's rows that have not been reported to all ranks yet.
        self.refused: list[UserError] = []
        self.evaluation: HeldOut[Any, SampleT] | None = None
        self.best = BestMetric(config)
        self.console = Console(highlight=False, markup=False, soft_wrap=True, quiet=not strategy.is_rank_0())
        self.skipped = 0
        self.schedule = SaveSchedule.of(config.ckpt)
        self.step = self.saved_step = 0
        self._scaled: LossScaling | None = None

    @classmethod
    @abstractmethod
    def load(cls, config: ConfigT, path: str, *, split: str, check: RowCheck[Any]) -> KeptRows[Any]:
        """Return the rows of a file; raises UserError if they cannot be trained or evaluated on.

        Args:
            check: raises UserError for a row that cannot be encoded.
        """

    @classmethod
    def training_rows(cls, config: ConfigT, *, check: RowCheck[Any] = passes) -> KeptRows[Any]:
        """Return the rows of `--data.dataset`; raises UserError if they cannot be trained on, or are too few."""
        split = config.data.dataset_split
        return blended_rows(config, lambda path: cls.load(config, path, split=split, check=check))

    @classmethod
    def evaluation_rows(cls, config: ConfigT, *, check: RowCheck[Any] = passes) -> KeptRows[Any]:
        """Return the rows of `--eval.dataset`; none without it."""
        split = config.eval.split
        return evaluation_rows(config, lambda path: cls.load(config, path, split=split, check=check))

    @classmethod
    def conversations(cls, rows: Sequence[Any]) -> list[Row]:
        """Return the conversations of rows, with their images."""
        return list(rows)

    @classmethod
    def check(cls, config: ConfigT, checkpoint: Checkpoint, rows: Sequence[Row]) -> None:
        """Raise UserError if the flags do not fit these conversations."""

    @classmethod
    @abstractmethod
    def of(cls, session: Frame[ConfigT], **learned: Any) -> Self:
        """Return the run of a session, with its models loaded.

        Args:
            learned: the named arguments of a run.
        """

    @property
    def engine(self) -> Any:
        """DeepSpeed's engine around the trained model."""
        return self.actor.model

    @abstractmethod
    def collate(self, samples: Sequence[SampleT]) -> BatchT:
        """Return samples as one batch."""

    @abstractmethod
    def counts(self, batch: BatchT) -> Counts:
        """Return the number of units and loss tokens of a batch."""

    @abstractmethod
    def terms(self, batch: BatchT) -> Terms:
        """Run the model on a batch; every rank calls it equally often."""

    def evaluate_on(self, rows: Sequence[Any]) -> None:
        """Evaluate the run on held-out rows, by `--eval.*`, and keep its best checkpoint."""
        self.evaluation = self.evaluator(self, list(rows))
        self.best.resume()

    def train(self, *, steps: int) -> None:
        """Run the updates up to `steps`, from the newest checkpoint if there is one, and write the model."""
        start = self._resume()
        if self.strategy.is_rank_0():
            self.folder.resume(start)
        self.fit(start=start, steps=steps)
        self.finish()
        with self.stops.held():
            self.strategy.save_model(self.actor, self.checkpoint.processor, self.config.ckpt.output_dir)

    def _resume(self) -> int:
        if not self.config.ckpt.load_enable:
            return 0
        _, states = self.strategy.load_ckpt(self.engine, str(checkpoint_folder(self.config)))
        self.actor.forget_features()
        return states.get("global_step", 0)

    def fit(self, *, start: int, steps: int) -> None:
        """Run the updates `start` to `steps`; each sees the same rows whether or not the run was interrupted.

        Ctrl-C and SIGTERM end the run after the current update, which is saved.
        """
        config = self.config
        self.actor.train()
        self.step = self.saved_step = start
        self._scaled = self._loss_scaling()
        self.stops.progress = lambda: Progress.of(config, step=self.step, total=steps, saved=self.saved_step)
        workers = config.data.dataloader_num_workers
        if workers:
            indices = (index for step in range(start, steps) for index in self._own_indices(step))
            self.ahead = read_ahead(self.rows, self.encode, indices=indices, workers=workers)
        if start:
            self.console.print(f"{self.folder.name} resumed at step {start}/{steps}")
        if start == 0 and self.config.eval.before_training:
            assert self.evaluation is not None, "the checks ask for --eval.dataset"
            self._log_evaluation(0, self._evaluated(self.evaluation), steps=steps)
        try:
            for step in range(start, steps):
                with self.stops.held():
                    stop, ended = self._make_step(step, steps=steps)
                if stop:
                    raise KeyboardInterrupt
                if ended:
                    break
        finally:
            # Otherwise its workers live as long as this run is referred to.
            if self.ahead is not None:
                self.ahead.close()
        if self.skipped:
            self.console.print(
                f"{self.skipped} rows longer than --data.max_len {self.config.data.max_len} were skipped"
            )

    def finish(self) -> None:
        """Do what a trainer does after all updates, before its model is saved."""

    def _make_step(self, step: int, *, steps: int) -> tuple[bool, bool]:
        """Make one update, log it, save it if that is due, and return whether a signal or a callback ends the run.

        If it fails, save the updates before it and raise UserError on every rank.
        """
        began = time.perf_counter()
        batches = self._micro_batches(step)
        try:
            self._settle_refused()
            made = update(
                self.strategy,
                self.actor,
                batches,
                counts=self.counts,
                terms=self.terms,
                aux_weight=self.config.model.aux_loss_coef,
            )
        except UserError as error:
            if step != self.saved_step and not self.config.ckpt.disable_ds:
                self._save(step)
            raise UserError(f"step {step + 1}: {error}") from error
        seconds = time.perf_counter() - began
        self.step = step + 1
        self._log(step + 1, steps, made=made, seconds=seconds)
        self._evaluate(step + 1, steps=steps)
        stop, due, ended = self._any_rank(
            self.stops.asked, self.schedule.is_due(step + 1), self.folder.ended_at is not None
        )
        if (stop or due) and not self.config.ckpt.disable_ds:
            self._save(step + 1)
        return stop, ended

    def _any_rank(self, *answers: bool) -> list[bool]:
        """Return for each question whether any rank answers yes: signals and times reach ranks at different steps."""
        counts = torch.tensor(answers, dtype=torch.long, device=cpu.device())
        dist.all_reduce(counts)
        return [bool(count) for count in counts.tolist()]

    def _own_indices(self, step: int) -> list[int]:
        train, share = self.config.train, self.strategy.ds_device_mesh["dp"]
        indices = batch_indices(
            num_rows=len(self.rows),
            batch_size=train.batch_size,
            seed=train.seed,
            step=step,
            keep_order=self.config.data.keep_order,
        )
        return indices[share.get_local_rank() :: share.size()]

    def _micro_batches(self, step: int) -> list[BatchT]:
        indices = self._own_indices(step)
        if self.ahead is None:
            return self._in_passes([self.taken(self.rows[index]) for index in indices])
        found = list(itertools.islice(self.ahead, len(indices)))
        return self._in_passes([self._noted(sample) for sample in found])

    def taken(self, row: RowT) -> SampleT | None:
        """Return a row's sample, None if it is too long or cannot be encoded, which `_settle_refused` handles."""
        return self._noted(attempt(self.encode, row))

    def _noted(self, sample: SampleT | UserError | None) -> SampleT | None:
        if not isinstance(sample, UserError):
            return sample
        self.refused.append(sample)
        return None

    def _settle_refused(self) -> None:
        """Record the rows that could not be encoded; every rank calls it.

        Raises UserError on every rank unless the run continues without them.
        """
        if not any(self._any_rank(bool(self.refused))):
            return
        found: list[list[UserError]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(found, self.refused)
        self.refused = []
        for error in itertools.chain.from_iterable(found):
            check_left_out(error, bad_rows=self.config.data.bad_rows)
            if self.strategy.is_rank_0() and self.folder.leave_out(str(error)):
                self.console.print(f"{self.folder.name}: a row is left out: {error}")

    def _in_passes(self, samples: Sequence[SampleT | None]) -> list[BatchT]:
        """Return an update's samples as micro-batches; rows that are left out (None) are counted."""
        self.skipped += samples.count(None) - len(self.refused)
        size = self.config.train.micro_batch_size
        # As many as of any other update, also if this one has fewer rows.
        share = self.config.train.batch_size // self.strategy.ds_device_mesh["dp"].size()
        parts = [samples[start : start + size] for start in range(0, share, size)]
        kept = [[sample for sample in part if sample is not None] or [self.filler] for part in parts]
        return [self.collate(part) for part in kept]

    def policy_log_probs(self, batch: list[ModelSample]) -> tuple[torch.Tensor, torch.Tensor | float]:
        """Return the log-probs of loss tokens, (B, T - 1), 0 elsewhere, and the load-balancing loss (0 if unused)."""
        balanced = self.config.model.aux_loss_coef > 0
        returned = self.actor(batch, return_output=balanced, ring_attn_group=self.strategy.ring_attn_group)
        if not balanced:
            return returned, 0.0
        log_probs, output = returned
        return log_probs, output.aux_loss

    def _evaluate(self, step: int, *, steps: int) -> None:
        """Evaluate if that is due, log it, and save the step if it is the best so far."""
        per_epoch = updates_per_epoch(len(self.rows), self.config.train.batch_size)
        if self.evaluation is None or not self.evaluation.is_due(step, per_epoch=per_epoch, steps=steps):
            return
        metrics = self._evaluated(self.evaluation)
        self._log_evaluation(step, metrics, steps=steps)
        if self.best.improves(metrics) and not self.config.ckpt.disable_ds:
            self._save(step, best=True)

    def _evaluated(self, evaluation: HeldOut[Any, SampleT]) -> dict[str, float]:
        metrics = evaluation.evaluate(self.actor)
        self._settle_refused()
        return metrics

    def _loss_scaling(self) -> LossScaling | None:
        return loss_scaling(self.engine) if self.config.ds.param_dtype == "fp16" else None

    def _log_evaluation(self, step: int, metrics: dict[str, float], *, steps: int) -> None:
        if self.strategy.is_rank_0():
            self.trackers.log_eval(step, metrics)
            self.folder.metrics(step, metrics, held_out=True)
            shown = "  ".join(f"{name} {value:.3f}" for name, value in metrics.items() if value or "rows" not in name)
            self.console.print(f"{self.folder.name} step {step}/{steps}  {shown}")

    def _log(self, step: int, steps: int, *, made: Step, seconds: float) -> None:
        if not self.strategy.is_rank_0():
            return
        values = {
            "loss": made.loss,
            **made.means,
            "lr": made.rate,
            "grad_norm": made.grad_norm,
            "tokens_per_second": made.computed / seconds,
            "seconds_per_step": seconds,
            "overlong_rows": self.skipped,
        }
        values |= self.actor.take_feature_counts().metrics("policy")
        if (scaling := self._loss_scaling()) is not None:
            values |= scaling.metrics(self._scaled)
            self._scaled = scaling
        self.folder.metrics(step, values)
        if step % self.config.logger.logging_steps == 0 or step == steps:
            self.trackers.log(step, values)
            more = "".join(f"  {name} {values[name]:.3f}" for name in self.shown)
            self.console.print(
                f"{self.folder.name} step {step}/{steps}  loss {made.loss:.3f}{more}  lr {values['lr']:.2e}  {seconds:.2f} s  "
                f"{values['tokens_per_second']:,.0f} tokens/s{self.folder.time_left(step, total=steps)}"
            )

    def _save(self, step: int, *, best: bool = False) -> None:
        """Save a checkpoint; `--ckpt.max_num` does not apply to the best one, which a better one replaces."""
        ckpt, folder = self.config.ckpt, str(checkpoint_folder(self.config))
        tag = f"best_global_step{step}" if best else f"global_step{step}"
        # Written first, so that every complete checkpoint has a complete copy.
        if ckpt.save_hf:
            self.strategy.save_model(self.actor, self.checkpoint.processor, f"{folder}/{tag}_hf")
        self.strategy.save_ckpt(
            self.engine,
            folder,
            tag,
            ckpt.max_num,
            ckpt.max_mem,
            {"global_step": step},
            metric_value=self.best.best if best else None,
            metric_key=self.best.key if best else None,
        )
        self.saved_step = step
        self.schedule.note_saved()
