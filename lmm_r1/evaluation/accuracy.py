"""How well a checkpoint does on files of rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

from lmm_r1.data.messages import Row, images_of, videos_of
from lmm_r1.evaluation.generation import CheckpointEngine, GenerationSettings, Response
from remote_rm import math_verifier


def evaluate_checkpoint(
    path: str,
    *,
    files: Mapping[str, Sequence[Row]],
    settings: GenerationSettings,
    report: Callable[[str], None],
) -> dict[str, dict[str, float]]:
    """Return, per file, the number of rows, accuracy, format rate, mean response tokens and truncation rate."""
    everything = [row for rows in files.values() for row in rows]
    engine = CheckpointEngine(
        path,
        settings=settings,
        max_images=max(len(images_of(row.messages)) for row in everything),
        max_videos=max(len(videos_of(row.messages)) for row in everything),
    )
    try:
        scores = {}
        for name, rows in files.items():
            began, total = time.perf_counter(), len(rows)
            responses = engine.respond(
                rows,
                on_progress=lambda done, name=name, total=total: report(f"{path}: {name} {done}/{total} rows"),
            )
            scores[name] = {**summarize(responses), "rows": total, "seconds": time.perf_counter() - began}
    finally:
        engine.close()
    return scores


def summarize(responses: Sequence[Response]) -> dict[str, float]:
    """Return the means over all responses: accuracy, format, response tokens, truncation (rates in [0, 1])."""
    scores = [math_verifier.score(response.text, response.row.answer) for response in responses]
    return {
        "accuracy": fmean(score.parts["accuracy"] for score in scores),
        "format": fmean(score.parts["format"] for score in scores),
        "mean_response_tokens": fmean(response.num_tokens for response in responses),
        "truncated_rate": fmean(response.truncated for response in responses),
    }
