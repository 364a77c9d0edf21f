"""What a command finds in its folder when it starts: nothing, a stopped run to go on with, or what it must not touch."""

from __future__ import annotations

import shutil
from pathlib import Path

from lmm_r1 import dotted
from lmm_r1.checkpoints.folder import SAVING
from lmm_r1.checkpoints.writing import DELETING
from lmm_r1.config import PPOConfig, SFTConfig, checkpoint_folder, to_yaml
from lmm_r1.errors import UserError
from lmm_r1.files.atomic import check_creatable
from lmm_r1.records.run_folder import STAGE_FILE, RunFolder
from lmm_r1.trainer.fingerprint import FINGERPRINT_FILE, Fingerprint, check_same_run
from lmm_r1.trainer.stopping import ERROR_FILE

# What a folder of checkpoints holds: those of RL's policy and critic, SFT's own, the best ones, and what names the
# newest.
_CHECKPOINTS = ("_actor", "_critic", "global_step*", "best*", "latest", FINGERPRINT_FILE)


def check_start(config: PPOConfig | SFTConfig, fingerprint: Fingerprint) -> None:
    """Raise UserError where the command must not train in its folder; nothing is written.

    That is a place that cannot be written, a finished run, checkpoints of another run, or a model to start from that
    would be deleted first.
    """
    output, checkpoints = Path(config.ckpt.output_dir), checkpoint_folder(config)
    check_creatable(output / STAGE_FILE, flag="--ckpt.output_dir")
    check_creatable(checkpoints / FINGERPRINT_FILE, flag="--ckpt.path")
    if config.ckpt.overwrite:
        _check_models(config, deleted=_left_by_a_run(output, checkpoints))
        return
    RunFolder.check_unfinished(output)
    if not _has_checkpoints(checkpoints):
        return
    check_same_run(fingerprint, checkpoints)
    if not config.ckpt.load_enable:
        raise UserError(
            f"--ckpt.no_load_enable: {checkpoints} holds checkpoints of this run; give --ckpt.overwrite to delete them "
            "and train anew, or another --ckpt.output_dir"
        )


def open_run(config: PPOConfig | SFTConfig, fingerprint: Fingerprint, *, folder: RunFolder) -> bool:
    """Make the run's folder ready, after `check_start`, and return whether there are checkpoints to go on from.

    With `--ckpt.overwrite`, what an earlier run left is deleted. Only one process of a run may call this.
    """
    checkpoints = checkpoint_folder(config)
    # Of a session before this one.
    (folder.path / ERROR_FILE).unlink(missing_ok=True)
    if config.ckpt.overwrite:
        for path in _left_by_a_run(folder.path, checkpoints):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    resumes = _has_checkpoints(checkpoints)
    if not resumes:
        # Steps of a session that was ended before its first checkpoint are made again.
        folder.clear_records()
        if not config.ckpt.disable_ds:
            fingerprint.write(checkpoints)
    # Who repeats a run from its settings must not delete what they stand beside.
    folder.open(to_yaml(dotted.replace(config, {"ckpt.overwrite": False})))
    return resumes


def _has_checkpoints(folder: Path) -> bool:
    return any(path.is_dir() for path in _held(folder))


def _held(folder: Path) -> list[Path]:
    return [path for pattern in _CHECKPOINTS for path in folder.glob(pattern)]


def _left_by_a_run(output: Path, checkpoints: Path) -> list[Path]:
    """Return what `--ckpt.overwrite` deletes: what killed saves and evictions left, too, as it can be taken up again."""
    halves = [path for prefix in (SAVING, DELETING) for path in checkpoints.glob(f"{prefix}*")]
    return [*RunFolder.files(output), *_held(checkpoints), *halves]


def _check_models(config: PPOConfig | SFTConfig, *, deleted: list[Path]) -> None:
    """Raise UserError where a model that the run starts from lies in what `--ckpt.overwrite` deletes or writes."""
    groups = ("actor", "critic", "reward") if isinstance(config, PPOConfig) else ("model",)
    output = Path(config.ckpt.output_dir).resolve()
    for name in groups:
        path = getattr(config, name).model_name_or_path
        if path is None or not Path(path).is_dir():
            continue
        model = Path(path).resolve()
        if model == output or any(model.is_relative_to(place.resolve()) for place in deleted):
            raise UserError(
                f"--ckpt.overwrite would delete the model of --{name}.model_name_or_path {path}, which the run starts "
                "from; give another --ckpt.output_dir"
            )
