"""What tells a checkpoint from itself after it was trained on."""

import os
from pathlib import Path

import pytest

from lmm_r1 import checkpoints
from lmm_r1.checkpoints import checkpoint_state, model_digest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    files = {"config.json": "{}", "model.safetensors": "weights", "tokenizer.json": "{}", "merges.txt": "a b"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        os.utime(tmp_path / name, ns=(5, 5))
    return tmp_path


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "tokenizer.json", "merges.txt", "modeling_own.py"]
)
def test_any_file_of_a_model_that_changes_makes_it_another(folder, name):
    before = checkpoint_state(str(folder)), model_digest(str(folder))
    (folder / name).write_text("other")
    after = checkpoint_state(str(folder)), model_digest(str(folder))
    assert [old != new for old, new in zip(before, after, strict=True)] == [True, True]


def test_weights_that_were_written_anew_make_another_though_the_blocks_that_are_read_are_the_same(folder):
    before = checkpoint_state(str(folder))
    os.utime(folder / "model.safetensors", ns=(6, 6))
    assert checkpoint_state(str(folder)) != before


@pytest.mark.parametrize(
    "name",
    [
        *("evaluation.json", "scores.json", "scores.measured.json", "stage.json", "session.json", "error.txt"),
        *("trackers.json", "report.json", "train_log.json", "all_results.json", "trainer_state.json"),
    ],
)
def test_what_trainings_and_evaluations_write_into_the_folder_is_no_part_of_the_model(folder, name):
    before = checkpoint_state(str(folder)), model_digest(str(folder))
    (folder / name).write_text("{}")
    assert (checkpoint_state(str(folder)), model_digest(str(folder))) == before


def test_a_name_of_the_hub_stands_for_the_commit_in_the_cache(monkeypatch):
    for commit, state in (("abc", "org/model abc"), (None, None)):
        monkeypatch.setattr(checkpoints, "cached_commit", lambda name, commit=commit: commit)
        assert checkpoint_state("org/model") == state
