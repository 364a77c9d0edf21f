"""What a reader must know about the files behind a page."""

from collections.abc import Sequence

from lmm_r1.records.run import Stage
from lmm_r1.report.rollout_sample import RolloutSample


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
