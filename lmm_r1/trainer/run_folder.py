"""What a stage writes while it runs: its settings, metrics, sampled rollouts and, at the very end, stage.json."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from io import BytesIO
from pathlib import Path
from typing import Any

from lmm_r1.data.images import load_image
from lmm_r1.data.messages import ImagePart, Message
from lmm_r1.errors import UserError

STAGE_FILE = "stage.json"


@dataclass(kw_only=True)
class RunFolder:
    """Append-only records of one stage; a resumed run continues them."""

    path: Path
    name: str
    kind: str
    started: float = field(default_factory=time.time)

    def open(self, settings_yaml: str) -> None:
        """Create the folder and write the resolved settings; raises UserError when the stage is finished."""
        if (self.path / STAGE_FILE).exists():
            raise UserError(
                f"--ckpt.output_dir {self.path}: this stage is finished ({STAGE_FILE} is there); "
                "choose another folder or remove this one"
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path / "run_config.yaml", settings_yaml)
        except OSError as error:
            raise UserError(f"--ckpt.output_dir {self.path}: cannot be written ({error.strerror})") from error

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Append one step's metrics; values that are not numbers are left out."""
        numbers = {name: float(value) for name, value in values.items() if isinstance(value, int | float)}
        self._append("metrics.jsonl", {"step": step, "seconds": round(time.time() - self.started, 3), **numbers})

    def rollout(self, record: Mapping[str, Any], *, messages: tuple[Message, ...], location: str) -> None:
        """Append one sampled response with its prompt; the prompt's images are kept once each under images/."""
        self._append("rollouts.jsonl", {**record, "messages": [self._message(item, location) for item in messages]})

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
        write_atomically(self.path / STAGE_FILE, json.dumps(stage, indent=2) + "\n")

    def _append(self, file: str, record: Mapping[str, Any]) -> None:
        with (self.path / file).open("a") as stream:
            stream.write(json.dumps(record) + "\n")

    def _message(self, message: Message, location: str) -> dict[str, Any]:
        parts: list[dict[str, Any]] = []
        for part in message.parts:
            if isinstance(part, ImagePart):
                parts.append({"type": "image", "image": self._image(part, location)})
            else:
                parts.append({"type": "text", "text": part.text})
        return {"role": message.role, "content": parts}

    def _image(self, part: ImagePart, location: str) -> str:
        buffer = BytesIO()
        load_image(part, location=location).save(buffer, format="PNG")
        name = f"images/{hashlib.sha256(buffer.getvalue()).hexdigest()[:16]}.png"
        target = self.path / name
        if not target.exists():
            target.parent.mkdir(exist_ok=True)
            target.write_bytes(buffer.getvalue())
        return name


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that a reader, or a killed writer, never leaves half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(path)


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, tz=timezone.utc).isoformat(timespec="seconds")
