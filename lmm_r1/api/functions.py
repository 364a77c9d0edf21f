"""The functions of the package: training, generation and evaluation, as the commands do them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from lmm_r1.api.settings import IMAGE_DIR, Rows, Settings, image_dir, is_messages, own_process, read_config, row_file
from lmm_r1.cli.training import begin_workers, prepare_training
from lmm_r1.config import PPOConfig, SFTConfig, resolve
from lmm_r1.config.evaluate import EvaluateConfig, page_path
from lmm_r1.config.generation import BatchConfig
from lmm_r1.config.hardware import check_machine
from lmm_r1.config.rewards import GIVEN
from lmm_r1.data.files import SkippedRow
from lmm_r1.errors import UserError
from lmm_r1.records.metrics import METRICS_FILE, MetricLog, read_metrics
from lmm_r1.records.run_folder import RunFolder, read_stage

if TYPE_CHECKING:
    from lmm_r1.evaluation.board import Board


@dataclass(frozen=True, kw_only=True)
class GeneratedResponse:
    """One response."""

    text: str
    """Without its end token."""
    tokens: int
    finish_reason: str
    """`stop` if the model ended it, `length` if a limit did."""
    reward: float | None
    """None if nothing judged it."""
    scores: Mapping[str, float]
    """The named parts of the reward."""


@dataclass(frozen=True, kw_only=True)
class AnsweredRow:
    """A row with its responses."""

    index: int
    """Its place in the rows."""
    answer: str
    prompt: Sequence[Mapping[str, Any]]
    """The messages; relative paths of images are absolute."""
    responses: tuple[GeneratedResponse, ...]


@dataclass(frozen=True, kw_only=True)
class Generation:
    """What a call has generated."""

    rows: tuple[AnsweredRow, ...]
    """In the order of the rows."""
    skipped: tuple[SkippedRow, ...]
    """Rows that could not be used, with the reason."""
    output: Path | None
    """The output file; None if none was requested."""

    @property
    def texts(self) -> list[str]:
        """The first response to each row."""
        return [row.responses[0].text for row in self.rows]


def generate(
    checkpoint: str | os.PathLike[str],
    rows: Rows,
    *,
    reward: str | None = None,
    output: str | os.PathLike[str] | None = None,
    **settings: object,
) -> Generation:
    """Generate responses to rows, or to one conversation given as a list of messages.

    Args:
        checkpoint: a folder, a name of the hub, or a `TrainedRun`.
        reward: the verifier that scores every response, as `lmm-r1 batch_inference --reward` names it.
        output: JSON lines, from which the same call resumes; None keeps nothing.
        settings: others of `lmm-r1 batch_inference --help`: `n_samples=4, temperature=1.0, max_new_tokens=256`.

    Raises:
        UserError: a setting or the checkpoint cannot be used, or none of the rows can.
    """
    with own_process({"model": "checkpoint", "data": "rows"}), tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) if output is None else Path(output).absolute().parent
        given: dict[str, object] = {} if reward is None else {"reward": reward}
        if settings.get(IMAGE_DIR) is None:
            given |= image_dir(rows)
        config = BatchConfig(
            model=os.fspath(checkpoint),
            data=row_file([{"messages": rows}] if is_messages(rows) else rows, folder=folder, argument="rows"),
            output=folder / "responses.jsonl" if output is None else Path(output),
        )
        config = read_config(BatchConfig, config, settings, given)
        from lmm_r1.batch import RowLog
        from lmm_r1.batch.run import run_batch
        from lmm_r1.cli.job_progress import job_progress

        report = run_batch(config, progress=job_progress)
        return Generation(
            rows=tuple(map(_answered, RowLog(config.output).records())),
            skipped=tuple(report.skipped),
            output=None if output is None else config.output,
        )


def _answered(record: Mapping[str, Any]) -> AnsweredRow:
    return AnsweredRow(
        index=record["index"],
        answer=record["answer"],
        prompt=record["prompt"],
        responses=tuple(
            GeneratedResponse(
                text=response["text"],
                tokens=response["tokens"],
                finish_reason=response["finish_reason"],
                reward=response.get("reward"),
                scores=response.get("scores", {}),
            )
            for response in record["responses"]
        ),
    )


AnyPath: TypeAlias = "str | os.PathLike[str]"
ROWS = "rows"


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What was measured: `accuracy()` for the figure, `board` for all of them."""

    board: Board
    """Every score with its standard error, the responses, and the comparisons with the baseline."""
    output: Path | None
    """JSON with all scores, next to the responses; None if none was requested."""
    page: Path | None
    """The HTML page with the scores; None if none was requested."""

    def accuracy(self, checkpoint: str | None = None, file: str | None = None) -> float:
        """Return the share of right responses by the first verifier; of several checkpoints or files, of the first.

        Raises UserError for a name that was not measured.
        """
        names = [one.name for one in self.board.checkpoints]
        files = {one.name: one for one in self.board.files}
        checkpoint, file = checkpoint or names[0], file or next(iter(files))
        if (checkpoint, file) not in self.board.cells:
            raise UserError(
                f"{checkpoint} on {file} was not measured; there are {', '.join(names)} on {', '.join(files)}"
            )
        scores = self.board.cells[checkpoint, file].all
        return scores.verifiers[files[file].verifier].accuracy.mean


