"""What `lmm-r1 evaluate` does: every checkpoint answers the rows of files and suites, and the responses are judged."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from lmm_r1.checkpoints import checkpoint_state, library_versions
from lmm_r1.config.evaluate import (
    ENGINE_FLAGS,
    EvaluateConfig,
    answers_path,
    endpoint_fields,
    measured_path,
    responses_path,
)
from lmm_r1.config.generation import EPISODE_FLAGS, episode_limits, reward_part
from lmm_r1.config.ppo import DEFAULT_VERIFIER
from lmm_r1.config.rewards import GivenFunctions, file_and_name, is_function, reward_list
from lmm_r1.config.run_rows import row_reading
from lmm_r1.data.images import PictureFolder
from lmm_r1.data.messages import Row, SkippedRow, images_of, kind_of, videos_of
from lmm_r1.data.sample import Completion
from lmm_r1.data.training_rows import files_of_rows, rows_digest
from lmm_r1.errors import UserError
from lmm_r1.files.atomic import lock_of, locked
from lmm_r1.files.json_files import Number, checked, read_json_object, write_json_object
from lmm_r1.generation.endpoint import AnswerLog, EndpointEngine, GeneratorEndpoint
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
from lmm_r1.lmm_kits.checkpoint import (
    ImageFitting,
    check_embeddings,
    check_images_taken,
    check_pixel_bounds,
    check_weights,
)
from lmm_r1.records.responses import JudgedResponse, read_responses, responses_digest, write_responses
from lmm_r1.scoring.sources import SourceJudge, VerifierJudge, make_judge
from lmm_r1.tools.evaluation.board import CheckpointResponses, MeasuredFile
from lmm_r1.tools.evaluation.rows import file_rows, get_suite, judge_responses, suite_rows
from lmm_r1.tools.evaluation.scores import check_reward_parts, default_verifiers


@dataclass(frozen=True, kw_only=True)
class Measured:
    key: str
    """Digest of everything that the responses and their verdicts depend on."""
    responses: tuple[JudgedResponse, ...]
    skipped: tuple[SkippedRow, ...]
    seconds: float


def measured_key(config: EvaluateConfig, path: str, file: MeasuredFile) -> str | None:
    """Return a digest of what an evaluation of a checkpoint on a file depends on; None if that is unknown."""
    base, adapter = split_adapter(path, None)
    states = [checkpoint_state(part) for part in (base, adapter and str(adapter)) if part]
    code_files = [file_and_name(verifier)[0] for verifier in file.verifiers if is_function(verifier)]
    if None in [*states, *code_files]:
        return None
    rows = list(file.rows.values())
    flags = {name: getattr(config, name) for name in (*ENGINE_FLAGS, *EPISODE_FLAGS, "top_p", "judge_timeout")}
    code = Path(config.agent.rpartition(":")[0]) if config.agent and ":" in config.agent else None
    depends = {
        "checkpoint": states,
        "rows": [rows_digest(rows), list(file.rows), files_of_rows(rows)],
        "sampling": file.sampling,
        # With the files of reward functions, without what those import.
        "verifiers": [
            *file.verifiers,
            *(hashlib.sha256(Path(str(path)).read_bytes()).hexdigest() for path in code_files),
        ],
        "flags": flags | {"agent_thought": dataclasses.asdict(config.agent_thought)},
        # The file with the user's own environment, without what that imports.
        "agent": hashlib.sha256(code.read_bytes()).hexdigest() if code and code.is_file() else None,
        "libraries": library_versions(),
    }
    return hashlib.sha256(json.dumps(depends, sort_keys=True, default=str).encode()).hexdigest()[:24]


@dataclass(frozen=True, kw_only=True)
class _Entry:
    checkpoint: str
    file: str
    key: str
    responses: str
    """Digest of the responses that were written."""
    seconds: Number
    skipped: tuple[SkippedRow, ...]


@dataclass(frozen=True, kw_only=True)
class _MeasuredRecord:
    measured: tuple[_Entry, ...]


class MeasuredBefore:
    """The responses next to an output, and what they depended on, from `STEM.measured.json`."""

    def __init__(self, output: Path) -> None:
        self.path = responses_path(output)
        self._record = measured_path(output)
        self._known: dict[tuple[str, str], Measured] = {}
        """By checkpoint and file."""

    def read(self) -> None:
        """Load the responses that match the record; all others are ignored."""
        if not (self._record.is_file() and self.path.is_file()):
            return
        record = checked(_MeasuredRecord, read_json_object(self._record), place=str(self._record))
        try:
            responses = read_responses(self.path)
        except UserError:
            # A session was killed while writing them, or there are none yet.
            return
        by_place: dict[tuple[str, str], list[JudgedResponse]] = {}
        for response in responses:
            by_place.setdefault((response.checkpoint, response.file), []).append(response)
        for entry in record.measured:
            own = by_place.get((entry.checkpoint, entry.file), [])
            if responses_digest(own, folder=self.path.parent) == entry.responses:
                self._known[entry.checkpoint, entry.file] = Measured(
                    key=entry.key, responses=tuple(own), skipped=entry.skipped, seconds=entry.seconds or 0.0
                )

    def take(self, checkpoint: str, file: str, key: str | None) -> Measured | None:
        """Return what was measured with the same key, under any name, renamed to this checkpoint and file."""
        same = [(names, known) for names, known in self._known.items() if key is not None and known.key == key]
        if not same:
            return None
        # If a checkpoint was given under two names, each keeps its own responses.
        _, found = min(same, key=lambda one: one[0] != (checkpoint, file))
        renamed = (replace(response, checkpoint=checkpoint, file=file) for response in found.responses)
        return replace(found, responses=tuple(renamed))

    def write(self, found: Mapping[tuple[str, str], Measured]) -> None:
        """Write all of this in this order, replacing what was there."""
        responses = [response for measured in found.values() for response in measured.responses]
        write_responses(self.path, responses, append=False)
        entries = tuple(
            _Entry(
                checkpoint=checkpoint,
                file=file,
                key=measured.key,
                responses=responses_digest(measured.responses, folder=self.path.parent),
                seconds=measured.seconds,
                skipped=measured.skipped,
            )
            for (checkpoint, file), measured in found.items()
            if measured.key
        )
        write_json_object(self._record, dataclasses.asdict(_MeasuredRecord(measured=entries)))


def read_files(config: EvaluateConfig, *, files: Mapping[str, str], copies: Mapping[str, str]) -> list[MeasuredFile]:
    """Return every file and suite with its rows; raises UserError for the first that cannot be read."""
    defaults: tuple[str, ...] = (DEFAULT_VERIFIER,)
    if (episodes := episode_settings(config)) is not None:
        environment = episodes.environment()
        check_reward_parts(config.reward, environment)
        defaults = default_verifiers(environment, otherwise=DEFAULT_VERIFIER)
    suites = [get_suite(name) for name in config.suite]
    recipes = {recipe.name: recipe for recipe in suites}
    if len(recipes) < len(suites):
        raise UserError(f"--suite {' '.join(config.suite)}: two of them have the same name; give each suite once")
    for name in copies:
        if name not in recipes:
            raise UserError(f"--suite_data {name}={copies[name]}: there is no --suite {name}; add it or remove this")
    for name in recipes:
        if name in files:
            raise UserError(f"--files {name}={files[name]}: the suite {name} has this name; choose another")
    reading = row_reading(config)
    return [
        *(file_rows(name, path, config=config, reading=reading, defaults=defaults) for name, path in files.items()),
        *(suite_rows(recipe, path=copies.get(name), config=config) for name, recipe in recipes.items()),
    ]


def measure(
    config: EvaluateConfig,
    checkpoints: Mapping[str, str],
    files: Sequence[MeasuredFile],
    *,
    report: Callable[[str], None],
    functions: GivenFunctions | None = None,
) -> tuple[list[CheckpointResponses], list[MeasuredFile]]:
    """Return the judged responses of every checkpoint, and the files with the rows that one of them could not take.

    Each checkpoint's responses are written as soon as it is done. Responses that the output already holds for the same
    checkpoint, rows and settings are reused. Raises UserError for an unusable checkpoint before the first one is measured.

    Args:
        checkpoints: paths by name; the models of `--endpoint` come after them.
        report: gets a line now and then.
        functions: reward functions that are not in a Python file.
    """
    named = dict.fromkeys(verifier for file in files for verifier in file.verifiers)
    judge = partial(make_judge, flag="--reward", workers=config.judge_workers, timeout_s=config.judge_timeout)
    judges = {
        verifier: judge(verifier, given=functions)
        for verifier in named
        if reward_part(verifier) is None and not reward_list(verifier)
    }
    for file in files:
        for verifier in filter(judges.__contains__, file.verifiers):
            judges[verifier].check_rows(list(file.rows.values()))
    if checkpoints:
        prepare_process()
        _check_checkpoints(config, checkpoints, [row for file in files for row in file.rows.values()])
    assert config.output is not None, "required if checkpoints are measured"
    with locked(lock_of(config.output), output=f"--output {config.output}"):
        subjects = [_local(config, name, path, files) for name, path in checkpoints.items()]
        subjects += _remote(config, report=report)
        found = _measure_all(config, subjects, files, judges=judges, report=report)
    answered = [
        CheckpointResponses(
            name=subject.name,
            path=subject.path,
            files={file.name: found[subject.name, file.name].responses for file in files},
            seconds={file.name: found[subject.name, file.name].seconds for file in files},
        )
        for subject in subjects
    ]
    all_files = []
    for file in files:
        refused = (row for names, one in found.items() if names[1] == file.name for row in one.skipped)
        all_files.append(replace(file, skipped=tuple(sorted({*file.skipped, *refused}, key=lambda row: row.index))))
    return answered, all_files


def _measure_all(
    config: EvaluateConfig,
    subjects: Sequence[_Subject],
    files: Sequence[MeasuredFile],
    *,
    judges: Mapping[str, VerifierJudge | SourceJudge],
    report: Callable[[str], None],
) -> dict[tuple[str, str], Measured]:
    assert config.output is not None, "required if checkpoints are measured"
    before = MeasuredBefore(config.output)
    if not config.overwrite:
        before.read()
    keys = {(subject.name, file.name): subject.key(file) for subject in subjects for file in files}
    taken = {names: before.take(*names, key) for names, key in keys.items()}
    found = {names: measured for names, measured in taken.items() if measured is not None}
    if config.agent is not None and config.checkpoints:
        played = (response.episode for one in found.values() for response in one.responses if response.episode)
        shown = {path for episode in played for turn in episode.said for path in turn.images}
        PictureFolder.next_to(config.output).clear(but=shown)
    for subject in subjects:
        again = [file.name for file in files if (subject.name, file.name) in found]
        missing = [file for file in files if file.name not in again]
        if again:
            report(
                f"{subject.said}: {', '.join(again)} as measured before, in {before.path} (--overwrite measures again)"
            )
        if missing:
            found |= _measured(config, subject, missing, keys=keys, judges=judges, report=report)
            # Replace the earlier output only when there is a new result, not before an engine has started.
            before.write(found)
    ordered = {names: found[names] for names in keys}
    before.write(ordered)
    return ordered


@dataclass(frozen=True, kw_only=True)
class _Subject:
    """What is measured: a checkpoint in this process, or a model of an endpoint."""

    name: str
    path: str
    said: str
    make: Callable[[], Responder]
    key: Callable[[MeasuredFile], str | None]
    """What its responses to a file depend on; None if unknown."""


def _local(config: EvaluateConfig, name: str, path: str, files: Sequence[MeasuredFile]) -> _Subject:
    base, _ = split_adapter(path, None)
    settings = _engine_settings(config, path, files)

    def make() -> Responder:
        return playing(make_engine(config.backend, base, settings), episode_settings(config))

    return _Subject(name=name, path=path, said=path, make=make, key=partial(measured_key, config, path))


def episode_settings(config: EvaluateConfig) -> EpisodeSettings | None:
    if config.agent is None:
        return None
    return EpisodeSettings(agent=config.agent, limits=episode_limits(config), seed=config.seed, pictures="small")


def _remote(config: EvaluateConfig, *, report: Callable[[str], None]) -> list[_Subject]:
    """Return each `--model`, after a check that the server can be reached and accepts the key."""
    if config.endpoint is None:
        return []
    assert config.output is not None, "required with an endpoint"
    log = AnswerLog(answers_path(config.output))
    if log.known:
        report(f"{log.path}: holds the answers to {log.known:,} requests, which are not sent again")
    api_key = None
    if config.api_key_env is not None:
        if not (api_key := os.environ.get(config.api_key_env, "").strip()):
            raise UserError(
                f"--api_key_env {config.api_key_env}: this environment variable is not set or empty; export the key"
            )
    models = [
        GeneratorEndpoint(
            url=config.endpoint,
            model=model,
            api_key=api_key,
            concurrency=config.endpoint_concurrency,
            timeout_seconds=config.endpoint_timeout,
            attempts=config.endpoint_attempts,
            body=endpoint_fields(config),
        )
        for model in config.model
    ]
    with contextlib.closing(EndpointEngine(models[0], log=log)) as engine:
        engine.check()
    return [
        _Subject(
            name=settings.model,
            path=settings.url,
            said=settings.model,
            make=partial(EndpointEngine, settings, log=log),
            # The model of an endpoint may change; its log holds what was answered.
            key=lambda file: None,
        )
        for settings in models
    ]


def _fitted(
    config: EvaluateConfig, subject: _Subject, file: MeasuredFile, *, report: Callable[[str], None]
) -> Mapping[int, Row]:
    """Return rows whose images are scaled down if they are too long by them."""
    if subject.path == config.endpoint or config.agent is not None or config.overlong_images == "keep":
        return file.rows
    checkpoint = Checkpoint(split_adapter(subject.path, None)[0], trust_remote_code=config.trust_remote_code)
    fitting = ImageFitting(checkpoint=checkpoint, max_len=config.max_model_len, wanted=file.sampling["max_new_tokens"])
    rows = {index: fitting.fitted(row) for index, row in file.rows.items()}
    if told := fitting.told(prefix="--"):
        report(f"{subject.said}: {file.name}: {told}")
    return rows


REPORTED_ROWS = 256
"""Progress is reported each time this many rows are done."""


def _answers(
    engine: Responder,
    rows: Mapping[int, Row],
    sampling: SamplingSettings,
    *,
    what: str,
    report: Callable[[str], None],
    pictures: PictureFolder | None,
) -> tuple[dict[int, tuple[Completion, ...]], tuple[SkippedRow, ...], float]:
    """Return the responses by the row's index, in the order of the rows, the rows left out, and the seconds taken."""
    began = time.perf_counter()
    found: dict[int, tuple[Completion, ...]] = {}
    skipped: list[SkippedRow] = []
    for done, outcome in enumerate(engine.respond(rows.items(), sampling), start=1):
        if outcome.reason is None:
            found[outcome.index] = (outcome if pictures is None else outcome.with_images(pictures.kept)).completions
        else:
            skipped.append(SkippedRow(index=outcome.index, reason=outcome.reason))
        if done % REPORTED_ROWS == 0 or done == len(rows):
            report(f"{what} {done}/{len(rows)} rows")
    if not found:
        raise UserError(f"none of {len(rows)} rows can be answered; the first: {skipped[0].reason}")
    return {index: found[index] for index in rows if index in found}, tuple(skipped), time.perf_counter() - began


