"""What a command finds in its folder when it starts: nothing, a stopped run to resume, or files that it must not touch.

A fingerprint identifies the run of checkpoints: its models, its rows and the settings that decide its outcome."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lmm_r1 import dotted
from lmm_r1.checkpoints import model_digest
from lmm_r1.config import DPOConfig, KDConfig, PPOConfig, SupervisedConfig, checkpoint_folder, to_yaml
from lmm_r1.config.resolve import settings_of_the_run
from lmm_r1.data.training_rows import AnyRow, rows_digest
from lmm_r1.errors import UserError
from lmm_r1.files.atomic import check_creatable
from lmm_r1.files.json_files import write_json_object
from lmm_r1.host.checkpoint_folder import DELETING, REFERENCE_FOLDER, SAVING
from lmm_r1.records.run_folder import ERROR_FILE, STAGE_FILE, RunFolder
from remote_rm.redaction import hidden_settings

FINGERPRINT_FILE = "fingerprint.json"
# The entries of a checkpoint folder: RL's policy and critic, SFT's checkpoints, the best ones, and the name of the newest.
_CHECKPOINTS = ("_actor", "_critic", "global_step*", "best*", "latest", FINGERPRINT_FILE)
# Further differences are only counted.
_SHOWN = 4


def check_output(config: PPOConfig | SupervisedConfig) -> None:
    """Raise UserError for a folder that cannot be written, a finished run, or a model that overwriting would delete."""
    output, checkpoints = Path(config.ckpt.output_dir), checkpoint_folder(config)
    check_creatable(output / STAGE_FILE, flag="--ckpt.output_dir")
    check_creatable(checkpoints / FINGERPRINT_FILE, flag="--ckpt.path")
    if config.ckpt.overwrite:
        _check_models(config, deleted=_left_by_a_run(output, checkpoints))
    else:
        RunFolder.check_unfinished(output)


def check_start(config: PPOConfig | SupervisedConfig, fingerprint: Fingerprint) -> None:
    """Raise UserError as `check_output` does, and if the folder has checkpoints of another run; writes nothing."""
    check_output(config)
    checkpoints = checkpoint_folder(config)
    if config.ckpt.overwrite or not has_checkpoints(checkpoints):
        return
    check_same_run(fingerprint, checkpoints)
    if not config.ckpt.load_enable:
        raise UserError(
            f"--ckpt.no_load_enable: {checkpoints} holds checkpoints of this run; give --ckpt.overwrite to delete them "
            "and train anew, or another --ckpt.output_dir"
        )


def open_run(config: PPOConfig | SupervisedConfig, fingerprint: Fingerprint, *, folder: RunFolder) -> bool:
    """Prepare the run's folder, after `check_start`, and return whether there are checkpoints to resume from.

    With `--ckpt.overwrite`, the files of an earlier run are deleted. Only one process of a run may call this.
    """
    checkpoints = checkpoint_folder(config)
    # The error of an earlier session.
    (folder.path / ERROR_FILE).unlink(missing_ok=True)
    if config.ckpt.overwrite:
        for path in _left_by_a_run(folder.path, checkpoints):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    resumes = has_checkpoints(checkpoints)
    if not resumes:
        # Steps of a session that ended before its first checkpoint are repeated.
        folder.clear_records()
        if not config.ckpt.disable_ds:
            fingerprint.write(checkpoints)
    # The saved settings must not delete this run when they are used again.
    folder.open(to_yaml(dotted.replace(config, {"ckpt.overwrite": False})))
    return resumes


def has_checkpoints(folder: Path) -> bool:
    """Say whether a folder of checkpoints holds one to resume from."""
    return any(path.is_dir() for path in _held(folder))


def _held(folder: Path) -> list[Path]:
    return [path for pattern in _CHECKPOINTS for path in folder.glob(pattern)]


def _left_by_a_run(output: Path, checkpoints: Path) -> list[Path]:
    """Return what `--ckpt.overwrite` deletes, including the remains of killed saves and evictions."""
    halves = [path for prefix in (SAVING, DELETING) for path in checkpoints.glob(f"{prefix}*")]
    references = checkpoints.glob(REFERENCE_FOLDER)
    return [*RunFolder.files(output), *_held(checkpoints), *halves, *references]


def _check_models(config: PPOConfig | SupervisedConfig, *, deleted: list[Path]) -> None:
    """Raise UserError if `--ckpt.overwrite` would delete or overwrite a model that the run starts from."""
    groups: tuple[str, ...] = ("actor", "critic", "reward") if isinstance(config, PPOConfig) else ("model",)
    if isinstance(config, DPOConfig):
        groups = ("model", "ref")
    if isinstance(config, KDConfig):
        groups = ("model", "teacher")
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


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """What identifies a run: it is the same in all of its sessions."""

    models: Mapping[str, str]
    """The digest of each checkpoint that the run starts from, or its hub name, by flag."""
    rows: Mapping[str, str]
    """The number and the digest of the rows, by flag."""
    settings: Mapping[str, object]
    """The settings of `settings_of_the_run`, by flag."""

    @classmethod
    def of(
        cls,
        config: PPOConfig | SupervisedConfig,
        *,
        models: Mapping[str, str | None],
        rows: Mapping[str, Sequence[AnyRow]],
    ) -> Fingerprint:
        """Return the fingerprint of a run.

        Args:
            models: the path of each model by its flag; None for one that the run does not have.
            rows: the blended rows by their flag.
        """
        return cls(
            models={flag: model_digest(path) for flag, path in models.items() if path is not None},
            rows={flag: rows_digest(part) for flag, part in rows.items()},
            settings=settings_of_the_run(config),
        )

    def write(self, folder: Path) -> None:
        """Write the fingerprint to the folder of the checkpoints."""
        write_json_object(folder / FINGERPRINT_FILE, dataclasses.asdict(self))

    def differences(self, earlier: Fingerprint) -> list[str]:
        """Return a phrase for each difference to an earlier run; flags that only one of them has are left out."""
        phrases = [
            f"--{flag} is another model"
            for flag in sorted(self.models.keys() | earlier.models.keys())
            if self.models.get(flag) != earlier.models.get(flag)
        ]
        phrases += [
            f"--{flag} gives other rows ({earlier.rows.get(flag, 'none')} there, {digest} here)"
            for flag, digest in self.rows.items()
            if digest != earlier.rows.get(flag)
        ]
        phrases += [
            f"--{flag} {_shown(hidden_settings(earlier.settings[flag], name=flag))} there, {_shown(value)} here"
            for flag, value in self.settings.items()
            # Earlier versions wrote secrets.
            if flag in earlier.settings and hidden_settings(earlier.settings[flag], name=flag) != value
        ]
        return phrases


def read_fingerprint(folder: Path) -> Fingerprint | None:
    """Return the fingerprint of the checkpoints in a folder, None if there is none; raises UserError if it is damaged."""
    path = folder / FINGERPRINT_FILE
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return Fingerprint(models=content["models"], rows=content["rows"], settings=content["settings"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: cannot be read ({error!r}); give another --ckpt.output_dir") from error


def check_same_run(fingerprint: Fingerprint, folder: Path) -> None:
    """Raise UserError, naming what differs, unless the checkpoints in a folder are of the run with this fingerprint."""
    earlier = read_fingerprint(folder)
    ways = "give another --ckpt.output_dir, or --ckpt.overwrite to delete them and train anew here"
    if earlier is None:
        raise UserError(
            f"{folder} holds checkpoints that do not say of which run they are (no {FINGERPRINT_FILE}); {ways}. "
            "lmm-r1 merge makes a model of one, to start from"
        )
    phrases = fingerprint.differences(earlier)
    if phrases:
        more = f"; and {len(phrases) - _SHOWN} more" if len(phrases) > _SHOWN else ""
        raise UserError(f"{folder} holds checkpoints of another run: {'; '.join(phrases[:_SHOWN])}{more}; {ways}")


def _shown(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