def evaluate(
    checkpoints: AnyPath | Sequence[AnyPath] | Mapping[str, AnyPath],
    rows: Rows | Mapping[str, Rows],
    *,
    reward: str | Sequence[str] = (),
    output: AnyPath | None = None,
    **settings: object,
) -> Evaluation:
    """Measure checkpoints on rows, by one or more verifiers.

    Args:
        checkpoints: one, several, or several by names; of several the first is the baseline.
        rows: one set of rows, or several by names.
        reward: one or several verifiers, as `lmm-r1 evaluate --reward` names them; by default `math`.
        output: the JSON file, with the responses and a page next to it; None keeps nothing.
        settings: others of `lmm-r1 evaluate --help`: `n_samples=4, temperature=0.6`.

    Raises:
        UserError: a setting, a checkpoint or all rows of a file cannot be used.
    """
    arguments = {"checkpoints": "checkpoints", "files": "rows"}
    with own_process(arguments), tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) if output is None else Path(output).absolute().parent
        named = rows if isinstance(rows, Mapping) else {ROWS: rows}
        files = {name: row_file(own, folder=folder, argument=name) for name, own in named.items()}
        given: dict[str, object] = {
            "checkpoints": [f"{name}={os.fspath(path)}" for name, path in _named(checkpoints).items()],
            "files": [f"{name}={path}" for name, path in files.items()],
            "output": folder / "scores.json" if output is None else Path(output),
        }
        if reward:
            given["reward"] = [reward] if isinstance(reward, str) else list(reward)
        if settings.get(IMAGE_DIR) is None and all(map(image_dir, named.values())):
            given |= image_dir([])
        config = read_config(EvaluateConfig, settings, given)
        from lmm_r1.cli.evaluate import evaluate as run

        kept = output is not None
        board = run(config, told=kept)
        return Evaluation(
            board=board, output=config.output if kept else None, page=page_path(config) if kept else None
        )


def _named(checkpoints: AnyPath | Sequence[AnyPath] | Mapping[str, AnyPath]) -> Mapping[str, AnyPath]:
    if isinstance(checkpoints, Mapping):
        return checkpoints
    paths = [checkpoints] if isinstance(checkpoints, str | os.PathLike) else list(checkpoints)
    names = [os.path.basename(os.path.abspath(path)) for path in paths]
    if len(set(names)) < len(names):
        # Folders of the same name are distinguished by their paths.
        names = [os.fspath(path) for path in paths]
    return dict(zip(names, paths, strict=True))


Config = TypeVar("Config", PPOConfig, SFTConfig)
Reward = Callable[..., Any]
"""A reward function as docs/reward_functions.md describes it: `right(responses, labels)`, for example."""


@dataclass(frozen=True, kw_only=True)
class TrainedRun:
    """A finished stage; it can be passed as the path of a checkpoint."""

    folder: Path
    """The model in Hugging Face format, the settings, metrics, sampled responses and checkpoints."""
    name: str
    steps: int
    seconds: float
    metrics: MetricLog
    """What was logged: `metrics.series("reward")` is a list of (step, value)."""

    def __fspath__(self) -> str:
        return str(self.folder)


