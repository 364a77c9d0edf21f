"""The functions of the package: training, generation and evaluation, as the commands do them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict, TypeVar

from lmm_r1.api import IMAGE_DIR, Rows, Settings, image_dir, is_messages, own_process, read_config, row_file
from lmm_r1.cli.training import prepare_training, train_run
from lmm_r1.config import DPOConfig, KDConfig, PPOConfig, RMConfig, SFTConfig, SupervisedConfig, resolve
from lmm_r1.config.evaluate import EvaluateConfig, page_path
from lmm_r1.config.generation import BatchConfig
from lmm_r1.config.rewards import GIVEN, GivenFunctions, reward_list
from lmm_r1.data.messages import SkippedRow
from lmm_r1.errors import UserError
from lmm_r1.files.json_files import checked
from lmm_r1.records.metrics import METRICS_FILE, Callbacks, MetricLog, StepCallback, read_metrics
from lmm_r1.records.run_folder import RunFolder, read_stage

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from typing_extensions import Unpack

    from lmm_r1.tools.evaluation.board import Board


Reward: TypeAlias = Callable[..., Any]
"""A reward function as docs/reward_functions.md describes it: `right(responses, labels)`, for example."""
Rewards: TypeAlias = "str | Reward | Sequence[str | Reward | tuple[str | Reward, float]]"


@dataclass(frozen=True, kw_only=True)
class GeneratedResponse:
    """One response."""

    text: str
    """Without its end token."""
    tokens: int
    finish_reason: str
    """`stop` if the model ended it, `length` if a limit did."""
    reward: float | None = None
    """None if nothing judged it."""
    scores: Mapping[str, float] = field(default_factory=dict)
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
    reward: Rewards | None = None,
    output: str | os.PathLike[str] | None = None,
    **settings: object,
) -> Generation:
    """Generate responses to rows, or to one conversation given as a list of messages.

    Args:
        checkpoint: a folder, a name of the hub, or a `TrainedRun`.
        reward: what scores every response: `"math"`, a function, or a list of them with weights, as in `train_rl`.
        output: JSON lines, from which the same call resumes; None keeps nothing.
        settings: others of `lmm-r1 batch_inference --help`: `n_samples=4, temperature=1.0, max_new_tokens=256`.

    Raises:
        UserError: a setting or the checkpoint cannot be used, or none of the rows can.
    """
    with own_process(), tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) if output is None else Path(output).absolute().parent
        spec, functions = named_rewards(reward)
        given: dict[str, object] = {"reward": spec} if spec else {}
        if settings.get(IMAGE_DIR) is None:
            given |= image_dir(rows)
        config = BatchConfig(
            model=os.fspath(checkpoint),
            data=row_file([{"messages": rows}] if is_messages(rows) else rows, folder=folder, argument="rows"),
            output=folder / "responses.jsonl" if output is None else Path(output),
        )
        config = read_config(BatchConfig, config, settings, given)
        from lmm_r1.cli import job_progress
        from lmm_r1.tools.batch import RowLog
        from lmm_r1.tools.batch.run import run_batch

        report = run_batch(config, progress=job_progress, given=functions)
        return Generation(
            rows=tuple(checked(AnsweredRow, one, place=str(config.output)) for one in RowLog(config.output).records()),
            skipped=tuple(report.skipped),
            output=None if output is None else config.output,
        )


AnyPath: TypeAlias = "str | os.PathLike[str]"
ROWS, EVAL_ROWS = "rows", "eval_rows"


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
        return self.board.cells[checkpoint, file].all.verifiers[files[file].verifier].accuracy.mean


def evaluate(
    checkpoints: AnyPath | Sequence[AnyPath] | Mapping[str, AnyPath],
    rows: Rows | Mapping[str, Rows],
    *,
    reward: Rewards = (),
    output: AnyPath | None = None,
    **settings: object,
) -> Evaluation:
    """Measure checkpoints on rows, by one or more rewards.

    Args:
        checkpoints: one, several, or several by names; of several the first is the baseline.
        rows: one set of rows, or several by names.
        reward: as in `train_rl`, by default `math`; the first part gives the accuracy. A list of names without weights has
            no sum.
        output: the JSON file, with the responses and a page next to it; None keeps nothing.
        settings: others of `lmm-r1 evaluate --help`: `n_samples=4, temperature=0.6`.

    Raises:
        UserError: a setting, a checkpoint or all rows of a file cannot be used.
    """
    with own_process(), tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) if output is None else Path(output).absolute().parent
        named = rows if isinstance(rows, Mapping) else {ROWS: rows}
        files = {name: row_file(own, folder=folder, argument=name) for name, own in named.items()}
        given: dict[str, object] = {
            "checkpoints": [f"{name}={os.fspath(path)}" for name, path in _named(checkpoints).items()],
            "files": [f"{name}={path}" for name, path in files.items()],
            "output": folder / "scores.json" if output is None else Path(output),
        }
        spec, functions = named_rewards(reward)
        parts = () if isinstance(reward, str) or callable(reward) else reward
        if spec:
            # Names without weights are several rewards, as for the flag.
            apart = all(isinstance(one, str) and not reward_list(one) for one in parts)
            given["reward"] = list(parts) if parts and apart else [spec]
        if settings.get(IMAGE_DIR) is None and all(map(image_dir, named.values())):
            given |= image_dir([])
        config = read_config(EvaluateConfig, settings, given)
        from lmm_r1.cli.evaluate import evaluate as run

        kept = output is not None
        board = run(config, told=kept, functions=functions)
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

    def model(self) -> PreTrainedModel:
        """Return the trained model, loaded in the precision of its files, with its generation cache on."""
        from lmm_r1.lmm_kits import Checkpoint
        from lmm_r1.lmm_kits.checkpoint import torch_dtype

        checkpoint = Checkpoint(str(self.folder))
        dtype = torch_dtype("auto", config=checkpoint.config)
        model = checkpoint.load_model(dtype=dtype, attn_implementation="sdpa").eval()
        model.config.get_text_config().use_cache = model.config.use_cache = True
        return model

    def processor(self) -> Any:
        """Return the processor, or the tokenizer of a text model, that belongs to `model`."""
        from lmm_r1.lmm_kits import Checkpoint

        return Checkpoint(str(self.folder)).processor


class TrainKeywords(TypedDict, total=False):
    """The rows of every training function and the settings that most runs change; all others go into `config`."""

    rows: Rows | None
    """In the place of `data.dataset`, in RL of `data.prompt_dataset`."""
    eval_rows: Rows | None
    """In the place of `eval.dataset`."""
    model: AnyPath
    output: AnyPath
    """Folder of the run."""
    lr: float
    epochs: int
    """Passes over the rows."""
    max_steps: int
    batch_size: int
    """Responses, rows or pairs of an update."""
    max_len: int
    """Longest sequence in tokens: prompt, images and response together."""
    lora_rank: int
    max_pixels: int
    """Larger images are scaled down to this many pixels."""
    on_step: StepCallback
    """Takes the step and its metrics; if it returns False, the run ends there and saves its model."""
    on_evaluation: StepCallback
    """The same with the metrics of an evaluation, such as `eval_default_pass1`."""


class RLKeywords(TrainKeywords, total=False):
    """Those of `train_rl`."""

    n_samples: int
    """Responses to each prompt."""
    max_new_tokens: int
    kl: float
    """Weight of the KL divergence from the reference; 0 needs no reference."""
    system_prompt: str


class KDKeywords(TrainKeywords, total=False):
    """Those of `train_kd`."""

    teacher: AnyPath


_SHARED = {
    "output": "ckpt.output_dir",
    "max_steps": "train.max_steps",
    "batch_size": "train.batch_size",
    "max_len": "data.max_len",
    "lora_rank": "ds.lora.rank",
    "max_pixels": "data.max_pixels",
}
_OF_RL = _SHARED | {
    "model": "actor.model_name_or_path",
    "lr": "actor.adam.lr",
    "epochs": "train.num_episodes",
    "n_samples": "rollout.n_samples_per_prompt",
    "max_new_tokens": "rollout.max_new_tokens",
    "kl": "algo.kl.init_coef",
    "system_prompt": "data.system_prompt",
}
_SUPERVISED = _SHARED | {"model": "model.model_name_or_path", "lr": "adam.lr", "epochs": "train.max_epochs"}
_OF_KD = _SUPERVISED | {"teacher": "teacher.model_name_or_path"}


def train_rl(
    config: Settings[PPOConfig] | None = None,
    overrides: Mapping[str, object] | None = None,
    *,
    reward: Rewards | None = None,
    **keywords: Unpack[RLKeywords],
) -> TrainedRun:
    """Run one stage of reinforcement learning and return it; the same call resumes a stopped one.

    Args:
        config: as `lmm-r1 train_ppo_ray --help` lists the settings: a mapping, the path of a YAML file, or a `PPOConfig`.
        overrides: settings that go before those of `config`.
        reward: a function, or what `reward.remote_url` takes: a verifier, an address, FILE.py:NAME; or a list of functions,
            verifiers and files, each alone or with its weight: `[right, "format=0.5", (length, 0.1)]`.
        keywords: those of `RLKeywords`; they go before all others.

    Raises:
        UserError: what was given cannot be trained, or the run failed; the message says what is saved.
        RunStopped: Ctrl-C or SIGTERM ended it, after a whole step.
    """
    given = _given_rows(keywords, "data.prompt_dataset")
    named, callbacks = _named_settings(keywords, _OF_RL)
    with own_process():
        spec, functions = named_rewards(reward)
        source = {"reward.remote_url": spec} if spec else {}
        settings = read_config(PPOConfig, config or {}, overrides or {}, named, source)
        settings = _ready(settings, given, reward=functions)
        from lmm_r1.rl.run import train
        from lmm_r1.tools.planning.choices import planned

        train(settings, plan=planned, reward=functions, callbacks=callbacks)
        return _finished(settings)


def train_sft(
    config: Settings[SFTConfig] | None = None,
    overrides: Mapping[str, object] | None = None,
    **keywords: Unpack[TrainKeywords],
) -> TrainedRun:
    """Fine-tune on rows of messages whose last message is the response; takes, returns and raises what `train_rl` does.

    One process trains on one GPU; a script that `torchrun` starts trains on as many as it has processes.

    Args:
        config: as `lmm-r1 train_sft --help` lists the settings.
        overrides: settings that go before those of `config`.
        keywords: those of `TrainKeywords`; they go before all others.
    """
    return _supervised("sft:SFTRun", SFTConfig, config, overrides, keywords)


def train_dpo(
    config: Settings[DPOConfig] | None = None,
    overrides: Mapping[str, object] | None = None,
    **keywords: Unpack[TrainKeywords],
) -> TrainedRun:
    """Train on pairs of a chosen and a rejected response, as `lmm-r1 train_dpo` does; otherwise as `train_sft`."""
    return _supervised("pairs:DPORun", DPOConfig, config, overrides, keywords)


def train_rm(
    config: Settings[RMConfig] | None = None,
    overrides: Mapping[str, object] | None = None,
    **keywords: Unpack[TrainKeywords],
) -> TrainedRun:
    """Train a reward model on such pairs, as `lmm-r1 train_rm` does; otherwise as `train_sft`."""
    return _supervised("pairs:RMRun", RMConfig, config, overrides, keywords)


def train_kd(
    config: Settings[KDConfig] | None = None,
    overrides: Mapping[str, object] | None = None,
    **keywords: Unpack[KDKeywords],
) -> TrainedRun:
    """Train a student to predict like the `teacher`, as `lmm-r1 train_kd` does; otherwise as `train_sft`."""
    return _supervised("sft:KDRun", KDConfig, config, overrides, keywords)


Config = TypeVar("Config", PPOConfig, SFTConfig, DPOConfig, RMConfig, KDConfig)


def _supervised(
    run_class: str,
    config_class: type[Config],
    config: Settings[Config] | None,
    overrides: Mapping[str, object] | None,
    keywords: Mapping[str, object],
) -> TrainedRun:
    """Run a supervised stage.

    Args:
        run_class: MODULE:CLASS below `lmm_r1.supervised`, which is imported when the settings are right.
    """
    given = _given_rows(keywords, "data.dataset")
    known = _OF_KD if config_class is KDConfig else _SUPERVISED
    named, callbacks = _named_settings(keywords, known)
    with own_process():
        settings: Any = _ready(read_config(config_class, config or {}, overrides or {}, named), given)
        train_run(f"lmm_r1.supervised.{run_class}", settings, callbacks=callbacks)
        return _finished(settings)


def _named_settings(keywords: Mapping[str, Any], known: Mapping[str, str]) -> tuple[dict[str, object], Callbacks]:
    """Return keyword arguments as settings, and the functions among them; raises TypeError for others, as Python does."""
    callbacks = {name: keywords[name] for name in ("on_step", "on_evaluation") if name in keywords}
    settings = {name: value for name, value in keywords.items() if name not in (*callbacks, ROWS, EVAL_ROWS)}
    if unknown := settings.keys() - known.keys():
        raise TypeError(f"unexpected keyword argument {min(unknown)!r}; there are {', '.join(known)}, and `config`")
    return {known[name]: value for name, value in settings.items()}, Callbacks(**callbacks)


_Given = Mapping[str, tuple[str, Rows]]
"""The setting that each argument with rows replaces, and the rows."""


def _given_rows(keywords: Mapping[str, Any], dataset: str) -> _Given:
    settings = {ROWS: dataset, EVAL_ROWS: "eval.dataset"}
    return {name: (flag, keywords[name]) for name, flag in settings.items() if keywords.get(name) is not None}


def _ready(config: Config, given: _Given, *, reward: GivenFunctions | None = None) -> Config:
    """Return the settings with the rows in them, checked, in a process that is ready to train."""
    folder = Path(config.ckpt.output_dir)
    if not config.ckpt.overwrite:
        # Before rows are written there.
        RunFolder.check_unfinished(folder)
    if given and config.data.image_dir is None and all(image_dir(rows) for _, rows in given.values()):
        config = read_config(type(config), config, {f"data.{IMAGE_DIR}": image_dir([])[IMAGE_DIR]})
    # Other settings are checked before anything is written.
    resolve(read_config(type(config), config, {setting: "rows.jsonl" for setting, _ in given.values()}))
    files = {setting: row_file(rows, folder=folder, argument=argument) for argument, (setting, rows) in given.items()}
    config = resolve(read_config(type(config), config, files))
    prepare_training(config, reward=reward)
    return config


def _finished(config: PPOConfig | SupervisedConfig) -> TrainedRun:
    folder = Path(config.ckpt.output_dir)
    stage = read_stage(folder)
    return TrainedRun(
        folder=folder,
        name=stage.name,
        steps=stage.steps,
        seconds=stage.seconds,
        metrics=read_metrics(folder / METRICS_FILE),
    )


def named_rewards(reward: Rewards | None) -> tuple[str, dict[str, Reward]]:
    """Return rewards as `--reward` names them, empty without any, and the functions among them by name.

    Raises UserError for two functions of one name.
    """
    entries = [reward] if isinstance(reward, str) or callable(reward) else reward or ()
    functions: dict[str, Reward] = {}
    names = []
    for entry in entries:
        one, weight = entry if isinstance(entry, tuple) else (entry, None)
        if not isinstance(one, str):
            name = getattr(one, "__name__", type(one).__name__)
            if name in functions:
                raise UserError(f"reward: two functions are called {name}; rename one")
            functions[name], one = one, f"{GIVEN}{name}"
        names.append(one if weight is None else f"{one}={weight}")
    return ",".join(names), functions
