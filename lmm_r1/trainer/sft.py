"""Supervised fine-tuning on conversations, with and without images, and on plain text."""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from lmm_r1.config import SFTConfig, checkpoint_folder, to_openrlhf_args
from lmm_r1.data.messages import Row
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits import Checkpoint
from lmm_r1.lmm_kits.checkpoint import check_images_taken, check_pixel_bounds
from lmm_r1.lmm_kits.weight_files import check_weights
from lmm_r1.models.actor import KitActor
from lmm_r1.models.load_balancing import check_balanced
from lmm_r1.models.packed.self_check import check_packing
from lmm_r1.models.packed.sequence_parallel import check_heads
from lmm_r1.models.rope_scaling import check_rope, tell_factors
from lmm_r1.planning.run_plan import check_sft_plan
from lmm_r1.records.run_folder import RunFolder
from lmm_r1.records.trackers import Trackers, open_trackers
from lmm_r1.trainer.run_start import Fingerprint, check_start, open_run
from lmm_r1.trainer.sft_evaluation import Answers, BestMetric, Evaluation
from lmm_r1.trainer.sft_rows import RowEncoder, chat_template, evaluation_rows, read_ahead, training_rows
from lmm_r1.trainer.sft_samples import SFTBatch, SFTSample, batch_indices, collate
from lmm_r1.trainer.stopping import Progress, SaveSchedule, StopRequests, told_ends
from lmm_r1.trainer.strategy import KitStrategy, default_to_one_process, make_strategy

logger = logging.getLogger(__name__)


def train(config: SFTConfig) -> None:
    """Train on `--data.dataset` and write the model to `--ckpt.output_dir`; raises UserError for what the user gave."""
    folder = RunFolder(path=Path(config.ckpt.output_dir), name=config.logger.stage_name, kind="sft")
    path = _model_path(config)
    checkpoint = Checkpoint(
        path, trust_remote_code=config.train.trust_remote_code, chat_template=chat_template(config)
    )
    kit, processor = checkpoint.kit, checkpoint.processor
    check_weights(path)
    model_config = checkpoint.config
    check_heads(model_config, size=config.ds.ulysses_size, model=f"--model.model_name_or_path {path}")
    check_balanced(
        model_config,
        coef=config.model.aux_loss_coef,
        flag="model.aux_loss_coef",
        model=f"--model.model_name_or_path {path}",
    )
    check_rope(model_config, model=f"--model.model_name_or_path {path}")
    rows, eval_rows = training_rows(config), evaluation_rows(config)
    check_images_taken(rows + eval_rows, kit=kit, model=f"--model.model_name_or_path {path}")
    check_pixel_bounds(config.data, checkpoint, model=f"--model.model_name_or_path {path}", prefix="--data.")
    encode = RowEncoder.of(config, kit=kit, processor=processor)
    fitting = next((sample for sample in map(encode, rows) if sample is not None), None)
    if fitting is None:
        raise UserError(
            f"every row of --data.dataset {config.data.dataset} is longer than {_max_len(config)}; raise it"
        )
    models = {"model.model_name_or_path": path}
    fingerprint = Fingerprint.of(config, models=models, rows={"data.dataset": rows})
    check_start(config, fingerprint)
    default_to_one_process()
    _check_processes(config, count=int(os.environ["WORLD_SIZE"]))
    _check_plan(config, rows)
    tell_factors(model_config, max_len=config.data.max_len, flag="--data.max_len")
    with StopRequests() as stops, told_ends(stops, folder=folder.path):
        _train(
            config,
            fingerprint,
            checkpoint=checkpoint,
            rows=rows,
            eval_rows=eval_rows,
            fitting=fitting,
            folder=folder,
            stops=stops,
        )


