"""What a command does with what it finds in its folder."""

from pathlib import Path

import pytest
import yaml

from lmm_r1 import dotted
from lmm_r1.config import SFTConfig
from lmm_r1.errors import UserError
from lmm_r1.records.run_folder import RunFolder
from lmm_r1.trainer.fingerprint import Fingerprint
from lmm_r1.trainer.run_start import check_start, open_run

pytestmark = pytest.mark.unit


def config(tmp_path: Path, **changes: object) -> SFTConfig:
    settings = {"ckpt.output_dir": str(tmp_path / "run"), "model.model_name_or_path": str(tmp_path / "model")}
    return dotted.replace(SFTConfig(), settings | {name.replace("__", "."): value for name, value in changes.items()})


def start(given: SFTConfig) -> bool:
    """As a command starts; returns whether it resumes."""
    fingerprint = Fingerprint.of(given, models={}, rows={})
    check_start(given, fingerprint)
    folder = RunFolder(path=Path(given.ckpt.output_dir), name="sft", kind="sft")
    resumes = open_run(given, fingerprint, folder=folder)
    folder.metrics(1, {"loss": 1.0})
    return resumes


def save(folder: Path) -> None:
    (folder / "global_step1").mkdir(parents=True)
    (folder / "latest").write_text("global_step1")


def contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_a_run_keeps_its_checkpoints_in_its_own_folder_and_goes_on_from_them(tmp_path):
    assert not start(config(tmp_path))
    save(tmp_path / "run/checkpoints")
    assert start(config(tmp_path))
    other = config(tmp_path, ckpt__output_dir=str(tmp_path / "other"))
    assert not start(other), "another folder is another run"
    assert {path.name for path in tmp_path.iterdir()} == {"run", "other"}


def test_records_without_a_checkpoint_are_forgotten(tmp_path):
    for _ in range(2):
        assert not start(config(tmp_path))
        assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize("place", [None, "shared"])
def test_checkpoints_of_another_run_are_refused_and_nothing_is_touched(tmp_path, place):
    path = None if place is None else str(tmp_path / place)
    start(config(tmp_path, ckpt__path=path))
    save(tmp_path / (place or "run/checkpoints"))
    before = contents(tmp_path)
    with pytest.raises(UserError, match="another run: --adam.lr 5e-06 there, 0.1 here"):
        start(config(tmp_path, ckpt__path=path, adam__lr=0.1))
    with pytest.raises(UserError, match="--ckpt.no_load_enable: .*--ckpt.overwrite"):
        start(config(tmp_path, ckpt__path=path, ckpt__load_enable=False))
    assert contents(tmp_path) == before


def test_a_finished_run_is_trained_over_only_where_that_is_asked_for(tmp_path):
    given = config(tmp_path)
    start(given)
    save(tmp_path / "run/checkpoints")
    RunFolder(path=tmp_path / "run", name="sft", kind="sft").finish(steps=1)
    (tmp_path / "run/images").mkdir()
    (tmp_path / "run/notes.txt").write_text("the user's own")
    (tmp_path / "run/error.txt").write_text("of a session that failed")
    for half in (".saving-global_step3", ".deleting-global_step2"):
        (tmp_path / "run/checkpoints" / half).mkdir()
        (tmp_path / "run/checkpoints" / half / "mp_rank_00_model_states.pt").write_text("weights")
    with pytest.raises(UserError, match="is finished .*--ckpt.overwrite"):
        start(given)
    assert not start(dotted.replace(given, {"ckpt.overwrite": True, "adam.lr": 0.1}))
    held = contents(tmp_path / "run")
    assert held.keys() == {"metrics.jsonl", "run_config.yaml", "notes.txt", "checkpoints/fingerprint.json"}
    settings = yaml.safe_load(held["run_config.yaml"])
    assert (settings["adam"]["lr"], settings["ckpt"]["path"], settings["ckpt"]["overwrite"]) == (0.1, None, False)


@pytest.mark.parametrize("model", ["run", "run/checkpoints/global_step1"])
def test_the_model_to_start_from_is_never_overwritten(tmp_path, model):
    start(config(tmp_path))
    save(tmp_path / "run/checkpoints")
    before = contents(tmp_path)
    given = config(tmp_path, ckpt__overwrite=True, model__model_name_or_path=str(tmp_path / model))
    with pytest.raises(UserError, match="would delete the model of --model.model_name_or_path"):
        start(given)
    assert contents(tmp_path) == before
