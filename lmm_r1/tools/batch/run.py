"""Batch inference over a file of rows: engine, scorer, output and selection."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from lmm_r1.config.generation import EPISODE_FLAGS, BatchConfig, check_batch, episode_limits
from lmm_r1.config.rewards import GivenFunctions, is_function, prompt_for, reward_sources, verifier_from
from lmm_r1.config.run_rows import row_reading
from lmm_r1.data.files import read_row_file
from lmm_r1.data.images import PictureFolder
from lmm_r1.data.messages import NO_PROMPT, Row, SkippedRow, check_asks, images_of, videos_of
from lmm_r1.data.reading import told_prompt
from lmm_r1.data.row_parser import stored_messages
from lmm_r1.errors import UserError
from lmm_r1.files.atomic import lock_of, locked, write_atomically
from lmm_r1.generation.engine import (
    PLAIN_TRANSFORMERS,
    Backend,
    EngineSettings,
    EpisodeSettings,
    Outcome,
    Responder,
    SamplingSettings,
    check_backend,
    make_engine,
    playing,
    prepare_process,
    split_adapter,
)
from lmm_r1.lmm_kits import Checkpoint
from lmm_r1.lmm_kits.checkpoint import ImageFitting, check_embeddings, check_pixel_bounds, check_weights
from lmm_r1.lmm_kits.encoding import text_ids
from lmm_r1.records.run_folder import trained_reading
from lmm_r1.scoring.sources import RemoteScorer, ResponseScorer, RewardModelScorer, make_judge
from lmm_r1.tools.batch import INDEX, MESSAGES, JobTotals, RowLog, load_responses, run_job, select, with_paths
from remote_rm.client import RewardUnavailable
from remote_rm.redaction import hidden_settings
from remote_rm.verifier import Item

BACKENDS: dict[str, Backend] = {"generate_vllm": "vllm", "generate": "transformers"}
# Settings that may differ between two sessions of one job, because they change no response.
NOT_KEPT = (
    *("output", "overwrite", "engines", "batch_rows", "judges", "gpu_memory_utilization", "tensor_parallel_size"),
    *("enforce_eager", "select", "selected", "min_reward", "max_per_prompt", "min_margin"),
)
Progress = Callable[..., AbstractContextManager[Callable[[JobTotals], None]]]
"""(what, *, total, done) -> a context whose value is called with the totals of the job."""
_Scoring = AbstractContextManager[ResponseScorer | None]


@dataclass(frozen=True, kw_only=True)
class BatchReport:
    """What a session of a job has done."""

    totals: JobTotals
    rows: int
    """Rows of the whole job."""
    done_before: int
    seconds: float
    skipped: list[SkippedRow] = field(default_factory=list)
    """Rows that were left out, in this session and before."""
    selected: int | None = None
    summary: str | None = None
    """The file of rows and the format that was detected."""


@dataclass(frozen=True, kw_only=True)
class _Plan:
    log: RowLog
    rows: int
    order: list[int]
    summary: str | None = None


def run_batch(config: BatchConfig, *, progress: Progress, given: GivenFunctions | None = None) -> BatchReport:
    """Do the job, or resume it; `given` are reward functions in no file. Raises UserError for invalid input and a full disk."""
    check_batch(config)
    if config.system_prompt is None:
        prompt, _ = trained_reading([config.model, str(config.adapter or config.model)])
        if prompt is None and config.reward is not None and config.agent is None:
            prompt = prompt_for([config.reward])
        # As in outputs that were made before there were such prompts.
        config = replace(config, system_prompt=None if prompt == NO_PROMPT else prompt)
    log = RowLog(config.output)
    # Outputs made before these flags existed do not have them in their settings.
    unused = EPISODE_FLAGS if config.agent is None else ()
    unused += ("overlong_images",) if config.overlong_images == BatchConfig.overlong_images else ()
    settings = json.loads(json.dumps(asdict(config), default=str))
    kept = {
        name: hidden_settings(value, name=name) for name, value in settings.items() if name not in (*NOT_KEPT, *unused)
    }
    prepare_process()
    began = time.perf_counter()
    task = _score_given if config.eval_task == "rm" else _generate
    try:
        with locked(lock_of(config.output), output=f"--output {config.output}"):
            plan, totals = task(config, log, scoring=_scorer(config, given=given), kept=kept, progress=progress)
    except RewardUnavailable as error:
        # Not the fault of a row: finished rows stay, and the same command resumes.
        raise UserError(f"{config.judge_flag} {config.judge}: {error}") from error
    return BatchReport(
        totals=totals,
        rows=plan.rows,
        done_before=plan.rows - len(plan.order),
        seconds=time.perf_counter() - began,
        skipped=log.skipped(),
        selected=None if config.select is None else _select(config, log),
        summary=plan.summary,
    )


def _generate(
    config: BatchConfig, log: RowLog, *, scoring: _Scoring, kept: dict[str, object], progress: Progress
) -> tuple[_Plan, JobTotals]:
    read = read_row_file(
        config.data,
        split=config.split,
        max_rows=config.max_rows,
        reading=row_reading(config, asked_only=True),
        answer_required=config.reward is not None,
        bad_rows="skip",
    )
    rows, skipped = read.rows, read.skipped
    path, adapter = split_adapter(config.model, config.adapter)
    _check_models(config, path)
    episodes = _episodes(config)
    checkpoint = Checkpoint(path, trust_remote_code=config.trust_remote_code)
    fitting = ImageFitting(checkpoint=checkpoint, max_len=config.max_model_len, wanted=config.max_new_tokens)
    if config.overlong_images == "scale" and episodes is None:
        rows = {index: fitting.fitted(row) for index, row in rows.items()}
    first = log.open(kept, overwrite=config.overwrite, flag="--output")
    _check_same_data(config, log, rows)
    everything: dict[int, Row | str] = {**rows, **{row.index: row.reason for row in skipped}}
    todo = {index: everything[index] for index in sorted(everything) if index >= first}
    prompt = told_prompt(config.system_prompt, rows.values(), flag="--system_prompt")
    summary = "\n".join(filter(None, (read.summary_as_prompts, prompt, fitting.told(prefix="--"))))
    plan = _Plan(log=log, rows=len(rows) + len(skipped), order=list(todo), summary=summary)
    if not todo:
        return plan, JobTotals()
    if episodes is not None and first == 0:
        PictureFolder.next_to(log.path).clear()
    shown_images = config.agent_max_images if episodes and checkpoint.kit.takes_images else 0
    settings = EngineSettings(
        adapter=adapter,
        **config.loading,
        max_model_len=config.max_model_len,
        max_images=max(len(images_of(row.messages)) for row in rows.values()) + shown_images,
        max_videos=max(len(videos_of(row.messages)) for row in rows.values()),
        batch_rows=config.batch_rows,
        speculation=config.speculation,
    )
    with scoring as scorer, contextlib.closing(_responder(config, path, settings, episodes)) as engine:
        return plan, _run(config, plan, _outcomes(engine, todo, config), scorer=scorer, progress=progress)


def _score_given(
    config: BatchConfig, log: RowLog, *, scoring: _Scoring, kept: dict[str, object], progress: Progress
) -> tuple[_Plan, JobTotals]:
    def tokens(text: str) -> int | None:
        """Of a response for the reward model; unknown for a remote one."""
        return None if checkpoint is None else len(text_ids(checkpoint.kit, checkpoint.processor, text))

    remote = config.judge_is_remote
    checkpoint = None if remote else Checkpoint(config.model, trust_remote_code=config.trust_remote_code)
    outcomes, skipped = load_responses(
        config.data,
        split=config.split,
        max_rows=config.max_rows,
        reading=row_reading(config, asked_only=True),
        count_tokens=tokens,
    )
    first = log.open(kept, overwrite=config.overwrite, flag="--output")
    _check_same_data(config, log, {outcome.index: outcome.row for outcome in outcomes if outcome.row is not None})
    left_out = (Outcome(index=row.index, reason=row.reason) for row in skipped)
    todo = [outcome for outcome in (*outcomes, *left_out) if outcome.index >= first]
    plan = _Plan(log=log, rows=len(outcomes) + len(skipped), order=sorted(outcome.index for outcome in todo))
    if not todo:
        return plan, JobTotals()
    with scoring as scorer:
        return plan, _run(config, plan, iter(todo), scorer=scorer, progress=progress)


def _check_same_data(config: BatchConfig, log: RowLog, rows: Mapping[int, Row]) -> None:
    """Raise UserError if the last finished row of an earlier session differs from that row in the data."""
    if log.last is None:
        return
    row = rows.get(log.last[INDEX])
    if row is None or stored_messages(row.messages) != log.last["prompt"]:
        raise UserError(
            f"--output {config.output} ends with row {log.last[INDEX]}, which has changed in --data {config.data}; "
            "choose another file or add --overwrite"
        )


def _run(
    config: BatchConfig, plan: _Plan, outcomes: Iterator[Outcome], *, scorer: ResponseScorer | None, progress: Progress
) -> JobTotals:
    with progress(config.eval_task, total=plan.rows, done=plan.rows - len(plan.order)) as on_progress:
        return run_job(outcomes, order=plan.order, log=plan.log, scorer=scorer, on_progress=on_progress)


def _outcomes(engine: Responder, todo: dict[int, Row | str], config: BatchConfig) -> Iterator[Outcome]:
    sampling = SamplingSettings(
        n_samples=config.n_samples,
        temperature=config.temperature,
        top_p=config.top_p,
        max_new_tokens=config.max_new_tokens,
    )
    good: list[tuple[int, Row]] = []
    for index, item in todo.items():
        if isinstance(item, str):
            yield Outcome(index=index, reason=item)
            continue
        try:
            check_asks(item)
        except UserError as error:
            yield Outcome(index=index, reason=str(error))
        else:
            good.append((index, item))
    yield from engine.respond(good, sampling)


def _responder(
    config: BatchConfig, path: str, settings: EngineSettings, episodes: EpisodeSettings | None
) -> Responder:
    backend = BACKENDS[config.eval_task]
    if config.engines > 1:
        from lmm_r1.tools.batch.ray_engines import RayEngines

        return RayEngines(backend, path, settings, count=config.engines, episodes=episodes)
    return playing(make_engine(backend, path, settings), episodes)


def _episodes(config: BatchConfig) -> EpisodeSettings | None:
    if config.agent is None:
        return None
    episodes = EpisodeSettings(agent=config.agent, limits=episode_limits(config), seed=config.seed, pictures="whole")
    environment = episodes.environment()
    if config.reward is not None:
        item = Item(prompt="", response="", label="")
        verifiers = [verifier_from(one) for one in reward_sources(config.reward) if not is_function(one)]
        judged = {name for verifier in verifiers for name in verifier.failed_score(item).parts}
        if twice := sorted(set(environment.rewards) & judged):
            raise UserError(
                f"--agent {config.agent} and --reward {config.reward} both give {', '.join(twice)}; omit --reward, so "
                "that only the environment gives rewards, or choose another agent or verifier"
            )
    elif config.select is not None and not environment.rewards:
        raise UserError(
            f"--select {config.select} needs rewards, and the environment {environment.name} gives none: add --reward math"
        )
    return episodes


@contextlib.contextmanager
def _scorer(config: BatchConfig, *, given: GivenFunctions | None) -> Iterator[ResponseScorer | None]:
    path = config.judge
    if path is not None and config.judge_is_remote:
        with RemoteScorer(path, flag=config.judge_flag) as remote:
            yield remote
    elif path is not None:
        yield RewardModelScorer(
            path,
            dtype=config.dtype,
            max_len=config.max_model_len,
            max_batch_tokens=config.max_batch_tokens,
            normalize=config.normalize_reward,
            trust_remote_code=config.trust_remote_code,
        )
    elif config.reward is not None:
        with make_judge(config.reward, flag="--reward", workers=config.judges, given=given) as scorer:
            yield scorer
    else:
        yield None


def _select(config: BatchConfig, log: RowLog) -> int:
    assert config.select is not None, "the caller checks this"
    assert config.selected is not None, "the config check requires both or neither"
    selected: Iterator[Mapping[str, Any]] = select(
        log.records(),
        kind=config.select,
        min_reward=config.min_reward,
        max_per_prompt=config.max_per_prompt,
        min_margin=config.min_margin,
    )
    start, end = config.output.absolute().parent, config.selected.absolute().parent

    def moved(path: str) -> str:
        """Let the relative path of a picture start at the selected file's folder instead of the output's."""
        return path if os.path.isabs(path) else os.path.relpath(start / path, end)

    rows = [{**row, MESSAGES: with_paths(row[MESSAGES], moved)} if MESSAGES in row else row for row in selected]
    write_atomically(config.selected, text="".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return len(rows)


def _check_models(config: BatchConfig, path: str) -> None:
    """Raise UserError for what the engine would only report after loading the model."""
    model = Checkpoint(path, trust_remote_code=config.trust_remote_code)
    if config.eval_task != "rm":
        instead = PLAIN_TRANSFORMERS if config.agent is None else "play episodes with a model that vLLM has"
        check_backend(BACKENDS[config.eval_task], model.kit, model=f"--model {path}", instead=instead)
    check_pixel_bounds(config, model, model=f"--model {path}")
    for checkpoint in filter(None, (path, None if config.judge_is_remote else config.reward_model)):
        check_embeddings(Checkpoint(checkpoint, trust_remote_code=config.trust_remote_code))
        check_weights(checkpoint)
