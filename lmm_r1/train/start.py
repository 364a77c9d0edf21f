"""The frame of every training: its checkpoint, its sizes, its plan, its folder, and the block in which it runs.

A fingerprint identifies the run of checkpoints: its models, its rows and the settings that decide its outcome.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

from rich.console import Console

from lmm_r1 import dotted
from lmm_r1.checkpoints import model_digest
from lmm_r1.config import (
    PPOConfig,
    SupervisedConfig,
    checkpoint_folder,
    model_path,
    model_paths,
    sized_ppo,
    sized_supervised,
    to_yaml,
    unplanned,
)
from lmm_r1.config.resolve import settings_of_the_run
from lmm_r1.data.messages import Row
from lmm_r1.data.training_rows import AnyRow, KeptRows, blend, dataset_paths, rows_digest
from lmm_r1.errors import UserError
from lmm_r1.files.json_files import write_json_object
from lmm_r1.lmm_kits import Checkpoint
from lmm_r1.lmm_kits.checkpoint import check_embeddings, check_pixel_bounds, check_weights
from lmm_r1.models.load_balancing import check_balanced
from lmm_r1.models.packed.sequence_parallel import check_heads
from lmm_r1.models.rope_scaling import check_rope, tell_factors
from lmm_r1.records.metrics import Callbacks
from lmm_r1.records.run_folder import ERROR_FILE, RunFolder
from lmm_r1.records.trackers import Trackers
from lmm_r1.train.first_checks import FINGERPRINT_FILE, check_output, has_checkpoints, left_by_a_run, training_datasets
from lmm_r1.train.publication import publish
from lmm_r1.train.stopping import StopRequests, reported_ends
from remote_rm.redaction import hidden_settings

Config = TypeVar("Config", bound=PPOConfig | SupervisedConfig)
T = TypeVar("T")
# Further differences are only counted.
_SHOWN = 4


Plan: TypeAlias = Callable[..., Any]
"""Returns settings with what was open chosen by memory, the same in every process, and prints it; see `planning.choices.planned`."""


def say(*lines: str | None) -> None:
    """Print the lines that there are, in one process of a run."""
    console = Console(highlight=False, markup=False, soft_wrap=True, quiet=not is_first())
    for line in filter(None, lines):
        console.print(line)


def is_first() -> bool:
    """Return whether this process acts for all those of a run."""
    return os.environ.get("RANK", "0") == "0"


def model_flag(config: PPOConfig | SupervisedConfig) -> str:
    """Return the flag of the trained model with its value, for messages."""
    return f"--{'actor' if isinstance(config, PPOConfig) else 'model'}.model_name_or_path {model_path(config)}"


def opened(config: PPOConfig | SupervisedConfig, *, chat_template: str | None = None) -> Checkpoint:
    """Return the checkpoint that a run trains; raises UserError if it cannot be trained with these flags."""
    path, model = model_path(config), model_flag(config)
    checkpoint = Checkpoint(path, trust_remote_code=config.train.trust_remote_code, chat_template=chat_template)
    # Missing parts of a checkpoint are reported in this order: kit, processor, weights.
    _ = checkpoint.kit, checkpoint.processor
    check_weights(path)
    check_embeddings(checkpoint)
    check_lengths(config, checkpoint, model=model)
    flag = "actor.aux_loss_coef" if isinstance(config, PPOConfig) else "model.aux_loss_coef"
    coef: Any = dotted.get(config, flag)
    check_balanced(checkpoint.config, kit=checkpoint.kit, coef=coef, flag=flag, model=model)
    check_pixel_bounds(config.data, checkpoint, model=model, prefix="--data.")
    return checkpoint


def check_lengths(config: PPOConfig | SupervisedConfig, checkpoint: Checkpoint, *, model: str) -> None:
    """Raise UserError if a model's sequences cannot be split as the flags say, or not be as long."""
    check_heads(checkpoint.config, size=config.ds.ulysses_size, model=model)
    check_rope(checkpoint.config, model=model)


def blended_rows(config: PPOConfig | SupervisedConfig, load: Callable[[str], KeptRows[T]]) -> KeptRows[T]:
    """Return the rows that a run trains on, blended from its datasets; raises UserError if they are too few for a step.

    Args:
        load: returns the rows of one dataset.
    """
    flag, kind, size = "data.dataset", "rows", "train.batch_size"
    if isinstance(config, PPOConfig):
        flag, kind, size = "data.prompt_dataset", "prompts", "rollout.batch_size"
    paths, probabilities = training_datasets(config)
    lists = [load(path) for path in paths]
    rows = blend(lists, probabilities, seed=config.train.seed)[: config.data.max_samples]
    least: Any = dotted.get(config, size)
    if len(rows) < least:
        raise UserError(
            f"--{flag} {dotted.get(config, flag)} gives {len(rows)} {kind}, fewer than --{size} {least}; lower it or add rows"
        )
    return KeptRows.blended(rows, lists)


