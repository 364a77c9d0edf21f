"""TensorBoard: event files in a folder."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
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
    ShownImage,
    markdown,
    shown_images,
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
        for tag, image in _tagged(shown_images(samples)):
            _add_image(writer, f"{IMAGES}/{tag}", image, step=step)
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


def _tagged(images: Sequence[ShownImage]) -> Iterator[tuple[str, ShownImage]]:
    """Yield images with tags of their own, as a tag shows one image per step; every step has the same for the same place."""
    of_prompts = itertools.count()
    of_turns: Counter[str] = Counter()
    for image in images:
        name = image.caption.replace(",", "").replace(" ", "_")
        if image.turn is None:
            yield f"{next(of_prompts)}_{name}", image
        else:
            of_turns[name] += 1
            yield name if of_turns[name] == 1 else f"{name}_{of_turns[name]}", image


def _add_image(writer: SummaryWriter, tag: str, shown: ShownImage, *, step: int) -> None:
    """Add an image with the boxes of what was cut out of it."""
    with Image.open(shown.path) as image:
        pixels = np.asarray(image.convert("RGB"))  # (H, W, 3)
    if shown.cuts:
        height, width, _ = pixels.shape
        boxes = np.asarray(shown.boxes) * (width, height, width, height)  # (N, 4)
        writer.add_image_with_boxes(tag, pixels, boxes, step, dataformats="HWC")
    else:
        writer.add_image(tag, pixels, step, dataformats="HWC")


def open_tracker(session: Session) -> TensorboardEvents:
    """Return the event files of `--logger.tensorboard_dir`, by default in the run folder, under the run's name."""
    if session.earlier is not None:
        return TensorboardEvents(Path(session.earlier))
    logger = session.logger
    parent = Path(logger.tensorboard_dir) if logger.tensorboard_dir else session.folder / "tensorboard"
    return TensorboardEvents((parent / logger.wandb.run_name).absolute())
