"""Stages of training as functions: `train_rl` is `lmm-r1 train_ppo_ray`, `train_sft` is `lmm-r1 train_sft`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from lmm_r1.api.settings import IMAGE_DIR, Rows, Settings, image_dir, own_process, read_config, row_file
from lmm_r1.cli.training import begin_workers, prepare_training
from lmm_r1.config import PPOConfig, SFTConfig, resolve
from lmm_r1.config.hardware import check_machine
from lmm_r1.config.rewards import GIVEN
from lmm_r1.errors import UserError
from lmm_r1.records.metrics import METRICS_FILE, MetricLog, read_metrics
from lmm_r1.records.run_folder import RunFolder, read_stage

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
        settings = _ready(settings, given)
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


def _ready(config: Config, given: _Given) -> Config:
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
    prepare_training(config)
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
