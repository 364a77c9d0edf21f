"""Trackio: a run in its store on this machine, or in a Hugging Face Space."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

import trackio

from lmm_r1.records.trackers.tracker import (
    EVAL_PREFIX,
    GENERATIONS,
    IMAGES,
    TRAIN_PREFIX,
    Generation,
    Session,
    shown_images,
    table,
)


class TrackioRun:
    """One run, which Trackio finds again by its name alone: a few digits behind it keep it apart from others."""

    replaces_repeats = False

    def __init__(self, run: trackio.Run) -> None:
        self.identity = run.name
        self._run = run

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({f"{TRAIN_PREFIX}{name}": value for name, value in values.items()}, step=step)

    def log_eval(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({f"{EVAL_PREFIX}{name}": value for name, value in values.items()}, step=step)

    def log_generations(self, step: int, samples: Sequence[Generation]) -> None:
        columns, rows = table(step, samples)
        shown: dict[str, object] = {GENERATIONS: trackio.Table(columns=columns, data=rows)}
        # A name holds one image.
        for number, image in enumerate(shown_images(samples)):
            shown[f"{IMAGES}/{number}"] = trackio.Image(image.path, caption=image.caption)
        self._run.log(shown, step=step)

    def close(self, *, failed: bool) -> None:
        """Send what is left; Trackio knows no failed runs."""
        trackio.finish()


def open_tracker(session: Session) -> TrackioRun:
    """Return a new run, or the earlier one to go on with."""
    settings, shared = session.logger.trackio, session.logger.wandb
    run = trackio.init(
        project=settings.project or shared.project,
        name=session.earlier or f"{shared.run_name}-{secrets.token_hex(2)}",
        group=shared.group,
        space_id=settings.space_id,
        config=dict(session.settings),
        resume="never" if session.earlier is None else "must",
        # In a notebook it would start a server and show it.
        embed=False,
    )
    return TrackioRun(run)
