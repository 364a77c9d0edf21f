"""The cheap checks of a training: its folder, disk, rows, lengths and reward, before torch and Ray are loaded."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lmm_r1.config import PPOConfig, SFTConfig, SupervisedConfig, checkpoint_folder, model_path, model_paths
from lmm_r1.config.ppo import RewardConfig
from lmm_r1.config.rewards import GivenFunctions
from lmm_r1.config.run_rows import read_conversations, read_judged
from lmm_r1.data.files import is_read_directly
from lmm_r1.data.messages import PreferenceRow, Row, TextPart
from lmm_r1.data.training_rows import check_prompt, dataset_paths, parse_dataset_spec
from lmm_r1.errors import UserError
from lmm_r1.files.atomic import check_creatable
from lmm_r1.host.checkpoint_folder import DELETING, REFERENCE_FOLDER, SAVING
from lmm_r1.lmm_kits.checkpoint import stored_bytes
from lmm_r1.lmm_kits.registry import stored_config
from lmm_r1.records.run_folder import STAGE_FILE, RunFolder
from lmm_r1.scoring import Moment, Scorer, made_up
from lmm_r1.scoring.functions import FunctionScorer
from lmm_r1.scoring.sources import WeightedScorer, make_scorer

FINGERPRINT_FILE = "fingerprint.json"
# The entries of a checkpoint folder: RL's policy and critic, SFT's checkpoints, the best ones, and the name of the newest.
_CHECKPOINTS = ("_actor", "_critic", "global_step*", "best*", "latest", FINGERPRINT_FILE)
# As many as a file's format is detected from.
_FIRST_ROWS = 256
_RESPONSE = "<think>\nThis is a test.\n</think>\n<answer>0</answer>"
_GIB = 2**30
_loaded: dict[tuple[RewardConfig, int], FunctionScorer | WeightedScorer] = {}


def check_first(config: PPOConfig | SupervisedConfig, *, reward: GivenFunctions | None = None) -> None:
    """Raise UserError for an input that can be refused within seconds; others are checked when the run starts.

    Args:
        reward: the reward functions that were given to this process instead of in a file.
    """
    check_output(config)
    model = Path(model_path(config))
    _check_disk(config, model)
    rows = _training_rows(config, most=_FIRST_ROWS)
    for path in dataset_paths(config.eval.dataset, flag="--eval.dataset") if config.eval.dataset else ():
        _rows(config, path, split=config.eval.split, held_out=True, most=_FIRST_ROWS)
    if all(map(is_read_directly, training_datasets(config)[0])):
        _check_lengths(config, rows, tokenizer=model / "tokenizer.json")
    if isinstance(config, PPOConfig) and config.reward.remote_url:
        asyncio.run(_check_reward(config, rows, given=reward))


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
    references = checkpoints.glob(REFERENCE_FOLDER)
    return [*RunFolder.files(output), *_held(checkpoints), *halves, *references]


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


def scorer_of(reward: RewardConfig, *, given: GivenFunctions | None) -> Scorer:
    """Return what `make_scorer` does; a function that `check_first` has loaded is not loaded again."""
    return _loaded.pop((reward, id(given)), None) or make_scorer(reward, given=given)


def _check_disk(config: PPOConfig | SupervisedConfig, model: Path) -> None:
    """Raise UserError if the trained model alone does not fit on the disk; a model on the hub is not checked."""
    needed = stored_bytes(str(model))
    if not needed or config.ckpt.overwrite:
        return
    stored = stored_config(str(model))
    if config.ds.param_dtype != "fp32" and "float32" in (stored.get("dtype"), stored.get("torch_dtype")):
        needed //= 2
    output = Path(config.ckpt.output_dir)
    free = shutil.disk_usage(
        next(folder for folder in (output.absolute(), *output.absolute().parents) if folder.exists())
    ).free
    if free < needed:
        raise UserError(
            f"--ckpt.output_dir {output}: its disk has {free / _GIB:.2f} GiB free, and the trained model alone takes "
            f"{needed / _GIB:.2f} GiB; free some, or choose another place"
        )


def training_datasets(config: PPOConfig | SupervisedConfig) -> tuple[list[str], list[float] | None]:
    """Return the datasets that a run trains on, and their probabilities if it draws from them."""
    if isinstance(config, PPOConfig):
        datasets, shares = config.data.prompt_dataset, config.data.prompt_probs
    else:
        datasets, shares = config.data.dataset, config.data.dataset_probs
    assert datasets is not None, "required by config.resolve"
    return parse_dataset_spec(datasets, shares)


def _training_rows(config: PPOConfig | SupervisedConfig, *, most: int | None) -> list[Any]:
    split = config.data.prompt_split if isinstance(config, PPOConfig) else config.data.dataset_split
    return [row for path in training_datasets(config)[0] for row in _rows(config, path, split=split, most=most)]


def _rows(config: Any, path: str, *, split: str, held_out: bool = False, most: int | None) -> list[Any]:
    """Return the first rows of a file; none of a name on the hub, or of a folder that `datasets` reads."""
    if not is_read_directly(path):
        return []
    read: Callable[..., Any] = partial(read_judged, config)
    if isinstance(config, PPOConfig):
        read = partial(read_conversations, config, check=check_prompt)
    elif isinstance(config, SFTConfig):
        read = partial(read_conversations, config, held_out=held_out)
    try:
        return list(read(path, split=split, max_rows=most).rows.values())
    except UserError:
        if most is None:
            raise
        # Of the whole file, so that the message lists all bad rows.
        return _rows(config, path, split=split, held_out=held_out, most=None)


def _check_lengths(
    config: PPOConfig | SupervisedConfig, rows: Sequence[Row | PreferenceRow], *, tokenizer: Path
) -> None:
    """Raise UserError if no row fits into `--data.max_len`, even without the tokens of its images and of the template."""
    room = prompt_room(config)
    texts = list(map(_text, rows))
    # A token has a byte at least.
    if not tokenizer.is_file() or not texts or any(len(text.encode()) <= room for text in texts):
        return
    from tokenizers import Tokenizer

    encode = Tokenizer.from_file(str(tokenizer)).encode

    def shortest(texts: Iterable[str]) -> int:
        return min(len(encode(text, add_special_tokens=False).ids) for text in texts)

    # The other rows are read only if none of the first fits.
    if shortest(texts) <= room or (length := shortest(map(_text, _training_rows(config, most=None)))) <= room:
        return
    raise no_prompt_fits(config, f"text alone has {length} tokens")


def prompt_room(config: PPOConfig | SupervisedConfig) -> int:
    """Return how many tokens a prompt may have, so that in RL the longest response fits after it."""
    if not isinstance(config, PPOConfig):
        return config.data.max_len
    return config.data.max_len - (1 if config.train.plays else config.rollout.max_new_tokens or 1)


def no_prompt_fits(config: PPOConfig | SupervisedConfig, length: str) -> UserError:
    """Return the error of a run of which even the shortest prompt is too long."""
    return UserError(
        f"--data.max_len {config.data.max_len} leaves {prompt_room(config)} tokens for a prompt, and the shortest one's "
        f"{length}; raise it"
    )


def _text(row: Row | PreferenceRow) -> str:
    return "".join(part.text for turn in row.messages for part in turn.parts if isinstance(part, TextPart))


async def _check_reward(config: PPOConfig, rows: Sequence[Row], *, given: GivenFunctions | None) -> None:
    """Raise UserError if the reward source does not accept the first rows; a function is called once on one of them."""
    _loaded.clear()
    scorer = make_scorer(config.reward, given=given)
    try:
        scorer.check_rows(rows)
        if not isinstance(scorer, FunctionScorer | WeightedScorer):
            return
        await scorer.check_health()
        if rows:
            response = made_up(rows[0], _RESPONSE, moment=Moment(step=1, held_out=False))
            await scorer.rewards([response] * min(2, config.rollout.n_samples_per_prompt))
        _loaded[config.reward, id(given)] = scorer
    finally:
        if not _loaded:
            await scorer.close()
