"""The cheap checks of a training: its folder, rows and reward, before torch and Ray are loaded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lmm_r1.config import PPOConfig, SFTConfig, SupervisedConfig, checkpoint_folder, model_paths
from lmm_r1.config.rewards import GivenFunctions
from lmm_r1.config.run_rows import read_conversations, read_judged
from lmm_r1.data.files import is_read_directly
from lmm_r1.data.messages import Row
from lmm_r1.data.training_rows import check_prompt, dataset_paths, parse_dataset_spec
from lmm_r1.errors import UserError
from lmm_r1.files.atomic import check_creatable
from lmm_r1.host.checkpoint_folder import DELETING, SAVING
from lmm_r1.records.run_folder import STAGE_FILE, RunFolder
from lmm_r1.scoring import Moment, made_up
from lmm_r1.scoring.functions import FunctionScorer
from lmm_r1.scoring.sources import WeightedScorer, make_scorer
from remote_rm.client import RewardUnavailable

FINGERPRINT_FILE = "fingerprint.json"
# The entries of a checkpoint folder: RL's policy and critic, SFT's checkpoints, the best ones, and the name of the newest.
_CHECKPOINTS = ("_actor", "_critic", "global_step*", "best*", "latest", FINGERPRINT_FILE)
# As many as a file's format is detected from.
_FIRST_ROWS = 256
_RESPONSE = "<think>\nThis is a test.\n</think>\n<answer>0</answer>"


def check_first(config: PPOConfig | SupervisedConfig, *, reward: GivenFunctions | None = None) -> None:
    """Raise UserError for an input that can be refused within seconds; others are checked when the run starts.

    Args:
        reward: the reward functions that were given to this process instead of in a file.
    """
    check_output(config)
    split = config.data.prompt_split if isinstance(config, PPOConfig) else config.data.dataset_split
    rows = [row for path in training_datasets(config)[0] for row in _rows(config, path, split=split)]
    for path in dataset_paths(config.eval.dataset, flag="--eval.dataset") if config.eval.dataset else ():
        _rows(config, path, split=config.eval.split)
    if isinstance(config, PPOConfig) and config.reward.remote_url:
        check_reward(config, rows, given=reward, called=True)


def check_output(config: PPOConfig | SupervisedConfig) -> None:
    """Raise UserError for a folder that cannot be written, a finished run, or a model that overwriting would delete."""
    output, checkpoints = Path(config.ckpt.output_dir), checkpoint_folder(config)
    check_creatable(output / STAGE_FILE, flag="--ckpt.output_dir")
    check_creatable(checkpoints / FINGERPRINT_FILE, flag="--ckpt.path")
    if config.ckpt.overwrite:
        _check_models(config, deleted=left_by_a_run(output, checkpoints))
    else:
        RunFolder.check_unfinished(output)


def has_checkpoints(folder: Path) -> bool:
    """Say whether a folder of checkpoints holds one to resume from."""
    return any(path.is_dir() for path in _held(folder))


def _held(folder: Path) -> list[Path]:
    return [path for pattern in _CHECKPOINTS for path in folder.glob(pattern)]


def left_by_a_run(output: Path, checkpoints: Path) -> list[Path]:
    """Return what `--ckpt.overwrite` deletes, including the remains of killed saves and evictions."""
    halves = [path for prefix in (SAVING, DELETING) for path in checkpoints.glob(f"{prefix}*")]
    return [*RunFolder.files(output), *_held(checkpoints), *halves]


def _check_models(config: PPOConfig | SupervisedConfig, *, deleted: list[Path]) -> None:
    """Raise UserError if `--ckpt.overwrite` would delete or overwrite a model that the run starts from."""
    output = Path(config.ckpt.output_dir).resolve()
    for flag, path in model_paths(config).items():
        if not Path(path).is_dir():
            continue
        model = Path(path).resolve()
        if model == output or any(model.is_relative_to(place.resolve()) for place in deleted):
            raise UserError(
                f"--ckpt.overwrite would delete the model of --{flag} {path}, which the run starts from; "
                "give another --ckpt.output_dir"
            )


def training_datasets(config: PPOConfig | SupervisedConfig) -> tuple[list[str], list[float] | None]:
    """Return the datasets that a run trains on, and their probabilities if it draws from them."""
    if isinstance(config, PPOConfig):
        datasets, shares = config.data.prompt_dataset, config.data.prompt_probs
    else:
        datasets, shares = config.data.dataset, config.data.dataset_probs
    assert datasets is not None, "required by config.resolve"
    return parse_dataset_spec(datasets, shares)


def _rows(config: Any, path: str, *, split: str) -> list[Any]:
    """Return the first rows of a file; none of a name on the hub, or of a folder that `datasets` reads."""
    if not is_read_directly(path):
        return []
    read: Callable[..., Any] = partial(read_judged, config)
    if isinstance(config, PPOConfig):
        read = partial(read_conversations, config, check=check_prompt)
    elif isinstance(config, SFTConfig):
        read = partial(read_conversations, config)
    try:
        return list(read(path, split=split, max_rows=_FIRST_ROWS).rows.values())
    except UserError:
        # Of the whole file, so that the message lists all bad rows.
        return list(read(path, split=split).rows.values())


def check_reward(config: PPOConfig, rows: Sequence[Row], *, given: GivenFunctions | None, called: bool) -> None:
    """Raise UserError if the reward source does not accept the rows or does not answer.

    Args:
        called: call a function once on the first row, and ask no service.
    """

    async def check() -> None:
        scorer = make_scorer(config.reward, given=given)
        try:
            scorer.check_rows(rows)
            if called and not isinstance(scorer, FunctionScorer | WeightedScorer):
                return
            await scorer.check_health()
            if called and rows:
                response = made_up(rows[0], _RESPONSE, moment=Moment(step=1, held_out=False))
                await scorer.rewards([response] * min(2, config.rollout.n_samples_per_prompt))
        finally:
            await scorer.close()

    try:
        asyncio.run(check())
    except RewardUnavailable as error:
        raise UserError(f"--reward.remote_url {config.reward.remote_url}: {error}") from error
