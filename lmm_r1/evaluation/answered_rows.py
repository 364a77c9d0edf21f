"""The responses of a checkpoint to files of rows: the one place where an evaluation meets an engine."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lmm_r1.data.files import SkippedRow
from lmm_r1.data.messages import Row
from lmm_r1.data.sample import Completion
from lmm_r1.errors import UserError
from lmm_r1.generation.adapter_merge import split_adapter
from lmm_r1.generation.backends import Backend, make_engine
from lmm_r1.generation.engine import Engine, EngineSettings, SamplingSettings

# Rows between two lines about how far an engine is.
REPORTED_ROWS = 256


@dataclass(frozen=True, kw_only=True)
class AnsweredRows:
    """What a checkpoint made of the rows of one file."""

    completions: dict[int, tuple[Completion, ...]]
    """By the row's place in the file, in that order; rows that it could not take are not there."""
    skipped: tuple[SkippedRow, ...]
    seconds: float


def answer_files(
    path: str,
    *,
    backend: Backend,
    settings: EngineSettings,
    files: Mapping[str, Mapping[int, Row]],
    sampling: Mapping[str, SamplingSettings],
    report: Callable[[str], None],
) -> dict[str, AnsweredRows]:
    """Return what a checkpoint answers to the rows of each file; `report` gets a line now and then.

    Raises UserError where the checkpoint cannot be loaded, and where it can take none of a file's rows.

    Args:
        path: a checkpoint or a LoRA adapter's folder.
    """
    base, _ = split_adapter(path, None)
    with contextlib.closing(make_engine(backend, base, settings)) as engine:
        return {
            name: _answers(engine, rows, sampling[name], what=f"{path}: {name}", report=report)
            for name, rows in files.items()
        }


def _answers(
    engine: Engine, rows: Mapping[int, Row], sampling: SamplingSettings, *, what: str, report: Callable[[str], None]
) -> AnsweredRows:
    began = time.perf_counter()
    found: dict[int, tuple[Completion, ...]] = {}
    skipped: list[SkippedRow] = []
    for done, outcome in enumerate(engine.respond(rows.items(), sampling), start=1):
        if outcome.reason is None:
            found[outcome.index] = outcome.completions
        else:
            skipped.append(SkippedRow(index=outcome.index, reason=outcome.reason))
        if done % REPORTED_ROWS == 0 or done == len(rows):
            report(f"{what} {done}/{len(rows)} rows")
    if not found:
        raise UserError(f"none of {len(rows)} rows can be answered; the first: {skipped[0].reason}")
    return AnsweredRows(
        completions={index: found[index] for index in rows if index in found},
        skipped=tuple(skipped),
        seconds=time.perf_counter() - began,
    )
