"""summary.json: what a curriculum reached, for machines."""

from pathlib import Path

from lmm_r1.files.json_object import write_json_object
from lmm_r1.records.run import Run, Stage


def summarize(run: Run, *, seconds: float | None = None) -> dict[str, object]:
    """Return the stages with their held-out accuracies, None where not evaluated.

    Args:
        seconds: how long the whole run took; None takes the sum over the stages.
    """
    return {
        "seconds": total_seconds(run) if seconds is None else seconds,
        "stages": [
            {
                "name": stage.name,
                "text_accuracy": _accuracy(run, stage=stage, file="text"),
                "image_accuracy": _accuracy(run, stage=stage, file="image"),
                "steps": stage.steps,
            }
            for stage in run.stages
        ],
    }


def write_summary(run: Run, *, path: Path, seconds: float | None = None) -> None:
    """Write the summary of a run to a file, all of it or nothing."""
    write_json_object(path, summarize(run, seconds=seconds))


def total_seconds(run: Run) -> float:
    """Return the seconds of all stages together."""
    return sum(stage.seconds for stage in run.stages)


def _accuracy(run: Run, *, stage: Stage, file: str) -> float | None:
    scores = run.held_out(stage).get(file)
    return scores.accuracy if scores else None
