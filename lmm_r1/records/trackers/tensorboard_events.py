"""TensorBoard: event files in a folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image
from torch.utils.tensorboard import SummaryWriter

from lmm_r1.records.trackers.tracker import (
    EVAL_PREFIX,
    GENERATIONS,
    IMAGES,
    TRAIN_PREFIX,
    Generation,
    Session,
    captioned_images,
    markdown,
    table,
)


class TensorboardEvents:
    """Event files of one run, one file per session."""

    replaces_repeats = True

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.identity = str(folder)
        self._writer: SummaryWriter | None = None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._scalars(step, values, prefix=TRAIN_PREFIX)

    def log_eval(self, step: int, values: Mapping[str, float]) -> None:
        self._scalars(step, values, prefix=EVAL_PREFIX)

    def log_generations(self, step: int, samples: Sequence[Generation]) -> None:
        writer = self._at(step)
        writer.add_text(GENERATIONS, markdown(*table(step, samples)), step)
        # A tag shows one image per step, so that each image gets a tag of its own.
        for number, (path, caption) in enumerate(captioned_images(samples)):
            with Image.open(path) as image:
                pixels = np.asarray(image.convert("RGB"))  # (H, W, 3)
            writer.add_image(f"{IMAGES}/{number}_{caption.replace(' ', '_')}", pixels, step, dataformats="HWC")
        writer.flush()

    def close(self, *, failed: bool) -> None:
        if self._writer is not None:
            self._writer.close()

    def _scalars(self, step: int, values: Mapping[str, float], *, prefix: str) -> None:
        writer = self._at(step)
        for name, value in values.items():
            writer.add_scalar(f"{prefix}{name}", value, step)
        # The writer's own thread would keep them for two minutes, and a killed run would lose them.
        writer.flush()

    def _at(self, step: int) -> SummaryWriter:
        if self._writer is None:
            # What an interrupted session wrote from this step on gives way to what follows.
            self._writer = SummaryWriter(self.identity, purge_step=step)
        return self._writer


def open_tracker(session: Session) -> TensorboardEvents:
    """Return the event files of `--logger.tensorboard_dir`, by default in the run folder, under the run's name."""
    if session.earlier is not None:
        return TensorboardEvents(Path(session.earlier))
    logger = session.logger
    parent = Path(logger.tensorboard_dir) if logger.tensorboard_dir else session.folder / "tensorboard"
    return TensorboardEvents((parent / logger.wandb.run_name).absolute())
