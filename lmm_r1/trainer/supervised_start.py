"""What stands around the loop of every supervised trainer: checks of the model, the processes' group, the run's folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import torch.distributed as dist
from rich.console import Console

from lmm_r1.config import SupervisedConfig, checkpoint_folder, to_openrlhf_args
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
from lmm_r1.trainer.run_start import AnyRow, Fingerprint, check_start, open_run
from lmm_r1.trainer.stopping import StopRequests, told_ends
from lmm_r1.trainer.strategy import KitStrategy, default_to_one_process, make_strategy
from lmm_r1.trainer.supervised import SupervisedRun
from lmm_r1.trainer.supervised_rows import Rows, chat_template

RunT = TypeVar("RunT", bound=SupervisedRun)


def model_path(config: SupervisedConfig) -> str:
    """Return the checkpoint that the run trains."""
    path = config.model.model_name_or_path
    assert path is not None, "required by config.resolve"
    return path


def opened(config: SupervisedConfig) -> Checkpoint:
    """Return the checkpoint that the run trains; raises UserError where it cannot be trained as the flags say."""
    path = model_path(config)
    checkpoint = Checkpoint(
        path, trust_remote_code=config.train.trust_remote_code, chat_template=chat_template(config)
    )
    model = f"--model.model_name_or_path {path}"
    # What a checkpoint lacks is told in this order: a kit, a processor, weights.
    _ = checkpoint.kit, checkpoint.processor
    check_weights(path)
    check_heads(checkpoint.config, size=config.ds.ulysses_size, model=model)
    coef = config.model.aux_loss_coef
    check_balanced(checkpoint.config, coef=coef, flag="model.aux_loss_coef", model=model)
    check_rope(checkpoint.config, model=model)
    return checkpoint


def check_rows(config: SupervisedConfig, checkpoint: Checkpoint, rows: Sequence[Row]) -> None:
    """Raise UserError where the model cannot take the rows' images and videos, or their sizes."""
    model = f"--model.model_name_or_path {checkpoint.path}"
    check_images_taken(rows, kit=checkpoint.kit, model=model)
    check_pixel_bounds(config.data, checkpoint, model=model, prefix="--data.")


@dataclass(frozen=True, kw_only=True)
class Session:
    """A run between its start and its end, in each of its processes."""

    config: SupervisedConfig
    checkpoint: Checkpoint
    args: SimpleNamespace
    """The settings as OpenRLHF has them."""
    strategy: KitStrategy
    folder: RunFolder
    stops: StopRequests
    trackers: Trackers
    steps: int

    def made(self, run_class: Callable[..., RunT], actor: Any, *, rows: Rows, encode: Any, filler: Any) -> RunT:
        """Return a run of this session that needs nothing but what every run needs; the arguments are those of a run."""
        return run_class(
            self.config,
            self.strategy,
            actor,
            kit=self.checkpoint.kit,
            processor=self.checkpoint.processor,
            rows=rows,
            folder=self.folder,
            encode=encode,
            filler=filler,
            stops=self.stops,
            trackers=self.trackers,
        )

    def train(self, run: SupervisedRun) -> None:
        """Run the updates that are left, from the newest checkpoint where there is one, and write the model."""
        start = self._resume(run.engine)
        if self.strategy.is_rank_0():
            self.folder.resume(start)
        run.fit(start=start, steps=self.steps)
        run.finish()
        with self.stops.held():
            self.strategy.save_model(run.actor, self.checkpoint.processor, self.config.ckpt.output_dir)

    def _resume(self, engine: Any) -> int:
        """Load the newest checkpoint where asked to, and return the step to go on from."""
        if not self.config.ckpt.load_enable:
            return 0
        _, states = self.strategy.load_ckpt(engine, str(checkpoint_folder(self.config)))
        return states.get("global_step", 0)


