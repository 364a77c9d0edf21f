"""Measure checkpoints on held-out rows: `lmm-r1 evaluate --checkpoints NAME=DIR ... --files NAME=ROWS ...`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lmm_r1.cli import report_skipped, run_command, user_errors
from lmm_r1.cli.arguments import parse
from lmm_r1.config.evaluate import ENGINE_FLAGS, EvaluateConfig, check, named, page_path, responses_path, with_output
from lmm_r1.config.generation import EPISODE_FLAGS
from lmm_r1.config.ppo import DEFAULT_VERIFIER
from lmm_r1.config.rewards import GivenFunctions, prompt_for
from lmm_r1.data.reading import told_prompt
from lmm_r1.errors import UserError
from lmm_r1.files.atomic import write_atomically
from lmm_r1.files.json_files import write_json_object
from lmm_r1.records.run_folder import note_evaluation, trained_reading
from remote_rm.redaction import hidden_settings

if TYPE_CHECKING:
    from lmm_r1.tools.evaluation.board import Board, CheckpointResponses, MeasuredFile

CONFIG = EvaluateConfig
PROG = "lmm-r1 evaluate"
DESCRIPTION = (
    "Measure checkpoints, or the models of an OpenAI-compatible server, on row files and on ready-made suites: accuracy, "
    "pass@k, majority@k, format, length and truncation, by one or more verifiers, with standard errors and paired "
    "comparisons. Rows that cannot be used are left out and listed; the exit code is then 3."
)


def main(argv: list[str] | None = None) -> None:
    config = parse(EvaluateConfig, argv, prog=PROG, description=DESCRIPTION, first_help=EvaluateConfig.first_help)
    with user_errors(PROG):
        if config.list_suites:
            _print_suites()
            return
        config = with_output(config)
        board = evaluate(config)
    skipped = [] if config.compare else [row for file in board.files for row in file.skipped]
    if skipped:
        report_skipped(PROG, skipped, listed_in=None if config.output is None else str(config.output))


def evaluate(config: EvaluateConfig, *, told: bool = True, functions: GivenFunctions | None = None) -> Board:
    """Measure or compare as the flags say, print and write the results, and return all scores.

    Args:
        told: whether to print the paths of the files; not for files that are temporary.
        functions: reward functions that are not in a Python file.
    """
    check(config)
    if not config.compare:
        return _measure(config, told=told, functions=functions)
    from lmm_r1.tools.evaluation.rows import saved_checkpoints, saved_files

    checkpoints = saved_checkpoints(config.compare)
    baseline = _baseline(config, [checkpoint.name for checkpoint in checkpoints])
    return _finish(config, saved_files(checkpoints, ks=config.k), checkpoints, baseline=baseline)


def _measure(config: EvaluateConfig, *, told: bool, functions: GivenFunctions | None) -> Board:
    checkpoints_of = named(config.checkpoints, flag="--checkpoints")
    for model in config.model:
        if model in checkpoints_of:
            raise UserError(f"--checkpoints {model}={checkpoints_of[model]}: a --model has this name; choose another")
    baseline = _baseline(config, [*checkpoints_of, *config.model])
    files, copies = named(config.files, flag="--files"), named(config.suite_data, flag="--suite_data", bare=False)
    from lmm_r1.tools.evaluation.measurement import measure, read_files

    if config.system_prompt is None and config.files:
        prompt, _ = trained_reading(list(checkpoints_of.values()))
        if prompt is None and config.agent is None:
            prompt = prompt_for(config.reward or (DEFAULT_VERIFIER,))
        config = replace(config, system_prompt=prompt)
    measured = read_files(config, files=files, copies=copies)
    for file in measured:
        for line in file.notes:
            _say(line)
    asked = [row for file in measured if file.name in files for row in file.rows.values()]
    if told_of := told_prompt(config.system_prompt, asked, flag="--system_prompt"):
        _say(told_of)
    checkpoints, measured = measure(config, checkpoints_of, measured, report=_say, functions=functions)
    return _finish(config, measured, checkpoints, baseline=baseline, told=told)


def _say(line: str) -> None:
    print(line, flush=True)


def _finish(
    config: EvaluateConfig,
    files: Sequence[MeasuredFile],
    checkpoints: Sequence[CheckpointResponses],
    *,
    baseline: str,
    told: bool = True,
) -> Board:
    """Print the tables, write the JSON and the page, and print their paths."""
    from lmm_r1.tools.evaluation.board import board_record, build_board, print_board
    from lmm_r1.tools.evaluation.page import build_page

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
            for checkpoint in board.checkpoints:
                note_evaluation(checkpoint.path, name=checkpoint.name, evaluation=config.output)
    if page is not None:
        write_atomically(page, text=build_page(board))
    for what, path in written.items():
        if told and path is not None:
            _say(f"{what}: {path}")
    return board


def _settings(config: EvaluateConfig, files: Sequence[MeasuredFile]) -> dict[str, object]:
    """Return the effective flags that all files share; those that differ are kept per file."""
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(config).items()}
    if config.agent is None:
        settings |= dict.fromkeys(EPISODE_FLAGS)
    for name in ("temperature", "n_samples", "max_new_tokens"):
        values = {file.sampling.get(name) for file in files}
        settings[name] = values.pop() if len(values) == 1 else None
    if not config.checkpoints:
        # Nothing was generated in this process, so its engine's defaults would mislead.
        settings |= dict.fromkeys(ENGINE_FLAGS)
    if not config.checkpoints and config.endpoint is None:
        settings["top_p"] = None
    return {name: hidden_settings(value, name=name) for name, value in settings.items()}


def _baseline(config: EvaluateConfig, names: Sequence[str]) -> str:
    if config.baseline is not None and config.baseline not in names:
        raise UserError(f"--baseline {config.baseline}: no such checkpoint; choose one of {', '.join(names)}")
    return config.baseline or names[0]


def _print_suites() -> None:
    from lmm_r1.tools.evaluation.rows import get_suite, suite_names

    for recipe in map(get_suite, suite_names()):
        source = recipe.source.dataset or "no dataset on the hub, so --suite_data is needed"
        rows = f"{recipe.rows:,} rows, " if recipe.rows else ""
        print(f"{recipe.name}: {recipe.description}")
        print(f"  {source}, split {recipe.source.split}; {rows}licence {recipe.licence}")
        assert recipe.sampling is not None, "a suite says how it is sampled"
        sampling = ", ".join(f"{name} {value}" for name, value in recipe.sampling.model_dump().items())
        print(f"  verifiers {', '.join(recipe.verifiers)}; {sampling}")


if __name__ == "__main__":
    run_command(main)
