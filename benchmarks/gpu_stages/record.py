"""What was measured, in a JSON file that is whole after every result; failures are results, and kept ones are not repeated."""

from __future__ import annotations

import gc
import json
import math
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch

from lmm_r1.errors import UserError
from lmm_r1.files.json_files import read_json_object, write_json_object

Result: TypeAlias = dict[str, Any]
Save: TypeAlias = Callable[[Result], None]
"""Writes what a measurement has found so far; it counts as unfinished until the measurement returns."""

# Results of different ones cannot stand in one file.
IDENTITY = ("device", "scale")
MESSAGE_LENGTH = 600


@dataclass(frozen=True, kw_only=True)
class Task:
    """One measurement, by a name that is unique in its stage."""

    name: str
    measure: Callable[[Save], Result]


@dataclass(kw_only=True)
class Clock:
    """How long this process may still start measurements: none that, as the longest so far, would go beyond the end."""

    began: float
    """By `time.perf_counter`."""
    budget: float
    """Seconds from then on."""
    longest: float = 0.0

    def allows_more(self) -> bool:
        return time.perf_counter() + self.longest < self.began + self.budget

    def note(self, seconds: float) -> None:
        self.longest = max(self.longest, seconds)


class Record:
    """The file of all stages' results; without a path they are held in memory alone.

    Raises UserError where the file holds results of another device or scale.
    """

    def __init__(self, path: Path | None, *, header: Mapping[str, Any], again: bool) -> None:
        self.path = path
        self.again = again
        self.content: Result = {"benchmark": "gpu_check", **header, "stages": {}}
        if path is None or not path.exists():
            return
        before = read_json_object(path)
        for name in IDENTITY:
            if before.get(name) != header.get(name):
                raise UserError(
                    f"--output {path}: holds results of {name} {before.get(name)}, and this is {header.get(name)}; "
                    "name another file"
                )
        self.content["stages"] = before["stages"]

    def run(self, stage: str, tasks: Sequence[Task], *, clock: Clock) -> None:
        """Measure what the file does not hold yet, as long as the clock allows; what is left out stands in the file."""
        entry = self.content["stages"].setdefault(stage, {"results": {}, "left_out": []})
        results = entry["results"]
        waiting = [task for task in tasks if self.again or "unfinished" in results.get(task.name, ("unfinished",))]
        # What an earlier process did not come back from is tried again when all else is done.
        waiting.sort(key=lambda task: task.name in results and not self.again)
        entry["left_out"] = [task.name for task in waiting]
        entry.pop("note", None)
        self.write()
        for task in waiting:
            if not clock.allows_more():
                break
            began = time.perf_counter()
            results[task.name] = self._measured(stage, task)
            entry["left_out"].remove(task.name)
            results[task.name]["took_s"] = round(time.perf_counter() - began, 2)
            clock.note(time.perf_counter() - began)
            self.write()
            print(json.dumps({f"{stage}/{task.name}": results[task.name]}), file=sys.stderr, flush=True)
            if _context_is_lost():
                entry["note"] = "the device's context was lost by the last result; run the same command again"
                self.write()
                break

    def _measured(self, stage: str, task: Task) -> Result:
        """Return a task's result or its failure, with nothing left on the device of what failed."""

        def save(partial: Result) -> None:
            self.content["stages"][stage]["results"][task.name] = {"unfinished": True, **_plain(partial)}
            self.write()

        save({})
        try:
            result = _plain(task.measure(save))
        except Exception as error:  # whatever a kernel, a kit or a missing package raises is a finding
            result = {"error": _described(error)}
            partial = self.content["stages"][stage]["results"][task.name]
            result |= {name: value for name, value in partial.items() if name != "unfinished"}
        # Here the error is gone, and with its traceback the tensors of the frames.
        free_memory()
        return result

    def write(self) -> None:
        if self.path is not None:
            write_json_object(self.path, self.content)


def free_memory() -> None:
    """Give back what the caching allocator holds for no tensor."""
    gc.collect()
    if torch.cuda.is_available() and not _context_is_lost():
        torch.cuda.empty_cache()


def _plain(value: Any) -> Any:
    """Return a result as JSON has it, which knows no infinity and nothing that is not a number: those are words."""
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _described(error: Exception) -> str:
    """Return an error's kind, message and place, in one line."""
    frames = traceback.extract_tb(error.__traceback__)[-2:]
    places = " < ".join(f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in reversed(frames))
    message = " ".join(str(error).split())[:MESSAGE_LENGTH]
    return f"{type(error).__name__}: {message} ({places})"


def _context_is_lost() -> bool:
    """Whether no kernel can run any more, as after an illegal address."""
    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False