def evaluation_rows(config: PPOConfig | SupervisedConfig, load: Callable[[str], KeptRows[T]]) -> KeptRows[T]:
    """Return the rows of `--eval.dataset`; none without it."""
    paths = dataset_paths(config.eval.dataset, flag="--eval.dataset") if config.eval.dataset else ()
    lists = [load(path) for path in paths]
    return KeptRows.blended((row for part in lists for row in part), lists)


def sized(config: Config, *, rows: int) -> Config:
    """Return the settings with the sizes that were left open, and print them; raises UserError for too few rows."""
    size: Any = sized_ppo
    if isinstance(config, SupervisedConfig):
        size = partial(sized_supervised, processes=int(os.environ["WORLD_SIZE"]))
    config, sizes = size(config, rows=rows)
    say(sizes)
    return config


@dataclass(frozen=True, kw_only=True)
class Frame(Generic[Config]):
    """A run whose folder is open."""

    config: Config
    """With nothing open."""
    checkpoint: Checkpoint
    """The model that is trained."""
    strategy: Any
    """Of the ranks of a supervised run; RL has workers."""
    folder: RunFolder
    stops: StopRequests
    trackers: Trackers
    """Those of the process that logs; they continue their earlier runs if the run is resumed."""
    steps: int = 0
    """Updates of a supervised run, which the schedule of the learning rate covers."""


@contextmanager
def framed(
    config: Config,
    checkpoint: Checkpoint,
    *,
    kind: str,
    rows: KeptRows[Any],
    held_out: KeptRows[Any],
    shown: Sequence[Row],
    plan: Plan | None,
    callbacks: Callbacks,
    processes: Callable[[Config], AbstractContextManager[Any]],
) -> Iterator[Frame[Config]]:
    """Plan a run, open its folder for the block, and publish its model after it.

    Raises UserError, before anything is written, for a run that must not begin; RunStopped and UserError if it ends early.

    Args:
        shown: conversations of the rows, for the plan.
        plan: None leaves nothing to memory.
        processes: joins the processes of the run and yields their strategy; the folder is changed only after that.
    """
    tell_factors(checkpoint.config, max_len=config.data.max_len, flag="--data.max_len")
    flag = "data.prompt_dataset" if isinstance(config, PPOConfig) else "data.dataset"
    fingerprint, first = Fingerprint.of(config, models=model_paths(config), rows={flag: rows}), is_first()
    console = Console(highlight=False, quiet=not first)
    config = unplanned(config) if plan is None else plan(config, console=console, rows=shown)
    check_start(config, fingerprint)
    path, name, origins = Path(config.ckpt.output_dir), config.logger.stage_name, rows.origins | held_out.origins
    folder, resumed = RunFolder(path=path, name=name, kind=kind, origins=origins, callbacks=callbacks), False
    with (
        StopRequests() as stops,
        folder.locked() if first else nullcontext(),
        reported_ends(stops, folder=path),
        processes(config) as joined,
    ):
        if first:
            resumed = open_run(config, fingerprint, folder=folder)
            folder.left_out([*rows.left_out, *held_out.left_out])
        with folder.session() if first else nullcontext(), _trackers(config, folder, resumed=resumed) as trackers:
            yield Frame(
                config=config,
                checkpoint=checkpoint,
                strategy=joined,
                folder=folder,
                stops=stops,
                trackers=trackers,
            )
    if first:
        publish(config, path)


def _trackers(config: PPOConfig | SupervisedConfig, folder: RunFolder, *, resumed: bool) -> Trackers:
    if not is_first() or not config.logger.trackers:
        return Trackers()
    from lmm_r1.records.tracker_backends import open_trackers

    return open_trackers(config, folder=folder.path, resumed=resumed)


def check_start(config: PPOConfig | SupervisedConfig, fingerprint: Fingerprint) -> None:
    """Raise UserError as `check_output` does, and if the folder has checkpoints of another run; writes nothing."""
    check_output(config)
    checkpoints = checkpoint_folder(config)
    if config.ckpt.overwrite or not has_checkpoints(checkpoints):
        return
    check_same_run(fingerprint, checkpoints)
    if not config.ckpt.load_enable:
        raise UserError(
            f"--ckpt.no_load_enable: {checkpoints} holds checkpoints of this run; give --ckpt.overwrite to delete them "
            "and train anew, or another --ckpt.output_dir"
        )


