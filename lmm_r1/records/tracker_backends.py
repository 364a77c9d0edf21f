"""The tracking services in one table: what each needs, and how it is opened and called."""

from __future__ import annotations

import html
import importlib.util
import os
import secrets
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmm_r1.config import PPOConfig, SupervisedConfig, without_secrets
from lmm_r1.config.shared import LoggerConfig, TrackerName
from lmm_r1.errors import UserError
from lmm_r1.files.json_files import read_json_object, write_json_object
from lmm_r1.files.user_code import load_user_function
from lmm_r1.records.trackers import (
    EVAL_PREFIX,
    FUNCTION,
    TRACKERS_FILE,
    TRAIN_PREFIX,
    Generation,
    Tracker,
    Trackers,
    table,
)

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


GENERATIONS = "train/generated_samples"
# As OpenRLHF names it in Weights & Biases.
STEP = "global_step"


@dataclass(frozen=True, kw_only=True)
class Session:
    logger: LoggerConfig
    folder: Path
    settings: Mapping[str, Any]
    """Every flag by its nested name, without keys of services."""
    earlier: str | None
    """`Tracker.identity` in the session that this one continues; None starts a new run."""


def _open_tensorboard(session: Session) -> Tracker:
    """Write event files to `--logger.tensorboard_dir`, by default in the run folder, one file per session."""
    from torch.utils.tensorboard import SummaryWriter

    parent = Path(session.logger.tensorboard_dir or session.folder / "tensorboard")
    folder = Path(session.earlier) if session.earlier else (parent / session.logger.wandb.run_name).absolute()
    folder.mkdir(parents=True, exist_ok=True)

    opened: list[SummaryWriter] = []

    def writer_at(step: int) -> SummaryWriter:
        if not opened:
            # What an interrupted session wrote from this step on is replaced by what follows.
            opened.append(SummaryWriter(str(folder), purge_step=step))
        return opened[0]

    def log(step: int, values: Mapping[str, float]) -> None:
        writer = writer_at(step)
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        # The writer's own thread would keep them for two minutes, and a killed run would lose them.
        writer.flush()

    def log_generations(step: int, samples: Sequence[Generation]) -> None:
        writer = writer_at(step)
        writer.add_text(GENERATIONS, markdown(*table(step, samples)), step)
        writer.flush()

    def close(failed: bool) -> None:
        for writer in opened:
            writer.close()

    return Tracker(identity=str(folder), log=log, log_generations=log_generations, close=close)


def markdown(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a table in Markdown; what a model wrote appears in it as text, never as markup."""

    def cell(value: object) -> str:
        text = "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
        return html.escape(text, quote=False).replace("|", "&#124;").replace("\n", "<br>")

    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(map(cell, line)) + " |" for line in lines)


def _open_wandb(session: Session) -> Tracker:
    """Start a run on the server, or offline in the run folder; its step is the training step."""
    # No reports about wandb's own errors to its maker, unless the user wants them; read when wandb is imported.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb

    settings = session.logger.wandb
    run = wandb.init(
        entity=settings.org,
        project=settings.project,
        group=settings.group,
        name=settings.run_name,
        id=session.earlier or secrets.token_hex(4),
        resume="allow",
        dir=str(session.folder),
        config=dict(session.settings),
        # A resumed run may have other flags than before.
        allow_val_change=True,
        # In the settings, because wandb.login would write it to ~/.netrc.
        settings=wandb.Settings(api_key=settings.key) if settings.key else None,
    )
    for prefix in (TRAIN_PREFIX, EVAL_PREFIX):
        run.define_metric(f"{prefix}{STEP}")
        run.define_metric(f"{prefix}*", step_metric=f"{prefix}{STEP}")

    def log(step: int, values: Mapping[str, object]) -> None:
        steps = {f"{name.partition('/')[0]}/{STEP}": step for name in values}
        run.log({**values, **steps}, step=step)

    def log_generations(step: int, samples: Sequence[Generation]) -> None:
        columns, rows = table(step, samples)
        log(step, {GENERATIONS: wandb.Table(columns=[*columns], data=rows)})

    return Tracker(
        identity=run.id,
        log=log,
        log_generations=log_generations,
        close=lambda failed: run.finish(exit_code=1 if failed else 0),
    )


OPENERS: dict[str, Callable[[Session], Tracker]] = {"tensorboard": _open_tensorboard, "wandb": _open_wandb}
"""By the name of the tracker, which is that of its library."""
assert tuple(OPENERS) == typing.get_args(TrackerName)


def _opener(name: str) -> Callable[[Session], Tracker]:
    """Return what opens a tracker, by its name or in a user's file; raises UserError for one that cannot be used."""
    return OPENERS.get(name) or load_user_function(name, default=FUNCTION, flag="--logger.trackers")


def check_trackers(logger: LoggerConfig) -> None:
    """Raise UserError for a tracker that is not installed, or an error in a user's file; loads no library."""
    for name in logger.trackers:
        _opener(name)
        if name in OPENERS and importlib.util.find_spec(name) is None:
            raise UserError(f"--logger.trackers {name}: {name} is not installed; pip install {name}, or leave it out")


def open_trackers(config: PPOConfig | SupervisedConfig, *, folder: Path, resumed: bool) -> Trackers:
    """Return the run's trackers, each of which continues its earlier run if the training is `resumed`."""
    logger = config.logger
    check_trackers(logger)
    path = folder / TRACKERS_FILE
    found = read_json_object(path) if resumed and path.exists() else {}
    identities = {name: one["identity"] for name, one in found.items() if isinstance(one, dict) and "identity" in one}
    opened: dict[str, Tracker] = {}
    for name in logger.trackers:
        session = Session(logger=logger, folder=folder, settings=without_secrets(config), earlier=identities.get(name))
        try:
            tracker = _opener(name)(session)
            if not isinstance(tracker, Tracker):
                raise TypeError(f"return a Tracker, not {type(tracker).__name__}")
            opened[name] = tracker
            identities[name] = tracker.identity
            write_json_object(path, {name: {"identity": identity} for name, identity in identities.items()})
        # Each library has errors of its own, and those of the network below it.
        except Exception as error:
            Trackers(opened).close(failed=True)
            raise UserError(f"--logger.trackers {name}: cannot start ({error}); correct it or leave it out") from error
    return Trackers(opened)