@contextmanager
def session(
    config: SupervisedConfig,
    checkpoint: Checkpoint,
    *,
    kind: str,
    models: Mapping[str, str | None],
    rows: Sequence[AnyRow],
    shown: Sequence[Row],
) -> Iterator[Session]:
    """Start a run's processes and its folder, and finish both when what is inside has trained.

    Raises UserError, before anything is written, for a run that must not begin; RunStopped and UserError for how it ends.

    Args:
        kind: of the stage, as its stage.json says it.
        models: the paths of the models that the run starts from, by flag.
        rows: what is learned from.
        shown: conversations of the rows, of which the plan takes one with an image.
    """
    folder = RunFolder(path=Path(config.ckpt.output_dir), name=config.logger.stage_name, kind=kind)
    fingerprint = Fingerprint.of(config, models=models, rows={"data.dataset": rows})
    check_start(config, fingerprint)
    default_to_one_process()
    _check_processes(config, count=int(os.environ["WORLD_SIZE"]))
    _check_plan(config, shown)
    tell_factors(checkpoint.config, max_len=config.data.max_len, flag="--data.max_len")
    with StopRequests() as stops, told_ends(stops, folder=folder.path):
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
            yield Session(
                config=config,
                checkpoint=checkpoint,
                args=args,
                strategy=strategy,
                folder=folder,
                stops=stops,
                trackers=trackers,
                steps=steps,
            )
        if strategy.is_rank_0():
            folder.finish(steps=steps)
        dist.destroy_process_group()


def _check_processes(config: SupervisedConfig, *, count: int) -> None:
    size = config.ds.ulysses_size
    if count % size:
        raise UserError(f"--ds.ulysses_size {size} does not divide the {count} processes of this run")


def _check_plan(config: SupervisedConfig, rows: Sequence[Row]) -> None:
    """Raise UserError, on every rank, for a run that cannot fit; rank 0 says what it will take."""
    processes = int(os.environ["WORLD_SIZE"])
    console = Console(highlight=False, quiet=os.environ["RANK"] != "0")
    per_machine = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    check_sft_plan(config, console=console, processes=processes, per_machine=per_machine, rows=rows)


def load_settings(config: SupervisedConfig) -> dict[str, Any]:
    """Return how every model of a run is loaded, by the names of `LoadSettings`."""
    return {
        "attn_implementation": config.ds.attn_implementation,
        "param_dtype": config.ds.param_dtype,
        "packing_samples": config.ds.packing_samples,
        "experts_implementation": config.ds.experts_implementation,
        "trust_remote_code": config.train.trust_remote_code,
        "max_len": config.data.max_len,
        "load_in_4bit": config.ds.load_in_4bit,
        "use_liger_kernel": config.ds.use_liger_kernel,
    }


def trained_settings(config: SupervisedConfig, strategy: KitStrategy) -> dict[str, Any]:
    """Return how the model that is trained is loaded."""
    return {
        **load_settings(config),
        "ds_config": strategy.get_ds_train_config(),
        "lora_rank": config.ds.lora.rank,
        "lora_alpha": config.ds.lora.alpha,
        "lora_dropout": config.ds.lora.dropout,
        "target_modules": config.ds.lora.target_modules,
        "use_dora": config.ds.lora.use_dora,
        "use_rslora": config.ds.lora.use_rslora,
        "freeze_prefix": config.model.freeze_prefix,
    }


def prepare_trained(
    actor: KitActor, config: SupervisedConfig, args: SimpleNamespace, strategy: KitStrategy, *, steps: int
) -> KitActor:
    """Give a loaded model its optimizer under DeepSpeed; raises UserError where it does not run on packed sequences.

    Args:
        steps: over which the learning rate follows its schedule.
    """
    if config.model.gradient_checkpointing_enable:
        actor.gradient_checkpointing_enable({"use_reentrant": config.model.gradient_checkpointing_reentrant})
    actor, _, _ = strategy.prepare((actor, optimizer_settings(config, args, steps=steps)))
    check_packing(actor, group=strategy.ring_attn_group, longest=config.data.max_len)
    if config.model.aux_loss_coef:
        actor.balance_experts()
    return actor


def optimizer_settings(config: SupervisedConfig, args: SimpleNamespace, *, steps: int) -> dict[str, Any]:
    """Return the optimizer and its schedule over so many steps, as the strategy takes them."""
    return {
        "optim": config.optim,
        "muon": vars(args.muon),
        "adam": vars(args.adam),
        "lr_scheduler": config.lr_scheduler,
        "lr_warmup_ratio": config.lr_warmup_ratio,
        "min_lr_ratio": config.min_lr_ratio,
        "max_norm": config.max_norm,
        "scheduler_steps": steps,
    }
