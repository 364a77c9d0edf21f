"""What a command does with what it finds in its folder; checkpoints say of which run they are, and what differs."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from PIL import Image

from lmm_r1 import dotted
from lmm_r1.config import PPOConfig, SFTConfig
from lmm_r1.config.resolve import is_free, settings_of_the_run
from lmm_r1.data.messages import ImagePart, Message, Row, TextPart
from lmm_r1.data.training_rows import rows_digest
from lmm_r1.errors import UserError
from lmm_r1.records.run_folder import RunFolder
from lmm_r1.train.start import Fingerprint, check_same_run, check_start, open_run, read_fingerprint

# As it is resolved.
RATE: dict[str, object] = {"adam.lr": 5e-6}


def config(tmp_path: Path, **changes: object) -> SFTConfig:
    settings = {"ckpt.output_dir": str(tmp_path / "run"), "model.model_name_or_path": str(tmp_path / "model")}
    return dotted.replace(
        SFTConfig(), RATE | settings | {name.replace("__", "."): value for name, value in changes.items()}
    )


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


def row(text: str = "1+1?", *, answer: str = "2", image: object = None) -> Row:
    parts = (TextPart(text),) if image is None else (ImagePart(image), TextPart(text))
    return Row(
        messages=(Message(role="user", parts=parts),), answer=answer, datasource="sums", location="rows, line 1"
    )


def checkpoint(folder: Path, *, weights: bytes = b"weights") -> Path:
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llm"}')
    (folder / "model.safetensors").write_bytes(weights)
    return folder


def fingerprint(model: Path, *, rows: list[Row] | None = None, **changes: object) -> Fingerprint:
    config = dotted.replace(SFTConfig(), RATE | {name.replace("__", "."): value for name, value in changes.items()})
    models = {"model.model_name_or_path": str(model)}
    return Fingerprint.of(config, models=models, rows={"data.dataset": rows or [row()]})


def refusal(written: Fingerprint, found: Fingerprint, folder: Path) -> str:
    written.write(folder)
    with pytest.raises(UserError) as refused:
        check_same_run(found, folder)
    return str(refused.value)


def test_the_same_run_is_known_again_from_another_place_and_with_free_settings(tmp_path):
    (tmp_path / "moved").mkdir()
    one, other = checkpoint(tmp_path / "model"), checkpoint(tmp_path / "moved" / "model")
    written = fingerprint(one, rows=[row(image="/data/a.png")])
    written.write(tmp_path / "checkpoints")
    assert read_fingerprint(tmp_path / "checkpoints") == written
    same = fingerprint(
        other,
        rows=[row(image="/elsewhere/a.png")],
        train__micro_batch_size=2,
        model__gradient_checkpointing_enable=True,
        ds__zero_stage=3,
        ds__adam_offload=True,
        ds__use_universal_ckpt=True,
        ckpt__output_dir="moved",
        logger__logging_steps=5,
    )
    check_same_run(same, tmp_path / "checkpoints")


def test_another_run_is_told_what_differs(tmp_path):
    model, other = checkpoint(tmp_path / "model"), checkpoint(tmp_path / "other", weights=b"Weights")
    written = fingerprint(model)
    sentence = refusal(written, fingerprint(other, rows=[row(answer="3")], adam__lr=1e-3), tmp_path / "ck")
    assert sentence.startswith(f"{tmp_path / 'ck'} holds checkpoints of another run: ")
    assert "--model.model_name_or_path is another model" in sentence
    assert "--data.dataset gives other rows (1 rows " in sentence
    assert "--adam.lr 5e-06 there, 0.001 here; to continue that run, give what it has there; else give" in sentence
    assert "--ckpt.overwrite" in sentence


def test_a_setting_that_an_earlier_version_did_not_know_is_left_out(tmp_path):
    now = fingerprint(checkpoint(tmp_path / "model"))
    before = Fingerprint(models=now.models, rows=now.rows, settings={**now.settings, "gone": 1})
    del before.settings["adam.lr"]
    assert now.differences(before) == []


@pytest.mark.parametrize(
    "other",
    [
        [row("1+2?")],
        [row(answer="3")],
        [row(), row()],
        [replace(row(), prefill="<think>")],
        [row(image="/a/b.png")],
        [row(image=b"png")],
        [row(image=Image.new("L", (2, 1), 7))],
    ],
)
def test_other_rows_have_another_digest(other):
    assert rows_digest([row()]) != rows_digest(other)
    assert rows_digest(other) == rows_digest(list(other))


@pytest.mark.parametrize("config_class", [PPOConfig, SFTConfig])
def test_what_decides_what_is_learnt_is_not_free(config_class):
    flags = dotted.leaf_types(config_class)
    settings = settings_of_the_run(config_class())
    left_out = {flag for flag in flags if not is_free(flag)} ^ settings.keys()
    # Without adapters, and without a critic.
    assert "ds.lora.alpha" in left_out
    assert {dotted.get(config_class(), flag) for flag in left_out} == {None}
    decisive = ("adam.lr", "train.seed", "train.batch_size", "ds.lora.rank", "data.max_len", "max_norm")
    assert all(any(flag == name or flag.endswith(f".{name}") for flag in settings) for name in decisive)
    assert not any(flag.startswith(("ckpt.", "logger.", "eval.")) for flag in settings)
