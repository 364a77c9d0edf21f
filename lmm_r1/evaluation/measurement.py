"""What `lmm-r1 evaluate` measures: the rows of files and suites, answered by every checkpoint, judged and written down."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

from lmm_r1.config.evaluate import EvaluateConfig, answers_path, endpoint_fields
from lmm_r1.config.generation import episode_limits, reward_part
from lmm_r1.config.shared import row_reading
from lmm_r1.data.bad_rows import SkippedRow
from lmm_r1.data.image_sources import kind_of
from lmm_r1.data.images import PictureFolder
from lmm_r1.data.messages import Row, images_of, videos_of
from lmm_r1.errors import UserError
from lmm_r1.evaluation.answered_rows import answer_files, judge_responses
from lmm_r1.evaluation.measured_before import Measured, MeasuredBefore, measured_key
from lmm_r1.evaluation.row_set import DEFAULT_VERIFIER, Choices, RowSet, file_rows, get_suite, suite_rows
from lmm_r1.evaluation.scoreboard import CheckpointResponses, MeasuredFile
from lmm_r1.evaluation.scores import check_reward_parts, default_verifiers
from lmm_r1.files.atomic import lock_of, locked
from lmm_r1.generation.endpoint import AnswerLog, EndpointEngine, EndpointSettings
from lmm_r1.generation.engine import (
    PLAIN_TRANSFORMERS,
    EngineSettings,
    EpisodeSettings,
    Responder,
    SamplingSettings,
    check_backend,
    make_engine,
    playing,
    prepare_process,
    split_adapter,
)
from lmm_r1.lmm_kits import Checkpoint, kit_of
from lmm_r1.lmm_kits.checkpoint import check_images_taken, check_pixel_bounds, check_weights
from lmm_r1.scoring.response_scores import Judge


def remote_models(config: EvaluateConfig, *, log: AnswerLog) -> list[EndpointSettings]:
    """Return the settings of each `--model`; none where there is no `--endpoint`.

    Raises UserError where the key is missing, the server cannot be reached or it refuses the key.
    """
    if config.endpoint is None:
        return []
    models = [
        EndpointSettings(
            url=config.endpoint,
            model=model,
            api_key=_api_key(config.api_key_env),
            concurrency=config.endpoint_concurrency,
            timeout_seconds=config.endpoint_timeout,
            attempts=config.endpoint_attempts,
            body=endpoint_fields(config),
        )
        for model in config.model
    ]
    with contextlib.closing(EndpointEngine(models[0], log=log)) as engine:
        engine.check()
    return models


def _api_key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise UserError(f"--api_key_env {variable}: this environment variable is not set or empty; export the key")
    return key


def read_row_sets(config: EvaluateConfig, *, files: Mapping[str, str], copies: Mapping[str, str]) -> list[RowSet]:
    """Return the rows of every file and suite; raises UserError for the first that cannot be read.

    Args:
        files: paths of row files by name.
        copies: local copies of suites' datasets by suite.
    """
    chosen = ("temperature", "n_samples", "max_new_tokens", "max_rows", "verifiers")
    choices = Choices(ks=config.k, **{name: getattr(config, name) for name in chosen})
    episodes = episode_settings(config)
    if episodes is not None:
        environment = episodes.environment()
        check_reward_parts(config.verifiers, environment)
        choices = replace(choices, file_verifiers=default_verifiers(environment, otherwise=DEFAULT_VERIFIER))
    suites = [get_suite(name) for name in config.suite]
    recipes = {recipe.name: recipe for recipe in suites}
    if len(recipes) < len(suites):
        raise UserError(f"--suite {' '.join(config.suite)}: two of them have the same name; give each suite once")
    for name in copies:
        if name not in recipes:
            raise UserError(f"--suite_data {name}={copies[name]}: there is no --suite {name}; add it or drop this")
    for name in recipes:
        if name in files:
            raise UserError(f"--files {name}={files[name]}: the suite {name} has this name; choose another")
    reading = row_reading(config)
    row_sets = [file_rows(name, path, choices=choices, reading=reading) for name, path in files.items()]
    row_sets += [suite_rows(recipe, path=copies.get(name), choices=choices) for name, recipe in recipes.items()]
    return row_sets


def measure(
    config: EvaluateConfig,
    checkpoints: Mapping[str, str],
    row_sets: Sequence[RowSet],
    *,
    report: Callable[[str], None],
) -> tuple[list[CheckpointResponses], list[MeasuredFile]]:
    """Return the judged responses of every checkpoint, and the files with the rows that one of them could not take.

    Each checkpoint's responses are written down as soon as it is done, and what the output already holds of the same
    checkpoint, rows and settings is read again. Raises UserError for a checkpoint that cannot be measured before the
    first one is.

    Args:
        checkpoints: paths by name; the models behind `--endpoint` come after them.
        report: gets a line now and then.
    """
    named = dict.fromkeys(verifier for row_set in row_sets for verifier in row_set.file.verifiers)
    verifiers = [verifier for verifier in named if reward_part(verifier) is None]
    judges = {
        verifier: Judge(verifier, workers=config.judge_workers, item_timeout_seconds=config.judge_timeout)
        for verifier in verifiers
    }
    for row_set in row_sets:
        for verifier in filter(judges.__contains__, row_set.file.verifiers):
            judges[verifier].check_labels(list(row_set.rows.values()))
    if checkpoints:
        prepare_process()
        _check_checkpoints(config, checkpoints, [row for row_set in row_sets for row in row_set.rows.values()])
    with _output_locked(config):
        subjects = [_local(config, name, path, row_sets) for name, path in checkpoints.items()]
        subjects += _remote(config, report=report)
        found = _measure_all(config, subjects, row_sets, judges=judges, report=report)
    return [_responses_of(subject, row_sets, found) for subject in subjects], [
        _with_skipped(
            row_set.file, [row for names, one in found.items() if names[1] == row_set.file.name for row in one.skipped]
        )
        for row_set in row_sets
    ]


def _output_locked(config: EvaluateConfig) -> AbstractContextManager[None]:
    """Keep a second evaluation out of the output, if there is one."""
    if config.output is None:
        return nullcontext()
    return locked(lock_of(config.output), output=f"--output {config.output}")


def _measure_all(
    config: EvaluateConfig,
    subjects: Sequence[_Subject],
    row_sets: Sequence[RowSet],
    *,
    judges: Mapping[str, Judge],
    report: Callable[[str], None],
) -> dict[tuple[str, str], Measured]:
    """Return what each subject makes of each file, read again as far as it was measured before."""
    assert config.output is not None, "the checks ask for it where checkpoints answer"
    before = MeasuredBefore(config.output)
    if not config.overwrite:
        before.read()
    keys = {(subject.name, row_set.file.name): subject.key(row_set) for subject in subjects for row_set in row_sets}
    taken = {names: before.take(*names, key) for names, key in keys.items()}
    found = {names: measured for names, measured in taken.items() if measured is not None}
    if config.agent is not None and config.checkpoints:
        _pictures(config).clear(but=_shown_pictures(found.values()))
    written = False
    for subject in subjects:
        again = [row_set.file.name for row_set in row_sets if (subject.name, row_set.file.name) in found]
        missing = [row_set for row_set in row_sets if row_set.file.name not in again]
        if again:
            report(
                f"{subject.said}: {', '.join(again)} as measured before, in {before.path} (--overwrite measures anew)"
            )
        if missing:
            new = _measured(config, subject, missing, keys=keys, judges=judges, report=report)
            found |= new
            # What is there makes room for the first that is new, not for an engine that cannot be had.
            before.add(found, new.keys()) if written else before.write(found)
            written = True
    ordered = {names: found[names] for names in keys}
    if not written or list(ordered) != list(found):
        before.write(ordered)
    return ordered


def _shown_pictures(measured: Iterable[Measured]) -> set[str]:
    episodes = (response.episode for one in measured for response in one.responses if response.episode is not None)
    return {path for episode in episodes for turn in episode.said for path in turn.images}


def _responses_of(
    subject: _Subject, row_sets: Sequence[RowSet], found: Mapping[tuple[str, str], Measured]
) -> CheckpointResponses:
    own = {row_set.file.name: found[subject.name, row_set.file.name] for row_set in row_sets}
    return CheckpointResponses(
        name=subject.name,
        path=subject.path,
        files={file: measured.responses for file, measured in own.items()},
        seconds={file: measured.seconds for file, measured in own.items()},
    )


def _with_skipped(file: MeasuredFile, refused: Sequence[SkippedRow]) -> MeasuredFile:
    return replace(file, skipped=tuple(sorted({*file.skipped, *refused}, key=lambda row: row.index)))


@dataclass(frozen=True, kw_only=True)
class _Subject:
    """What is measured: a checkpoint in this process, or a model behind an endpoint."""

    name: str
    path: str
    said: str
    """As the lines of progress name it."""
    make: Callable[[], Responder]
    key: Callable[[RowSet], str | None]
    """What its responses to a file depend on; None where that cannot be told."""


def _local(config: EvaluateConfig, name: str, path: str, row_sets: Sequence[RowSet]) -> _Subject:
    base, _ = split_adapter(path, None)
    settings = _engine_settings(config, path, row_sets)

    def make() -> Responder:
        return playing(make_engine(config.backend, base, settings), episode_settings(config))

    return _Subject(name=name, path=path, said=path, make=make, key=partial(measured_key, config, path))


def episode_settings(config: EvaluateConfig) -> EpisodeSettings | None:
    """Return how episodes are played, None where responses are single ones."""
    if config.agent is None:
        return None
    return EpisodeSettings(agent=config.agent, limits=episode_limits(config), seed=config.seed, pictures="small")


def _pictures(config: EvaluateConfig) -> PictureFolder:
    assert config.output is not None, "the checks ask for it where checkpoints answer"
    return PictureFolder.beside(config.output)


def _remote(config: EvaluateConfig, *, report: Callable[[str], None]) -> list[_Subject]:
    if config.endpoint is None:
        return []
    assert config.output is not None, "the checks ask for it where an endpoint answers"
    log = AnswerLog(answers_path(config.output))
    if log.known:
        report(f"{log.path}: holds the answers to {log.known:,} requests, which are not asked again")
    return [
        _Subject(
            name=settings.model,
            path=settings.url,
            said=settings.model,
            make=partial(EndpointEngine, settings, log=log),
            # Nobody knows what is behind it now; what was answered is in its log.
            key=lambda row_set: None,
        )
        for settings in remote_models(config, log=log)
    ]


def _measured(
    config: EvaluateConfig,
    subject: _Subject,
    row_sets: Sequence[RowSet],
    *,
    keys: Mapping[tuple[str, str], str | None],
    judges: Mapping[str, Judge],
    report: Callable[[str], None],
) -> dict[tuple[str, str], Measured]:
    """Return what a subject makes of these files, by its name and theirs."""
    found = answer_files(
        subject.make,
        model=subject.said,
        files={row_set.file.name: row_set.rows for row_set in row_sets},
        sampling={
            row_set.file.name: SamplingSettings(top_p=config.top_p, **row_set.sampling.model_dump())
            for row_set in row_sets
        },
        report=report,
        pictures=None if config.agent is None else _pictures(config),
    )
    measured = {}
    # Only now, with the engine gone: judging would take the cores from it.
    with contextlib.ExitStack() as stack:
        running = {verifier: stack.enter_context(judge) for verifier, judge in judges.items()}
        for row_set in row_sets:
            names = subject.name, row_set.file.name
            answered = found[row_set.file.name]
            responses = judge_responses(answered.completions, checkpoint=subject.name, row_set=row_set, judges=running)
            measured[names] = Measured(
                # What was left out for a reason that may pass is asked for again.
                key="" if answered.skipped and _may_pass(config, row_set) else keys[names] or "",
                responses=tuple(responses),
                skipped=answered.skipped,
                seconds=answered.seconds,
            )
    return measured


def _may_pass(config: EvaluateConfig, row_set: RowSet) -> bool:
    """Return whether rows may be left out for what another attempt would not meet: a network, an environment."""
    images = (part.source for row in row_set.rows.values() for part in images_of(row.messages))
    return config.agent is not None or any(kind_of(source) == "url" for source in images)


def _engine_settings(config: EvaluateConfig, path: str, row_sets: Sequence[RowSet]) -> EngineSettings:
    base, adapter = split_adapter(path, None)
    shown_images = 0
    if config.agent is not None and kit_of(base, trust_remote_code=config.trust_remote_code).takes_images:
        shown_images = config.agent_max_images
    rows = [row for row_set in row_sets for row in row_set.rows.values()]
    return EngineSettings(
        adapter=adapter,
        dtype=config.dtype,
        max_model_len=config.max_model_len,
        max_images=max(len(images_of(row.messages)) for row in rows) + shown_images,
        max_videos=max(len(videos_of(row.messages)) for row in rows),
        batch_rows=config.batch_rows,
        tensor_parallel_size=config.tensor_parallel_size,
        gpu_memory_utilization=config.gpu_memory_utilization,
        enforce_eager=config.enforce_eager,
        seed=config.seed,
        trust_remote_code=config.trust_remote_code,
        speculation=config.speculation,
    )


def _check_checkpoints(config: EvaluateConfig, checkpoints: Mapping[str, str], rows: Sequence[Row]) -> None:
    """Raise UserError for the last checkpoint, too, before the first is measured."""
    for name, path in checkpoints.items():
        path, _ = split_adapter(path, None)
        checkpoint = Checkpoint(path, trust_remote_code=config.trust_remote_code)
        instead = PLAIN_TRANSFORMERS if config.agent is None else "play episodes with a model that vLLM has"
        check_backend(config.backend, checkpoint.kit, model=f"--checkpoints {name}={path}", instead=instead)
        check_pixel_bounds(config, checkpoint, model=f"--checkpoints {name}={path}")
        _ = checkpoint.processor
        check_weights(path)
        check_images_taken(rows, kit=checkpoint.kit, model=f"--checkpoints {name}={path}")