def _measured(
    config: EvaluateConfig,
    subject: _Subject,
    files: Sequence[MeasuredFile],
    *,
    keys: Mapping[tuple[str, str], str | None],
    judges: Mapping[str, VerifierJudge | SourceJudge],
    report: Callable[[str], None],
) -> dict[tuple[str, str], Measured]:
    rows = {file.name: _fitted(config, subject, file, report=report) for file in files}
    pictures = None if config.agent is None or config.output is None else PictureFolder.next_to(config.output)
    with contextlib.closing(subject.make()) as engine:
        answered = {
            file.name: _answers(
                engine,
                rows[file.name],
                SamplingSettings(top_p=config.top_p, **file.sampling),
                what=f"{subject.said}: {file.name}",
                report=report,
                pictures=pictures,
            )
            for file in files
        }
    measured = {}
    # Judge only after the engine has stopped, because judging would compete with it for cores.
    with contextlib.ExitStack() as stack:
        for judge in judges.values():
            stack.enter_context(judge)
        for file in files:
            names = subject.name, file.name
            completions, skipped, seconds = answered[file.name]
            responses = judge_responses(completions, checkpoint=subject.name, file=file, judges=judges)
            # Rows may be left out for a temporary reason, a network or an environment: they are tried again.
            images = (part.source for row in file.rows.values() for part in images_of(row.messages))
            may_pass = config.agent is not None or any(kind_of(source) == "url" for source in images)
            measured[names] = Measured(
                key="" if skipped and may_pass else keys[names] or "",
                responses=tuple(responses),
                skipped=skipped,
                seconds=seconds,
            )
    return measured


