"""What a stage writes while it runs: its settings, metrics, sampled rollouts and, at the very end, stage.json."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from io import BytesIO
from pathlib import Path
from typing import Any

from lmm_r1.data.images import load_image
from lmm_r1.data.messages import ImagePart, Message, VideoPart, describe_video
from lmm_r1.errors import UserError
from lmm_r1.files.atomic import write_atomically, write_bytes_atomically
from lmm_r1.files.json_lines import JsonLine, append_json_lines, cut_torn_line, last_line, read_json_lines
from lmm_r1.files.json_object import write_json_object

STAGE_FILE = "stage.json"
SETTINGS_FILE = "run_config.yaml"
METRICS_FILE = "metrics.jsonl"
ROLLOUTS_FILE = "rollouts.jsonl"
# What a step adds to.
_RECORDS = (METRICS_FILE, ROLLOUTS_FILE, "images", "trackers.json")


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
        self.started -= _last_seconds(self.path / METRICS_FILE)

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
        before = _last_seconds(self.path / METRICS_FILE)
        for file in (METRICS_FILE, ROLLOUTS_FILE):
            _cut_after(self.path / file, step=step)
        self.started += before - _last_seconds(self.path / METRICS_FILE)

    def logged(self, step: int, *, prefix: str) -> dict[str, float]:
        """Return the metrics of a step whose names begin with `prefix`."""
        return {
            name: value
            for at, line in _step_lines(self.path / METRICS_FILE)
            if at == step and line.record
            for name, value in line.record.items()
            if name.startswith(prefix)
        }

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Append one step's metrics; values that are not numbers are left out."""
        numbers = {name: float(value) for name, value in values.items() if isinstance(value, int | float)}
        record = {"step": step, "seconds": round(time.time() - self.started, 3), **numbers}
        append_json_lines(self.path / METRICS_FILE, [record])

    def rollout(
        self, record: Mapping[str, Any], *, messages: tuple[Message, ...], location: str
    ) -> list[dict[str, Any]]:
        """Append one sampled response with its prompt, and return the prompt as it is written.

        The prompt's images are kept once each under images/.
        """
        written = [self._message(item, location) for item in messages]
        append_json_lines(self.path / ROLLOUTS_FILE, [{**record, "messages": written}])
        return written

    def finish(self, *, steps: int) -> None:
        """Mark the stage as finished; nothing of it is written after this."""
        now = time.time()
        stage = {
            "name": self.name,
            "kind": self.kind,
            "steps": steps,
            "seconds": round(now - self.started, 1),
            "started_at": _iso(self.started),
            "finished_at": _iso(now),
        }
        write_json_object(self.path / STAGE_FILE, stage)

    def _message(self, message: Message, location: str) -> dict[str, Any]:
        parts: list[dict[str, Any]] = []
        for part in message.parts:
            if isinstance(part, ImagePart):
                parts.append({"type": "image", "image": self._image(part, location)})
            elif isinstance(part, VideoPart):
                parts.append({"type": "video", "video": describe_video(part)})
            else:
                parts.append({"type": "text", "text": part.text})
        return {"role": message.role, "content": parts}

    def _image(self, part: ImagePart, location: str) -> str:
        buffer = BytesIO()
        load_image(part, location=location).save(buffer, format="PNG")
        name = f"images/{hashlib.sha256(buffer.getvalue()).hexdigest()[:16]}.png"
        target = self.path / name
        if not target.exists():
            write_bytes_atomically(target, data=buffer.getvalue())
        return name


def _step_lines(path: Path) -> Iterator[tuple[int, JsonLine]]:
    """Yield the lines of a file with their steps; raises UserError for a line that is of no step."""
    for line in read_json_lines(path) if path.exists() else ():
        record: Any = line.record
        try:
            step = int(record["step"])
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


def _last_seconds(path: Path) -> float:
    """Return the `seconds` of the last line of a metrics file, 0 where there is none."""
    line = last_line(path)
    if not line:
        return 0.0
    try:
        return float(json.loads(line)["seconds"])
    except (ValueError, KeyError, TypeError) as error:
        shown = line.decode(errors="replace").strip()[:80]
        raise UserError(f"{path}: the last line holds no metrics ({shown}); repair or delete it") from error


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, tz=timezone.utc).isoformat(timespec="seconds")
