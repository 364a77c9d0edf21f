"""What a run amounts to: summary.json for machines, and what a reader must know about the files behind a page."""

from collections.abc import Sequence
from pathlib import Path

from lmm_r1.files.json_files import write_json_object
from lmm_r1.records.run import Run, Stage
from lmm_r1.report.rollout_sample import RolloutSample


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


def notes(stages: Sequence[tuple[str, Stage]], *, sample: RolloutSample) -> list[str]:
    """Return a sentence for each thing that is missing or was left out.

    Args:
        stages: with the names that they go by on the page.
    """
    found = [note for name, stage in stages for note in _stage_notes(stage, name=name)]
    if sample.missing_images:
        found.append(f"Images of the rollouts below that could not be shown: {sample.missing_images}; each says why.")
    return found


def _stage_notes(stage: Stage, *, name: str) -> list[str]:
    found = []
    torn = stage.metrics.torn_lines + stage.rollouts.torn_lines
    if torn:
        found.append(f"{name}: {torn} torn last {'line' if torn == 1 else 'lines'} left out (writer stopped).")
    if stage.metrics.repeated_steps:
        found.append(
            f"{name}: steps logged more than once, as after a resume: {stage.metrics.repeated_steps}; "
            "the last values are shown."
        )
    missing = sum(value is None for row in stage.metrics.rows for value in row.values.values())
    if missing:
        found.append(f"{name}: values that are not finite, gaps in the curves: {missing}.")
    if stage.running:
        found.append(f"{name} has no stage.json yet: it is still running, or was stopped before its end.")
    return found