def _engine_settings(config: EvaluateConfig, path: str, files: Sequence[MeasuredFile]) -> EngineSettings:
    base, adapter = split_adapter(path, None)
    shown_images = 0
    if config.agent is not None and kit_of(base, trust_remote_code=config.trust_remote_code).takes_images:
        shown_images = config.agent_max_images
    rows = [row for file in files for row in file.rows.values()]
    return EngineSettings(
        adapter=adapter,
        **config.loading,
        max_model_len=config.max_model_len,
        max_images=max(len(images_of(row.messages)) for row in rows) + shown_images,
        max_videos=max(len(videos_of(row.messages)) for row in rows),
        batch_rows=config.batch_rows,
        speculation=config.speculation,
    )


def _check_checkpoints(config: EvaluateConfig, checkpoints: Mapping[str, str], rows: Sequence[Row]) -> None:
    for name, path in checkpoints.items():
        path, _ = split_adapter(path, None)
        checkpoint = Checkpoint(path, trust_remote_code=config.trust_remote_code)
        instead = PLAIN_TRANSFORMERS if config.agent is None else "play episodes with a model that vLLM has"
        check_backend(config.backend, checkpoint.kit, model=f"--checkpoints {name}={path}", instead=instead)
        check_pixel_bounds(config, checkpoint, model=f"--checkpoints {name}={path}")
        check_embeddings(checkpoint)
        check_weights(path)
        check_images_taken(rows, kit=checkpoint.kit, model=f"--checkpoints {name}={path}")