def _train(
    config: SFTConfig,
    fingerprint: Fingerprint,
    *,
    checkpoint: Checkpoint,
    rows: list[Row],
    eval_rows: list[Row],
    fitting: SFTSample,
    folder: RunFolder,
    stops: StopRequests,
) -> None:
    """Start the processes' group, load the model, train, and write the model."""
    args = to_openrlhf_args(config)
    strategy = make_strategy(args)
    strategy.setup_distributed()
    resumed = open_run(config, fingerprint, folder=folder) if strategy.is_rank_0() else False
    # What is deleted or written there must be so for all ranks.
    dist.barrier()
    steps = (len(rows) // config.train.batch_size) * config.train.max_epochs
    if config.train.max_steps > 0:
        steps = min(steps, config.train.max_steps)
    trackers = open_trackers(config, folder=folder.path, resumed=resumed) if strategy.is_rank_0() else Trackers()
    with trackers:
        actor = _prepare_actor(config, args, strategy, steps=steps)
        run = _SFTRun(
            config,
            strategy,
            actor,
            kit=checkpoint.kit,
            processor=checkpoint.processor,
            rows=rows,
            folder=folder,
            fitting=fitting,
            stops=stops,
            trackers=trackers,
        )
        if eval_rows:
            run.evaluate_on(eval_rows, checkpoint=checkpoint)
        start = _resume(config, strategy, actor)
        if strategy.is_rank_0():
            folder.resume(start)
        run.fit(start=start, steps=steps)
        with stops.held():
            strategy.save_model(actor, checkpoint.processor, config.ckpt.output_dir)
    if strategy.is_rank_0():
        folder.finish(steps=steps)
    dist.destroy_process_group()


def _model_path(config: SFTConfig) -> str:
    path = config.model.model_name_or_path
    assert path is not None, "required by config.resolve"
    return path


def _check_processes(config: SFTConfig, *, count: int) -> None:
    size = config.ds.ulysses_size
    if count % size:
        raise UserError(f"--ds.ulysses_size {size} does not divide the {count} processes of this run")


def _check_plan(config: SFTConfig, rows: list[Row]) -> None:
    """Raise UserError, on every rank, for a run that cannot fit; rank 0 says what it will take."""
    processes = int(os.environ["WORLD_SIZE"])
    console = Console(highlight=False, quiet=os.environ["RANK"] != "0")
    per_machine = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    check_sft_plan(config, console=console, processes=processes, per_machine=per_machine, rows=rows)


def _max_len(config: SFTConfig) -> str:
    return f"--data.max_len {config.data.max_len}"


def _prepare_actor(config: SFTConfig, args: SimpleNamespace, strategy: KitStrategy, *, steps: int) -> KitActor:
    actor = KitActor(
        _model_path(config),
        attn_implementation=config.ds.attn_implementation,
        param_dtype=config.ds.param_dtype,
        ds_config=strategy.get_ds_train_config(),
        lora_rank=config.ds.lora.rank,
        lora_alpha=config.ds.lora.alpha,
        lora_dropout=config.ds.lora.dropout,
        target_modules=config.ds.lora.target_modules,
        packing_samples=config.ds.packing_samples,
        experts_implementation=config.ds.experts_implementation,
        trust_remote_code=config.train.trust_remote_code,
        max_len=config.data.max_len,
        freeze_prefix=config.model.freeze_prefix,
    )
    if config.model.gradient_checkpointing_enable:
        actor.gradient_checkpointing_enable({"use_reentrant": config.model.gradient_checkpointing_reentrant})
    settings = {
        "optim": config.optim,
        "muon": vars(args.muon),
        "adam": vars(args.adam),
        "lr_scheduler": config.lr_scheduler,
        "lr_warmup_ratio": config.lr_warmup_ratio,
        "min_lr_ratio": config.min_lr_ratio,
        "max_norm": config.max_norm,
        "scheduler_steps": steps,
    }
    actor, _, _ = strategy.prepare((actor, settings))
    check_packing(actor, group=strategy.ring_attn_group, longest=config.data.max_len)
    if config.model.aux_loss_coef:
        actor.balance_experts()
    return actor


def _resume(config: SFTConfig, strategy: KitStrategy, actor: KitActor) -> int:
    """Load the newest checkpoint where asked to, and return the step to go on from."""
    if not config.ckpt.load_enable:
        return 0
    _, states = strategy.load_ckpt(actor.model, str(checkpoint_folder(config)))
    return states.get("global_step", 0)


class _SFTRun:
    """The training loop and what it needs."""

    def __init__(
        self,
        config: SFTConfig,
        strategy: KitStrategy,
        actor: KitActor,
        *,
        kit: Any,
        processor: Any,
        rows: list[Row],
        folder: RunFolder,
        fitting: SFTSample,
        stops: StopRequests | None = None,
        trackers: Trackers | None = None,
    ) -> None:
        self.config = config
        self.strategy = strategy
        self.actor = actor
        self.kit = kit
        self.processor = processor
        self.rows = rows
        self.folder = folder
        self.trackers = trackers or Trackers()
        self.encode = RowEncoder.of(config, kit=kit, processor=processor)
        # Of the steps that follow, where workers encode them; None encodes each step's when they are needed.
        self.ahead: Iterator[SFTSample | None] | None = None
        self.evaluation: Evaluation | None = None
        self.best = BestMetric(config)
        # DeepSpeed counts micro-batches, so one without a row that fits is filled with a row that teaches nothing.
        self.filler = replace(fitting, loss_mask=[False] * len(fitting.loss_mask))
        self.console = Console(highlight=False, quiet=not strategy.is_rank_0())
        self.skipped = 0
        self.stops = stops or StopRequests()
        self.schedule = SaveSchedule.of(config.ckpt)
        self.step = self.saved_step = 0

    def evaluate_on(self, rows: list[Row], *, checkpoint: Checkpoint) -> None:
        """Evaluate the run on held-out rows, by `--eval.*`, and keep its best checkpoint."""
        asked, model = self.config.eval.verifier is not None, self.actor.model
        self.evaluation = Evaluation(
            self.config,
            self.strategy,
            rows=rows,
            encode=self.encode,
            filler=self.filler,
            log_probs=self._evaluated,
            answers=Answers(self.config, model, checkpoint=checkpoint, rows=rows) if asked else None,
        )
        self.best.resume()

    def fit(self, *, start: int, steps: int) -> None:
        """Run the updates `start` to `steps`; each sees the same rows whether or not the run was interrupted.

        Ctrl-C and SIGTERM end it after an update, which is saved.
        """
        self.actor.train()
        self.step = self.saved_step = start
        self.stops.progress = partial(self._progress, steps)
        workers = self.config.data.dataloader_num_workers
        if workers:
            indices = (index for step in range(start, steps) for index in self._own_indices(step))
            self.ahead = read_ahead(self.rows, self.encode, indices=indices, workers=workers)
        if start:
            self.console.print(f"{self.folder.name} resumed at step {start}/{steps}")
        if start == 0 and self.config.eval.before_training:
            self._evaluate_first(steps=steps)
        for step in range(start, steps):
            with self.stops.held():
                stop = self._make_step(step, steps=steps)
            if stop:
                raise KeyboardInterrupt
        if self.skipped:
            self.console.print(f"{self.skipped} rows longer than {_max_len(self.config)} were skipped")

    def _make_step(self, step: int, *, steps: int) -> bool:
        """Make one update, log it, save it where that is due, and return whether the run is to end with it.

        Raises UserError on every rank where it cannot be made; the updates before it are saved then.
        """
        began = time.perf_counter()
        batches = self._micro_batches(step)
        try:
            loss, tokens = self._update(batches)
        except UserError as error:
            if step != self.saved_step and not self.config.ckpt.disable_ds:
                self._save(step)
            raise UserError(f"step {step + 1}: {error}") from error
        seconds = time.perf_counter() - began
        self.step = step + 1
        self._log(step + 1, steps, loss=loss, tokens=tokens, seconds=seconds)
        self._evaluate(step + 1, steps=steps)
        stop, due = self._any_rank(self.stops.asked, self.schedule.is_due(step + 1))
        if (stop or due) and not self.config.ckpt.disable_ds:
            self._save(step + 1)
        return stop

    def _any_rank(self, *answers: bool) -> list[bool]:
        """Return for each question whether any rank says yes: a signal, and the time, reach ranks at different steps."""
        counts = torch.tensor(answers, dtype=torch.long, device=torch.cuda.current_device())
        dist.all_reduce(counts)
        return [bool(count) for count in counts.tolist()]

    def _progress(self, steps: int) -> Progress:
        ckpt = self.config.ckpt
        return Progress(
            name=self.folder.name,
            step=self.step,
            total=steps,
            saved=self.saved_step or None,
            checkpoints=checkpoint_folder(self.config),
            disabled=ckpt.disable_ds,
            overwrite=ckpt.overwrite,
        )

    def _own_indices(self, step: int) -> list[int]:
        """Return the rows of an update that are this rank's, by their place in the data."""
        train = self.config.train
        indices = batch_indices(
            num_rows=len(self.rows),
            batch_size=train.batch_size,
            seed=train.seed,
            step=step,
            keep_order=self.config.data.keep_order,
        )
        share = self.strategy.ds_device_mesh["dp"]
        return indices[share.get_local_rank() :: share.size()]

    def _micro_batches(self, step: int) -> list[SFTBatch]:
        """Return this rank's micro-batches of an update; rows too long for `max_len` are left out and counted."""
        indices = self._own_indices(step)
        if self.ahead is None:
            samples = [self.encode(self.rows[index]) for index in indices]
        else:
            samples = list(itertools.islice(self.ahead, len(indices)))
        self.skipped += samples.count(None)
        size = self.config.train.micro_batch_size
        parts = [samples[start : start + size] for start in range(0, len(samples), size)]
        kept = [[sample for sample in part if sample is not None] or [self.filler] for part in parts]
        pad_token_id = self.kit.tokenizer_of(self.processor).pad_token_id
        return [collate(part, pad_token_id=pad_token_id) for part in kept]

    def _update(self, batches: list[SFTBatch]) -> tuple[float, int]:
        """Make one optimizer step on the mean loss over all loss tokens of all ranks; return it and their number.

        Raises UserError on every rank, before the step, where loss or gradients are not finite.
        """
        device = torch.cuda.current_device()
        tokens = torch.tensor(float(sum(int(batch.loss_mask.sum()) for batch in batches)), device=device)
        # Ranks that share rows have the same samples, and the same loss.
        data_parallel = self.strategy.ds_device_mesh["dp"]
        dist.all_reduce(tokens, group=data_parallel.get_group())
        total = torch.zeros((), device=device)
        for batch in batches:
            log_probs, aux_loss = self._log_probs(batch, device)
            loss = -log_probs.sum() / tokens.clamp(min=1)
            # DeepSpeed divides by the number of micro-batches and averages over ranks; the loss above is a sum, and
            # that of the experts' load a mean.
            whole = loss * len(batches) * data_parallel.size() + self.config.model.aux_loss_coef * aux_loss
            self.strategy.backward(whole, self.actor, None)
            self.strategy.optimizer_step(None, self.actor, None)
            total += loss.detach()
        dist.all_reduce(total, group=data_parallel.get_group())
        return total.item(), int(tokens.item())

    def _evaluated(self, batch: SFTBatch) -> torch.Tensor:
        return self._log_probs(batch, torch.cuda.current_device())[0]

    def _evaluate_first(self, *, steps: int) -> None:
        """Evaluate the model that the run starts from; it is no step, and not saved."""
        assert self.evaluation is not None, "the checks ask for --eval.dataset"
        self._log_evaluation(0, self.evaluation.run(self.actor), steps=steps)

    def _evaluate(self, step: int, *, steps: int) -> None:
        """Evaluate where that is due, log it, and save the step where it is the best so far."""
        per_epoch = len(self.rows) // self.config.train.batch_size
        if self.evaluation is None or not self.evaluation.is_due(step, per_epoch=per_epoch, steps=steps):
            return
        metrics = self.evaluation.run(self.actor)
        self._log_evaluation(step, metrics, steps=steps)
        if self.best.improves(metrics) and not self.config.ckpt.disable_ds:
            self._save(step, best=True)

    def _log_evaluation(self, step: int, metrics: dict[str, float], *, steps: int) -> None:
        if self.strategy.is_rank_0():
            self.trackers.log_eval(step, metrics)
            self.folder.metrics(step, metrics)
            shown = "  ".join(f"{name} {value:.3f}" for name, value in metrics.items() if value or "rows" not in name)
            self.console.print(f"{self.folder.name} step {step}/{steps}  {shown}")

    def _log_probs(self, batch: SFTBatch, device: Any) -> tuple[torch.Tensor, torch.Tensor | float]:
        """Return the log-probs of loss tokens, and the load-balancing loss of experts where it is asked for, else 0."""
        balanced = self.config.model.aux_loss_coef > 0
        returned = self.actor(
            batch.sequences.to(device),
            batch.loss_mask.to(device),
            attention_mask=batch.attention_mask.to(device),
            return_output=balanced,
            ring_attn_group=self.strategy.ring_attn_group,
            media=batch.media,
        )
        if not balanced:
            return returned, 0.0
        log_probs, output = returned
        return log_probs, output.aux_loss

    def _log(self, step: int, steps: int, *, loss: float, tokens: int, seconds: float) -> None:
        if not self.strategy.is_rank_0():
            return
        engine = self.actor.model
        values = {
            "loss": loss,
            "lr": engine.get_lr()[0],
            "grad_norm": self.strategy.get_grad_norm(self.actor),
            "tokens_per_second": tokens / seconds,
            "seconds_per_step": seconds,
            "overlong_rows": self.skipped,
        }
        self.folder.metrics(step, values)
        if step % self.config.logger.logging_steps == 0 or step == steps:
            self.trackers.log(step, values)
            self.console.print(
                f"{self.folder.name} step {step}/{steps}  loss {loss:.3f}  lr {values['lr']:.2e}  {seconds:.2f} s"
            )

    def _save(self, step: int, *, best: bool = False) -> None:
        """Save a checkpoint; the best one stays until another is better, whatever `--ckpt.max_num` says."""
        ckpt, folder = self.config.ckpt, str(checkpoint_folder(self.config))
        tag = f"best_global_step{step}" if best else f"global_step{step}"
        # Before the checkpoint, so that one that is whole has a whole copy.
        if ckpt.save_hf:
            self.strategy.save_model(self.actor, self.processor, f"{folder}/{tag}_hf")
        self.strategy.save_ckpt(
            self.actor.model,
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
