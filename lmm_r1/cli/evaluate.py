"""Measure checkpoints on held-out rows: `lmm-r1 evaluate --checkpoints NAME=DIR ... --files NAME=ROWS ...`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from lmm_r1.cli.arguments import parse, user_errors
from lmm_r1.cli.skipped_rows import report_skipped
from lmm_r1.config.evaluate import EvaluateConfig, check, page_path, responses_path
from lmm_r1.errors import UserError
from lmm_r1.files.atomic import write_atomically
from lmm_r1.files.json_object import write_json_object

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
    for note in (note for row_set in row_sets for note in row_set.notes):
        _say(note)
    checkpoints, measured = measure(config, named, row_sets, report=_say)
    _finish(config, measured, checkpoints, baseline=baseline)
    skipped = [row for file in measured for row in file.skipped]
    if skipped:
        report_skipped(PROG, skipped, listed_in=str(config.output))


<<<<<<< HEAD
def _say(line: str) -> None:
    print(line, flush=True)
=======
def _with_skipped(file: MeasuredFile, refused: Sequence[SkippedRow]) -> MeasuredFile:
    return replace(file, skipped=tuple(sorted({*file.skipped, *refused}, key=lambda row: row.index)))


def _row_sets(config: EvaluateConfig) -> list[RowSet]:
    """The rows of every file and suite; raises UserError for the first that cannot be read."""
    from lmm_r1.evaluation.row_set import Choices, file_rows, suite_rows
    from lmm_r1.evaluation.suites import get_suite

    chosen = ("temperature", "n_samples", "max_new_tokens", "max_rows", "verifiers")
    choices = Choices(ks=config.k, **{name: getattr(config, name) for name in chosen})
    files = _named(config.files, "--files")
    suites = [get_suite(name) for name in config.suite]
    recipes = {recipe.name: recipe for recipe in suites}
    if len(recipes) < len(suites):
        raise UserError(f"--suite {' '.join(config.suite)}: two of them have the same name; give each suite once")
    copies = _named(config.suite_data, "--suite_data")
    for name in copies:
        if name not in recipes:
            raise UserError(f"--suite_data {name}={copies[name]}: there is no --suite {name}; add it or drop this")
    for name in recipes:
        if name in files:
            raise UserError(f"--files {name}={files[name]}: the suite {name} has this name; choose another")
    row_sets = [
        file_rows(name, path, choices=choices, message_key=config.input_key, answer_key=config.label_key)
        for name, path in files.items()
    ]
    row_sets += [suite_rows(recipe, path=copies.get(name), choices=choices) for name, recipe in recipes.items()]
    for note in (note for row_set in row_sets for note in row_set.notes):
        print(note, flush=True)
    return row_sets


def _respond(
    config: EvaluateConfig, checkpoints: Mapping[str, str], row_sets: Sequence[RowSet]
) -> tuple[list[CheckpointResponses], dict[str, list[SkippedRow]]]:
    """The judged responses of every checkpoint, and by file the rows that one of them could not take.

    Each checkpoint's responses are written down as soon as it is done.
    """
    from lmm_r1.evaluation.judging import Judge

    verifiers = dict.fromkeys(verifier for row_set in row_sets for verifier in row_set.file.verifiers)
    judges = {
        verifier: Judge(verifier, workers=config.judge_workers, item_timeout_seconds=config.judge_timeout)
        for verifier in verifiers
    }
    for row_set in row_sets:
        for verifier in row_set.file.verifiers:
            judges[verifier].check_labels(list(row_set.rows.values()))
    from lmm_r1.inference.engines import prepare_process

    prepare_process()
    _check_checkpoints(config, checkpoints, [row for row_set in row_sets for row in row_set.rows.values()])
    refused: dict[str, list[SkippedRow]] = {row_set.file.name: [] for row_set in row_sets}
    done = [
        _checkpoint(config, name, path, row_sets, judges=judges, refused=refused, append=number > 0)
        for number, (name, path) in enumerate(checkpoints.items())
    ]
    return done, refused


def _checkpoint(
    config: EvaluateConfig,
    name: str,
    path: str,
    row_sets: Sequence[RowSet],
    *,
    judges: Mapping[str, Judge],
    refused: dict[str, list[SkippedRow]],
    append: bool,
) -> CheckpointResponses:
    from lmm_r1.evaluation.answered_rows import answer_files
    from lmm_r1.evaluation.judged_rows import judge_responses
    from lmm_r1.evaluation.scoreboard import CheckpointResponses
    from lmm_r1.inference.completion import SamplingSettings
    from lmm_r1.records.responses import write_responses

    found = answer_files(
        path,
        backend=config.backend,
        settings=_engine_settings(config, path, row_sets),
        files={row_set.file.name: row_set.rows for row_set in row_sets},
        sampling={
            row_set.file.name: SamplingSettings(top_p=config.top_p, **row_set.sampling.model_dump())
            for row_set in row_sets
        },
        report=lambda line: print(line, flush=True),
    )
    judged = {}
    # Only now, with the engine gone: judging would take the cores from it.
    with contextlib.ExitStack() as stack:
        running = {verifier: stack.enter_context(judge) for verifier, judge in judges.items()}
        for row_set in row_sets:
            file = row_set.file.name
            refused[file].extend(found[file].skipped)
            judged[file] = judge_responses(found[file].completions, checkpoint=name, row_set=row_set, judges=running)
    everything = (response for own in judged.values() for response in own)
    assert config.output is not None, "without --compare, check asks for it"
    write_responses(responses_path(config.output), everything, append=append)
    seconds = {file: answered.seconds for file, answered in found.items()}
    return CheckpointResponses(name=name, path=path, files=judged, seconds=seconds)


def _engine_settings(config: EvaluateConfig, path: str, row_sets: Sequence[RowSet]) -> EngineSettings:
    from lmm_r1.data.messages import images_of, videos_of
    from lmm_r1.inference.adapter_merge import split_adapter
    from lmm_r1.inference.completion import EngineSettings

    rows = [row for row_set in row_sets for row in row_set.rows.values()]
    return EngineSettings(
        adapter=split_adapter(path, None)[1],
        dtype=config.dtype,
        max_model_len=config.max_model_len,
        max_images=max(len(images_of(row.messages)) for row in rows),
        max_videos=max(len(videos_of(row.messages)) for row in rows),
        batch_rows=config.batch_rows,
        tensor_parallel_size=config.tensor_parallel_size,
        gpu_memory_utilization=config.gpu_memory_utilization,
        seed=config.seed,
        trust_remote_code=config.trust_remote_code,
    )
>>>>>>> records


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