def train_rl(
    config: Settings[PPOConfig],
    overrides: Mapping[str, object] | None = None,
    *,
    rows: Rows | None = None,
    eval_rows: Rows | None = None,
    reward: str | Reward | None = None,
) -> TrainedRun:
    """Run one stage of reinforcement learning and return it; the same call resumes a stopped one.

    Args:
        config: as `lmm-r1 train_ppo_ray --help` lists the settings: a mapping, the path of a YAML file, or a `PPOConfig`.
        overrides: settings that go before those of `config`.
        rows: the prompts, in the place of `data.prompt_dataset`; `eval_rows` in that of `eval.dataset`.
        reward: a function, or what `reward.remote_url` takes: a verifier, an address, FILE.py:NAME.

    Raises:
        UserError: what was given cannot be trained, or the run failed; the message says what is saved.
        RunStopped: Ctrl-C or SIGTERM ended it, after a whole step.
    """
    given = {"rows": ("data.prompt_dataset", rows), "eval_rows": ("eval.dataset", eval_rows)}
    function = reward if callable(reward) else None
    named = {} if reward is None else {"reward.remote_url": _source(reward)}
    with own_process(_arguments(given) | dict.fromkeys(named, "reward")):
        _check_sendable(function)
        settings = read_config(PPOConfig, config, overrides or {}, named)
        settings = _ready(settings, given, reward=function)
        from lmm_r1.rl.run import train

        train(settings, reward=function)
        return _finished(settings)


def train_sft(
    config: Settings[SFTConfig],
    overrides: Mapping[str, object] | None = None,
    *,
    rows: Rows | None = None,
    eval_rows: Rows | None = None,
) -> TrainedRun:
    """Fine-tune on rows of messages whose last message is the response; takes, returns and raises what `train_rl` does.

    One process trains on one GPU; a script that `torchrun` starts trains on as many as it has processes.

    Args:
        config: as `lmm-r1 train_sft --help` lists the settings.
        overrides: settings that go before those of `config`.
        rows: in the place of `data.dataset`; `eval_rows` in that of `eval.dataset`.
    """
    given = {"rows": ("data.dataset", rows), "eval_rows": ("eval.dataset", eval_rows)}
    with own_process(_arguments(given)):
        settings = _ready(read_config(SFTConfig, config, overrides or {}), given)
        from lmm_r1.supervised.sft import SFTRun
        from lmm_r1.supervised.start import train

        train(SFTRun, settings)
        return _finished(settings)


_Given = Mapping[str, tuple[str, "Rows | None"]]
"""The setting that each argument with rows replaces."""


def _arguments(given: _Given) -> dict[str, str]:
    return {setting: argument for argument, (setting, rows) in given.items() if rows is not None}


def _ready(config: Config, given: _Given, *, reward: Reward | None = None) -> Config:
    """Return the settings with the rows in them, checked, in a process that is ready to train."""
    folder = Path(config.ckpt.output_dir)
    if not config.ckpt.overwrite:
        # Before rows are written there.
        RunFolder.check_unfinished(folder)
    named = {setting: rows for setting, rows in given.values() if rows is not None}
    if named and config.data.image_dir is None and all(image_dir(rows) for rows in named.values()):
        config = read_config(type(config), config, {f"data.{IMAGE_DIR}": image_dir([])[IMAGE_DIR]})
    # Other settings are checked before anything is written.
    resolve(read_config(type(config), config, dict.fromkeys(named, "rows.jsonl")))
    files = {
        setting: row_file(rows, folder=folder, argument=argument)
        for argument, (setting, rows) in given.items()
        if rows is not None
    }
    config = resolve(read_config(type(config), config, files))
    if isinstance(config, PPOConfig):
        check_machine(config)
    prepare_training(config, reward=reward)
    begin_workers(config)
    return config


def _finished(config: PPOConfig | SFTConfig) -> TrainedRun:
    folder = Path(config.ckpt.output_dir)
    stage = read_stage(folder)
    return TrainedRun(
        folder=folder,
        name=stage.name,
        steps=stage.steps,
        seconds=stage.seconds,
        metrics=read_metrics(folder / METRICS_FILE),
    )


def _source(reward: str | Reward) -> str:
    """Return a reward as the settings name it."""
    if not callable(reward):
        return reward
    return f"{GIVEN}{getattr(reward, '__name__', type(reward).__name__)}"


def _check_sendable(reward: Reward | None) -> None:
    """Raise UserError for a function that cannot travel to the engines, which are processes of their own."""
    if reward is None:
        return
    from ray import cloudpickle

    try:
        cloudpickle.dumps(reward)
    except Exception as error:  # whatever the objects that it holds raise
        raise UserError(
            f"reward: {_source(reward).removeprefix(GIVEN)} cannot be sent to the engines, which run in processes of their own "
            f"({type(error).__name__}: {error}); make what it uses inside of it, and not before"
        ) from error
