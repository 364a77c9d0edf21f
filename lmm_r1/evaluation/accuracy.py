"""The responses of a checkpoint to files of rows: the one place where an evaluation meets an engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lmm_r1.data.messages import Row, images_of, videos_of
from lmm_r1.evaluation.generation import CheckpointEngine, GenerationSettings, Response


@dataclass(frozen=True, kw_only=True)
class FileResponses:
    """The responses to one file: all samples of the first row, then those of the second, and so on."""

    responses: list[Response]
    seconds: float


def checkpoint_responses(
    path: str,
    *,
    files: Mapping[str, Sequence[Row]],
    settings: Mapping[str, GenerationSettings],
    report: Callable[[str], None],
) -> dict[str, FileResponses]:
    """Return what a checkpoint answers to the rows of each file; `report` gets a line now and then.

    Args:
        settings: of each file; they may differ in how responses are sampled, and in nothing else.
    """
    everything = [row for rows in files.values() for row in rows]
    engine = CheckpointEngine(
        path,
        settings=next(iter(settings.values())),
        max_images=max(len(images_of(row.messages)) for row in everything),
        max_videos=max(len(videos_of(row.messages)) for row in everything),
    )
    found = {}
    try:
        for name, rows in files.items():
            began, total = time.perf_counter(), len(rows)
            engine.settings = settings[name]
            responses = engine.respond(
                rows,
                on_progress=lambda done, name=name, total=total: report(f"{path}: {name} {done}/{total} rows"),
            )
            found[name] = FileResponses(responses=responses, seconds=time.perf_counter() - began)
    finally:
        engine.close()
    return found