def open_run(config: PPOConfig | SupervisedConfig, fingerprint: Fingerprint, *, folder: RunFolder) -> bool:
    """Prepare the run's folder, after `check_start`, and return whether there are checkpoints to resume from.

    With `--ckpt.overwrite`, the files of an earlier run are deleted. Only one process of a run may call this.
    """
    checkpoints = checkpoint_folder(config)
    # The error of an earlier session.
    (folder.path / ERROR_FILE).unlink(missing_ok=True)
    if config.ckpt.overwrite:
        for path in left_by_a_run(folder.path, checkpoints):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    resumes = has_checkpoints(checkpoints)
    if not resumes:
        # Steps of a session that ended before its first checkpoint are repeated.
        folder.clear_records()
        if not config.ckpt.disable_ds:
            fingerprint.write(checkpoints)
    # The saved settings must not delete this run when they are used again.
    folder.open(to_yaml(dotted.replace(config, {"ckpt.overwrite": False})))
    return resumes


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """What identifies a run: it is the same in all of its sessions."""

    models: Mapping[str, str]
    """The digest of each checkpoint that the run starts from, or its hub name, by flag."""
    rows: Mapping[str, str]
    """The number and the digest of the rows, by flag."""
    settings: Mapping[str, object]
    """The settings of `settings_of_the_run`, by flag."""

    @classmethod
    def of(
        cls, config: PPOConfig | SupervisedConfig, *, models: Mapping[str, str], rows: Mapping[str, Sequence[AnyRow]]
    ) -> Fingerprint:
        """Return the fingerprint of a run.

        Args:
            models: the path of each model by its flag.
            rows: the blended rows by their flag.
        """
        return cls(
            models={flag: model_digest(path) for flag, path in models.items()},
            rows={flag: rows_digest(part) for flag, part in rows.items()},
            settings=settings_of_the_run(config),
        )

    def write(self, folder: Path) -> None:
        """Write the fingerprint to the folder of the checkpoints."""
        write_json_object(folder / FINGERPRINT_FILE, dataclasses.asdict(self))

    def differences(self, earlier: Fingerprint) -> list[str]:
        """Return a phrase for each difference to an earlier run; flags that only one of them has are left out."""
        phrases = [
            f"--{flag} is another model"
            for flag in sorted(self.models.keys() | earlier.models.keys())
            if self.models.get(flag) != earlier.models.get(flag)
        ]
        phrases += [
            f"--{flag} gives other rows ({earlier.rows.get(flag, 'none')} there, {digest} here)"
            for flag, digest in self.rows.items()
            if digest != earlier.rows.get(flag)
        ]
        phrases += [
            f"--{flag} {_shown(hidden_settings(earlier.settings[flag], name=flag))} there, {_shown(value)} here"
            for flag, value in self.settings.items()
            # Earlier versions wrote secrets.
            if flag in earlier.settings and hidden_settings(earlier.settings[flag], name=flag) != value
        ]
        return phrases


def read_fingerprint(folder: Path) -> Fingerprint | None:
    """Return the fingerprint of the checkpoints in a folder, None if there is none; raises UserError if it is damaged."""
    path = folder / FINGERPRINT_FILE
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return Fingerprint(models=content["models"], rows=content["rows"], settings=content["settings"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: cannot be read ({error!r}); give another --ckpt.output_dir") from error


def check_same_run(fingerprint: Fingerprint, folder: Path) -> None:
    """Raise UserError, naming what differs, unless the checkpoints in a folder are of the run with this fingerprint."""
    earlier = read_fingerprint(folder)
    ways = "give another --ckpt.output_dir, or --ckpt.overwrite to delete them and train anew here"
    if earlier is None:
        raise UserError(
            f"{folder} holds checkpoints that do not say of which run they are (no {FINGERPRINT_FILE}); {ways}. "
            "lmm-r1 merge makes a model of one, to start from"
        )
    phrases = fingerprint.differences(earlier)
    if phrases:
        more = f"; and {len(phrases) - _SHOWN} more" if len(phrases) > _SHOWN else ""
        raise UserError(
            f"{folder} holds checkpoints of another run: {'; '.join(phrases[:_SHOWN])}{more}; to continue that run, give "
            f"what it has there; else {ways}"
        )


def _shown(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
