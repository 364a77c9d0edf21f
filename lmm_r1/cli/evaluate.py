"""Measure checkpoints on held-out rows: `lmm-r1 evaluate --checkpoints NAME=DIR ... --files NAME=ROWS ...`."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lmm_r1.cli.arguments import parse, user_errors
from lmm_r1.cli.skipped_rows import report_skipped
from lmm_r1.data.atomic_file import check_creatable, write_atomically
from lmm_r1.data.messages import Row
from lmm_r1.data.row_checks import check_images_taken
from lmm_r1.errors import UserError
from lmm_r1.evaluation.response_log import responses_path

if TYPE_CHECKING:
    from lmm_r1.data.files import SkippedRow
    from lmm_r1.evaluation.judging import Judge
    from lmm_r1.evaluation.row_set import RowSet
    from lmm_r1.evaluation.scoreboard import CheckpointResponses, MeasuredFile
    from lmm_r1.inference.completion import EngineSettings

PROG = "lmm-r1 evaluate"
DESCRIPTION = (
    "Measure checkpoints on row files and on ready-made suites: accuracy, pass@k, majority@k, format, length and "
    "truncation, by one or more verifiers, with standard errors and paired comparisons. Rows that cannot be used are "
    "left out and listed, and the exit code is 3 then."
)


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    checkpoints: tuple[str, ...] = ()
    """Checkpoints or LoRA adapters as NAME=FOLDER, in the order of the table."""
    backend: Literal["vllm", "transformers"] = "vllm"
    """Generate through vLLM, or through plain transformers."""
    files: tuple[str, ...] = ()
    """Row files as NAME=PATH."""
    suite: tuple[str, ...] = ()
    """Ready-made suites by name, or recipes of your own as FILE.yaml."""
    suite_data: tuple[str, ...] = ()
    """Local copies of suites' datasets as SUITE=PATH; the others are taken from the Hugging Face hub."""
    list_suites: bool = False
    """List the ready-made suites and end."""
    output: Path | None = None
    """JSON file to write; the responses and the page go beside it, as STEM.responses.jsonl and STEM.html."""
    html: Path | None = None
    """Where the page goes instead."""
    compare: tuple[str, ...] = ()
    """Compare saved responses instead of making new ones: PATH for all checkpoints in a file, NAME=PATH for one."""
    baseline: str | None = None
    """The checkpoint that the others are compared with; None takes the first."""
    verifiers: tuple[str, ...] = ()
    """Verifiers as `serve_verifier` names them, the accuracy being the first one's: `math`, `choice`, `list:unordered`,
    `composition:math=1.0,format=0.5`; by default math for files, and each suite's own."""
    k: tuple[int, ...] = ()
    """The k of pass@k and majority@k; by default the powers of two up to n_samples."""
    temperature: float | None = None
    """Sampling temperature, 0 decodes greedily; None takes each suite's own, and 0 for files."""
    top_p: float = 1.0
    """Nucleus of the sampling."""
    n_samples: int | None = None
    """Responses per row, over which the accuracy is a mean; None takes each suite's own, and 1 for files."""
    max_new_tokens: int | None = None
    """Longest response in tokens; None takes each suite's own, and 1024 for files."""
    max_model_len: int = 4096
    """Longest prompt and response together."""
    max_rows: int | None = None
    """Rows taken from the start of each file; None takes all."""
    input_key: str | None = None
    """Column with the messages; None looks for `message` and `messages`."""
    label_key: str = "answer"
    """Column with the answer."""
    judge_workers: int = 4
    """Processes that judge what rules of thumb cannot, for each verifier."""
    judge_timeout: float = 5.0
    """Seconds after which the judging of a response is cut off; it counts as wrong then."""
    bootstrap_resamples: int = 10_000
    """Resamples of the rows for the intervals of the comparisons."""
    bootstrap_seed: int = 0
    """Seed of that."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of the engine; auto takes that of the weights."""
    batch_rows: int = 16
    """Rows in one batch of plain transformers."""
    tensor_parallel_size: int = 1
    """GPUs over which the model is split."""
    gpu_memory_utilization: float = 0.85
    """Share of a GPU's memory for the engine."""
    seed: int = 0
    """Seed of the sampling."""
    trust_remote_code: bool = False
    """Run Python code that a checkpoint brings along."""


def main(argv: list[str] | None = None) -> None:
    config = parse(EvaluateConfig, argv, prog=PROG, description=DESCRIPTION)
    with user_errors(PROG):
        evaluate(config)


