"""Supervised fine-tuning on conversations with and without images; the loss covers assistant turns only."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from lmm_r1.config import SFTConfig, checkpoint_folder, to_openrlhf_args
from lmm_r1.config.rows import row_reading
from lmm_r1.data.files import read_row_file
from lmm_r1.data.messages import Row, demonstration
from lmm_r1.data.training_rows import blend, parse_dataset_spec
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits import Checkpoint, LmmKit
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
from lmm_r1.trainer.sft_samples import SFTBatch, SFTSample, batch_indices, collate, encode_sample, loss_turns
from lmm_r1.trainer.stopping import Progress, SaveSchedule, StopRequests, told_ends
from lmm_r1.trainer.strategy import KitStrategy, default_to_one_process, make_strategy

logger = logging.getLogger(__name__)


def train(config: SFTConfig) -> None:
    """Train on `--data.dataset` and write the model to `--ckpt.output_dir`; raises UserError for what the user gave."""
    folder = RunFolder(path=Path(config.ckpt.output_dir), name=config.logger.stage_name, kind="sft")
    path = _model_path(config)
    checkpoint = Checkpoint(path, trust_remote_code=config.train.trust_remote_code)
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
    rows = _load_rows(config)
    check_images_taken(rows, kit=kit, model=f"--model.model_name_or_path {path}")
    check_pixel_bounds(config.data, checkpoint, model=f"--model.model_name_or_path {path}", prefix="--data.")
    samples = (_encode(row, config, kit=kit, processor=processor) for row in rows)
    fitting = next((sample for sample in samples if sample is not None), None)
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
            config, fingerprint, kit=kit, processor=processor, rows=rows, fitting=fitting, folder=folder, stops=stops
        )


def _train(
    config: SFTConfig,
    fingerprint: Fingerprint,
    *,
    kit: LmmKit,
    processor: Any,
    rows: list[Row],
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
            kit=kit,
            processor=processor,
            rows=rows,
            folder=folder,
            fitting=fitting,
            stops=stops,
            trackers=trackers,
        )
        start = _resume(config, strategy, actor)
        if strategy.is_rank_0():
            folder.resume(start)
        run.fit(start=start, steps=steps)
        with stops.held():
            strategy.save_model(actor, processor, config.ckpt.output_dir)
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


def _load_rows(config: SFTConfig) -> list[Row]:
    assert config.data.dataset is not None, "required by config.resolve"
    paths, probabilities = parse_dataset_spec(config.data.dataset, config.data.dataset_probs)
    reading = row_reading(config.data, prefix="--data.")
    files = [
        read_row_file(path, split=config.data.dataset_split, reading=reading, answer_required=False) for path in paths
    ]
    # Every rank reads them, and one says so.
    console = Console(highlight=False, quiet=os.environ.get("RANK", "0") != "0")
    for file in files:
        console.print(file.told)
    row_lists = [[demonstration(row) for row in file.rows.values()] for file in files]
    rows = blend(row_lists, probabilities, seed=config.train.seed)[: config.data.max_samples]
    if len(rows) < config.train.batch_size:
        raise UserError(
            f"--data.dataset {config.data.dataset} gives {len(rows)} rows, fewer than "
            f"--train.batch_size {config.train.batch_size}; lower it or add rows"
        )
    for row in rows:
        loss_turns(row, every_turn=config.data.multiturn)
    return rows


def _encode(row: Row, config: SFTConfig, *, kit: LmmKit, processor: Any) -> SFTSample | None:
    data = config.data
    return encode_sample(row, kit=kit, processor=processor, max_len=data.max_len, every_turn=data.multiturn)


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
        # DeepSpeed counts micro-batches, so one without a row that fits is filled with a row that teaches nothing.
        self.filler = replace(fitting, loss_mask=[False] * len(fitting.loss_mask))
        self.console = Console(highlight=False, quiet=not strategy.is_rank_0())
        self.skipped = 0
        self.stops = stops or StopRequests()
        self.schedule = SaveSchedule.of(config.ckpt)
        self.step = self.saved_step = 0

    def fit(self, *, start: int, steps: int) -> None:
        """Run the updates `start` to `steps`; each sees the same rows whether or not the run was interrupted.

        Ctrl-C and SIGTERM end it after an update, which is saved.
        """
        self.actor.train()
        self.step = self.saved_step = start
        self.stops.progress = partial(self._progress, steps)
        if start:
            self.console.print(f"{self.folder.name} resumed at step {start}/{steps}")
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

    def _micro_batches(self, step: int) -> list[SFTBatch]:
        """Return this rank's micro-batches of an update; rows too long for `max_len` are left out and counted."""
        train = self.config.train
        indices = batch_indices(
            num_rows=len(self.rows),
            batch_size=train.batch_size,
            seed=train.seed,
            step=step,
            keep_order=self.config.data.keep_order,
        )
        share = self.strategy.ds_device_mesh["dp"]
        rows = [self.rows[index] for index in indices[share.get_local_rank() :: share.size()]]
        samples = [_encode(row, self.config, kit=self.kit, processor=self.processor) for row in rows]
        self.skipped += samples.count(None)
        parts = [samples[i : i + train.micro_batch_size] for i in range(0, len(samples), train.micro_batch_size)]
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

    def _save(self, step: int) -> None:
        ckpt, folder = self.config.ckpt, str(checkpoint_folder(self.config))
        # Before the checkpoint, so that one that is whole has a whole copy.
        if ckpt.save_hf:
            self.strategy.save_model(self.actor, self.processor, f"{folder}/global_step{step}_hf")
        self.strategy.save_ckpt(
            self.actor.model, folder, f"global_step{step}", ckpt.max_num, ckpt.max_mem, {"global_step": step}
        )
        self.saved_step = step
        self.schedule.note_saved()
