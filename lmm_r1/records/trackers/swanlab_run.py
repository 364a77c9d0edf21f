"""SwanLab: a run on its server, or offline in the run folder."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

import swanlab

from lmm_r1.records.trackers.tracker import (
    EVAL_PREFIX,
    GENERATIONS,
    IMAGES,
    TRAIN_PREFIX,
    Generation,
    Session,
    markdown,
    shown_images,
    table,
)


class SwanlabRun:
    """One run."""

    replaces_repeats = False

    def __init__(self, run: swanlab.Run) -> None:
        self.identity = run.id
        self._run = run

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({f"{TRAIN_PREFIX}{name}": value for name, value in values.items()}, step=step)

    def log_eval(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({f"{EVAL_PREFIX}{name}": value for name, value in values.items()}, step=step)

    def log_generations(self, step: int, samples: Sequence[Generation]) -> None:
        columns, rows = table(step, samples)
        texts = [swanlab.Text(markdown(columns, [row]), caption=f"sample {index}") for index, row in enumerate(rows)]
        shown: dict[str, object] = {GENERATIONS: texts}
        images = [swanlab.Image(str(image.path), caption=image.caption) for image in shown_images(samples)]
        if images:
            shown[IMAGES] = images
        self._run.log(shown, step=step)

    def close(self, *, failed: bool) -> None:
        self._run.finish(state="crashed", error="training stopped") if failed else self._run.finish()


def open_tracker(session: Session) -> SwanlabRun:
    """Return a new run, or the earlier one to go on with."""
    settings, shared = session.logger.swanlab, session.logger.wandb
    run = swanlab.init(
        workspace=settings.workspace,
        project=settings.project or shared.project,
        group=shared.group,
        name=shared.run_name,
        id=session.earlier or secrets.token_hex(8),
        resume="allow",
        mode=settings.mode,
        log_dir=str(session.folder / "swanlog"),
        config=dict(session.settings),
        # A missing or refused key is an error, and no question to whoever may not be there.
        settings=swanlab.Settings(interactive=False, **({"api_key": settings.key} if settings.key else {})),
    )
    return SwanlabRun(run)
