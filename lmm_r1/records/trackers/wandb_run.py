"""Weights & Biases: a run on its server, or offline in the run folder."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

# No reports about wandb's own errors to its maker, unless the user wants them; read when wandb is imported.
os.environ.setdefault("WANDB_ERROR_REPORTING", "false")

import wandb

from lmm_r1.records.trackers.tracker import (
    EVAL_PREFIX,
    GENERATIONS,
    IMAGES,
    TRAIN_PREFIX,
    Generation,
    Session,
    ShownImage,
    shown_images,
    table,
)

STEP = "global_step"


class WandbRun:
    """One run; its own step is the training step, so that all logs of a step are one row."""

    replaces_repeats = False

    def __init__(self, run: wandb.Run) -> None:
        self.identity = run.id
        self._run = run
        for prefix in (TRAIN_PREFIX, EVAL_PREFIX):
            # As OpenRLHF names them.
            run.define_metric(f"{prefix}{STEP}")
            run.define_metric(f"{prefix}*", step_metric=f"{prefix}{STEP}")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._log(step, {f"{TRAIN_PREFIX}{name}": value for name, value in {**values, STEP: step}.items()})

    def log_eval(self, step: int, values: Mapping[str, float]) -> None:
        self._log(step, {f"{EVAL_PREFIX}{name}": value for name, value in {**values, STEP: step}.items()})

    def log_generations(self, step: int, samples: Sequence[Generation]) -> None:
        columns, rows = table(step, samples)
        shown: dict[str, object] = {
            f"{TRAIN_PREFIX}{STEP}": step,
            GENERATIONS: wandb.Table(columns=[*columns], data=rows),
        }
        # Beside the table, and not in it: wandb keeps a table's images outside the run's folder.
        images = [
            wandb.Image(str(image.path), caption=image.caption, boxes=_boxes(image)) for image in shown_images(samples)
        ]
        if images:
            shown[IMAGES] = images
        self._log(step, shown)

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=1 if failed else 0)

    def _log(self, step: int, values: Mapping[str, object]) -> None:
        self._run.log(dict(values), step=step)


def _boxes(image: ShownImage) -> dict[str, Any] | None:
    """What was cut out of an image, in the form that wandb draws; None where nothing was."""
    if not image.cuts:
        return None
    data = [
        {
            "position": {"minX": left, "minY": upper, "maxX": right, "maxY": lower},
            "class_id": 0,
            "box_caption": f"cut {number}",
        }
        for number, (left, upper, right, lower) in enumerate(image.boxes, start=1)
    ]
    return {"cuts": {"box_data": data, "class_labels": {0: "cut"}}}


def open_tracker(session: Session) -> WandbRun:
    """Return a new run, or the earlier one to go on with."""
    settings = session.logger.wandb
    run = wandb.init(
        entity=settings.org,
        project=settings.project,
        group=settings.group,
        name=settings.run_name,
        id=session.earlier or secrets.token_hex(4),
        resume="allow",
        mode=settings.mode,
        dir=str(session.folder),
        config=dict(session.settings),
        # A resumed run may have other flags than before.
        allow_val_change=True,
        # In the settings, as wandb.login would write it to ~/.netrc.
        settings=wandb.Settings(api_key=settings.key) if settings.key else None,
    )
    return WandbRun(run)
