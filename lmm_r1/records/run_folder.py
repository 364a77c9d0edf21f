"""What a stage writes while it runs: its settings, metrics, sampled rollouts and, at the very end, stage.json."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lmm_r1.data.messages import Message
from lmm_r1.errors import UserError
from lmm_r1.files.atomic import write_atomically, write_bytes_atomically
from lmm_r1.files.json_files import JsonLine, cut_torn_line, read_json_lines
from lmm_r1.records.metrics import METRICS_FILE, STEP, append_metrics, last_seconds
from lmm_r1.records.rollouts import IMAGES_FOLDER, ROLLOUTS_FILE, SampledResponse, append_rollout
from lmm_r1.records.stage import SETTINGS_FILE, STAGE_FILE, write_stage
from lmm_r1.records.trackers.record import TRACKERS_FILE

# What a step adds to.
_RECORDS = (METRICS_FILE, ROLLOUTS_FILE, IMAGES_FOLDER, TRACKERS_FILE)


@dataclass(kw_only=True)
class RunFolder:
    """Append-only records of one stage; a resumed run continues them."""

    path: Path
    name: str
    kind: str
    started: float = field(default_factory=time.time)
    """When the stage started; `open` moves it back by the time that earlier sessions of the same stage took."""

    def open(self, settings_yaml: str) -> None:
        """Create the folder, or take up the records of an interrupted stage, and write the resolved settings.

        A line that a killed session left half-written is cut off, so that the next one does not run into it.
        Raises UserError when the stage is finished.
        """
        self.check_unfinished(self.path)
        try:
            write_atomically(self.path / SETTINGS_FILE, text=settings_yaml)
        except UserError as error:
            raise UserError(f"--ckpt.output_dir: {error}") from error
        for file in (METRICS_FILE, ROLLOUTS_FILE):
            cut_torn_line(self.path / file)
        self.started -= last_seconds(self.path / METRICS_FILE)

    @staticmethod
    def check_unfinished(path: Path) -> None:
        """Raise UserError where a folder holds a finished stage."""
        if (path / STAGE_FILE).exists():
            raise UserError(
                f"--ckpt.output_dir {path}: this stage is finished ({STAGE_FILE} is there); "
                "choose another folder, or give --ckpt.overwrite to delete it and train anew"
            )

    @staticmethod
    def files(path: Path) -> list[Path]:
        """Return what a stage has written into its folder, models and checkpoints left out."""
        return [path / name for name in (*_RECORDS, SETTINGS_FILE, STAGE_FILE) if (path / name).exists()]

    def clear_records(self) -> None:
        """Forget the records of sessions that nothing is left of."""
        for name in _RECORDS:
            path = self.path / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def resume(self, step: int) -> None:
        """Cut off what was recorded of steps after `step`, the one that the run goes on from: they are made again."""
        before = last_seconds(self.path / METRICS_FILE)
        for file in (METRICS_FILE, ROLLOUTS_FILE):
            _cut_after(self.path / file, step=step)
        self.started += before - last_seconds(self.path / METRICS_FILE)

    def logged(self, step: int, *, prefix: str) -> dict[str, float]:
        """Return the metrics of a step whose names begin with `prefix`."""
        return {
            name: value
            for at, line in _step_lines(self.path / METRICS_FILE)
            if at == step and line.record
            for name, value in line.record.items()
            if name.startswith(prefix) and isinstance(value, int | float)
        }

    def metrics(self, step: int, values: Mapping[str, object]) -> None:
        """Append one step's metrics; values that are not numbers are left out."""
        append_metrics(self.path / METRICS_FILE, step=step, seconds=time.time() - self.started, values=values)

    def rollout(
        self, response: SampledResponse, *, messages: Sequence[Message], location: str
    ) -> list[dict[str, Any]]:
        """Append one sampled response with its prompt, and return the prompt as it is written.

        The prompt's images are kept once each under images/.
        """
        return append_rollout(self.path, response, messages=messages, location=location)

    def finish(self, *, steps: int) -> None:
        """Mark the stage as finished; nothing of it is written after this."""
        write_stage(self.path, name=self.name, kind=self.kind, steps=steps, started=self.started, finished=time.time())


def _step_lines(path: Path) -> Iterator[tuple[int, JsonLine]]:
    """Yield the lines of a file with their steps; raises UserError for a line that is of no step."""
    for line in read_json_lines(path) if path.exists() else ():
        record: Any = line.record
        try:
            step = int(record[STEP])
        except (ValueError, KeyError, TypeError) as error:
            shown = line.raw[:80].decode(errors="replace")
            raise UserError(f"{line.place}: no record of a step ({shown}); repair or delete it") from error
        yield step, line


def _cut_after(path: Path, *, step: int) -> None:
    """Drop the records of steps after `step`, all at once."""
    lines = list(_step_lines(path))
    kept = [line.raw for at, line in lines if at <= step]
    if len(kept) < len(lines):
        write_bytes_atomically(path, data=b"".join(kept))
