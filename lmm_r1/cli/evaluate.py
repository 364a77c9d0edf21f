"""Measure checkpoints on held-out rows: `lmm-r1 evaluate --checkpoints NAME=DIR ... --files NAME=ROWS ...`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from lmm_r1.cli.arguments import parse, user_errors
from lmm_r1.cli.job_progress import report_skipped
from lmm_r1.config.evaluate import EvaluateConfig, check, page_path, responses_path
from lmm_r1.errors import UserError
from lmm_r1.files.atomic import write_atomically
from lmm_r1.files.json_files import write_json_object

if TYPE_CHECKING:
    from lmm_r1.evaluation.scoreboard import CheckpointResponses, MeasuredFile

PROG = "lmm-r1 evaluate"
DESCRIPTION = (
    "Measure checkpoints on row files and on ready-made suites: accuracy, pass@k, majority@k, format, length and "
    "truncation, by one or more verifiers, with standard errors and paired comparisons. Rows that cannot be used are "
    "left out and listed, and the exit code is 3 then."
)


def main(argv: list[str] | None = None) -> None:
    config = parse(EvaluateConfig, argv, prog=PROG, description=DESCRIPTION)
    with user_errors(PROG):
        evaluate(config)


def evaluate(config: EvaluateConfig) -> None:
    """Do what `lmm-r1 evaluate` does with these flags."""
    if config.list_suites:
        _print_suites()
        return
    check(config)
    if config.compare:
        from lmm_r1.evaluation.saved_responses import saved_checkpoints, saved_files

        checkpoints = saved_checkpoints(config.compare)
        baseline = _baseline(config, [checkpoint.name for checkpoint in checkpoints])
        _finish(config, saved_files(checkpoints, ks=config.k), checkpoints, baseline=baseline)
        return
    named = _named(config.checkpoints, "--checkpoints")
    baseline = _baseline(config, list(named))
    files, copies = _named(config.files, "--files"), _named(config.suite_data, "--suite_data")
    from lmm_r1.evaluation.measurement import measure, read_row_sets

    row_sets = read_row_sets(config, files=files, copies=copies)
    for row_set in row_sets:
        for line in (*([row_set.told] if row_set.told else []), *row_set.notes):
            _say(line)
    checkpoints, measured = measure(config, named, row_sets, report=_say)
    _finish(config, measured, checkpoints, baseline=baseline)
    skipped = [row for file in measured for row in file.skipped]
    if skipped:
        report_skipped(PROG, skipped, listed_in=str(config.output))


def _say(line: str) -> None:
    print(line, flush=True)


def _finish(
    config: EvaluateConfig,
    files: Sequence[MeasuredFile],
    checkpoints: Sequence[CheckpointResponses],
    *,
    baseline: str,
) -> None:
    """Print the tables; write the JSON and the page."""
    from lmm_r1.evaluation.scoreboard import board_record, build_board, build_page, print_board

    board = build_board(
        files=files,
        checkpoints=checkpoints,
        baseline=baseline,
        resamples=config.bootstrap_resamples,
        seed=config.bootstrap_seed,
        settings=_settings(config, files),
    )
    print_board(board)
    page = page_path(config)
    written = {"scores": config.output, "page": page}
    if config.output is not None:
        write_json_object(config.output, board_record(board))
        if not config.compare:
            written["responses"] = responses_path(config.output)
    if page is not None:
        write_atomically(page, text=build_page(board))
    for what, path in written.items():
        if path is not None:
            print(f"{what}: {path}", flush=True)


def _settings(config: EvaluateConfig, files: Sequence[MeasuredFile]) -> dict[str, object]:
    """The flags as they worked: what all files have in common stands here, what differs with each file only."""
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(config).items()}
    for name in ("temperature", "n_samples", "max_new_tokens"):
        values = {file.sampling.get(name) for file in files}
        settings[name] = values.pop() if len(values) == 1 else None
    return settings


def _baseline(config: EvaluateConfig, names: Sequence[str]) -> str:
    if config.baseline is not None and config.baseline not in names:
        raise UserError(f"--baseline {config.baseline}: no such checkpoint; choose one of {', '.join(names)}")
    return config.baseline or names[0]


def _print_suites() -> None:
    from lmm_r1.evaluation.suites import get_suite, suite_names

    for recipe in map(get_suite, suite_names()):
        source = recipe.source.dataset or "no dataset on the hub, so --suite_data is needed"
        rows = f"{recipe.rows:,} rows, " if recipe.rows else ""
        print(f"{recipe.name}: {recipe.description}")
        print(f"  {source}, split {recipe.source.split}; {rows}licence {recipe.licence}")
        assert recipe.sampling is not None, "a suite says how it is sampled"
        sampling = ", ".join(f"{name} {value}" for name, value in recipe.sampling.model_dump().items())
        print(f"  verifiers {', '.join(recipe.verifiers)}; {sampling}")


def _named(entries: tuple[str, ...], flag: str) -> dict[str, str]:
    named = {}
    for entry in entries:
        name, equals, path = entry.partition("=")
        if not (name and equals and path):
            raise UserError(f"{flag} {entry}: write NAME=PATH")
        if name in named:
            raise UserError(f"{flag} {entry}: the name {name} is given twice; choose another")
        named[name] = path
    return named


if __name__ == "__main__":
    main()