def evaluate(config: EvaluateConfig) -> None:
    """Do what `lmm-r1 evaluate` does with these flags."""
    if config.list_suites:
        _print_suites()
        return
    _check(config)
    if config.compare:
        from lmm_r1.evaluation.saved_responses import saved_checkpoints, saved_files

        checkpoints = saved_checkpoints(config.compare)
        baseline = _baseline(config, [checkpoint.name for checkpoint in checkpoints])
        _finish(config, saved_files(checkpoints, ks=config.k), checkpoints, baseline=baseline)
        return
    named = _named(config.checkpoints, "--checkpoints")
    baseline = _baseline(config, list(named))
    row_sets = _row_sets(config)
    checkpoints, refused = _respond(config, named, row_sets)
    files = [_with_skipped(row_set.file, refused[row_set.file.name]) for row_set in row_sets]
    _finish(config, files, checkpoints, baseline=baseline)
    skipped = [row for file in files for row in file.skipped]
    if skipped:
        report_skipped(PROG, skipped, listed_in=str(config.output))


def _with_skipped(file: MeasuredFile, refused: Sequence[SkippedRow]) -> MeasuredFile:
    return replace(file, skipped=tuple(sorted({*file.skipped, *refused}, key=lambda row: row.index)))


def _check(config: EvaluateConfig) -> None:
    """Raise UserError for what can be told from the flags alone."""
    if config.compare:
        for name in ("checkpoints", "files", "suite"):
            if getattr(config, name):
                raise UserError(f"--compare and --{name} are both given; --compare takes saved responses: drop one")
    else:
        if not config.checkpoints:
            raise UserError("--checkpoints is missing: name what to measure as NAME=FOLDER")
        if not (config.files or config.suite):
            raise UserError("--files and --suite are missing: name rows as NAME=PATH, or a suite (--list_suites)")
        if config.output is None:
            raise UserError("--output is missing: name the JSON file to write")
    for flag, path in (("--output", config.output), ("--html", _page_path(config))):
        if path is None:
            continue
        check_creatable(path, flag=flag)
        if path.is_dir():
            raise UserError(f"{flag} {path} is a folder; name a file")
    if config.output is not None and config.output == _page_path(config):
        raise UserError(
            f"--output {config.output} is where the page goes; name another with --html, or end it in .json"
        )
    if config.output is not None and responses_path(config.output).is_dir():
        raise UserError(f"--output {config.output}: {responses_path(config.output)} is a folder; choose another name")
    if len(set(config.verifiers)) < len(config.verifiers):
        raise UserError(f"--verifiers {' '.join(config.verifiers)}: one of them is given twice; give each once")
    _check_numbers(config)


def _check_numbers(config: EvaluateConfig) -> None:
    counts = (
        "n_samples",
        "max_new_tokens",
        "max_model_len",
        "max_rows",
        "tensor_parallel_size",
        "judge_workers",
        "batch_rows",
    )
    for name in (*counts, "bootstrap_resamples"):
        value = getattr(config, name)
        if value is not None and value < 1:
            raise UserError(f"--{name} {value}: must be 1 or more")
    if config.temperature is not None and config.temperature < 0:
        raise UserError(f"--temperature {config.temperature}: must be 0 or more")
    if not 0 < config.top_p <= 1:
        raise UserError(f"--top_p {config.top_p}: must be above 0 and at most 1")
    if config.judge_timeout <= 0:
        raise UserError(f"--judge_timeout {config.judge_timeout}: must be above 0")
    if config.bootstrap_seed < 0:
        raise UserError(f"--bootstrap_seed {config.bootstrap_seed}: must be 0 or more")


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
    from lmm_r1.evaluation.response_log import write_responses
    from lmm_r1.evaluation.scoreboard import CheckpointResponses
    from lmm_r1.inference.completion import SamplingSettings

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
    page = _page_path(config)
    written = {"scores": config.output, "page": page}
    if config.output is not None:
        write_atomically(config.output, text=json.dumps(board_record(board), indent=2) + "\n")
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


def _page_path(config: EvaluateConfig) -> Path | None:
    return config.html or (config.output and config.output.with_suffix(".html"))


def _baseline(config: EvaluateConfig, names: Sequence[str]) -> str:
    if config.baseline is not None and config.baseline not in names:
        raise UserError(f"--baseline {config.baseline}: no such checkpoint; choose one of {', '.join(names)}")
    return config.baseline or names[0]


def _check_checkpoints(config: EvaluateConfig, checkpoints: Mapping[str, str], rows: Sequence[Row]) -> None:
    """Raise UserError for the last checkpoint, too, before the first is measured."""
    from lmm_r1.inference.adapter_merge import split_adapter
    from lmm_r1.inference.engines import check_backend
    from lmm_r1.lmm_kits import kit_of
    from lmm_r1.lmm_kits.weight_files import check_weights

    for name, path in checkpoints.items():
        path, _ = split_adapter(path, None)
        kit = kit_of(path, trust_remote_code=config.trust_remote_code)
        check_backend(config.backend, kit, model=f"--checkpoints {name}={path}")
        kit.load_processor(path, trust_remote_code=config.trust_remote_code)
        check_weights(path)
        check_images_taken(rows, kit=kit, model=f"--checkpoints {name}={path}")


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
