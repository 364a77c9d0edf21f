"""A folder of checkpoints says of which run it is, and another run is told what differs."""

from pathlib import Path

import pytest
from PIL import Image

from lmm_r1 import dotted
from lmm_r1.config import PPOConfig, SFTConfig
from lmm_r1.config.export import is_free, settings_of_the_run
from lmm_r1.data.messages import ImagePart, Message, Row, TextPart
from lmm_r1.errors import UserError
from lmm_r1.trainer.fingerprint import Fingerprint, check_same_run, model_digest, read_fingerprint, rows_digest

pytestmark = pytest.mark.unit


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
    config = dotted.replace(SFTConfig(), {name.replace("__", "."): value for name, value in changes.items()})
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
    assert "--adam.lr 5e-06 there, 0.001 here" in sentence
    assert "--ckpt.overwrite" in sentence


def test_many_differences_are_counted(tmp_path):
    changes = {
        "adam__lr": 1.0,
        "max_norm": 2.0,
        "train__seed": 3,
        "train__max_steps": 4,
        "data__max_len": 5,
        "optim": "muon",
    }
    model = checkpoint(tmp_path / "model")
    sentence = refusal(fingerprint(model), fingerprint(model, **changes), tmp_path / "ck")
    assert sentence.count(" there, ") == 4
    assert "; and 2 more; give another" in sentence


def test_checkpoints_of_an_unknown_run_are_refused(tmp_path):
    with pytest.raises(UserError, match="do not say of which run they are .no fingerprint.json.; .*lmm-r1 merge"):
        check_same_run(fingerprint(checkpoint(tmp_path / "model")), tmp_path)


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
        [row(image="/a/b.png")],
        [row(image=b"png")],
        [row(image=Image.new("L", (2, 1), 7))],
    ],
)
def test_other_rows_have_another_digest(other):
    assert rows_digest([row()]) != rows_digest(other)
    assert rows_digest(other) == rows_digest(list(other))


def test_a_changed_weight_in_a_large_file_is_seen_where_it_is_looked_at(tmp_path):
    weights = bytearray(64 * 64 * 1024 + 4096)
    one = checkpoint(tmp_path / "one", weights=bytes(weights))
    weights[-1] = 1
    other = checkpoint(tmp_path / "other", weights=bytes(weights))
    assert model_digest(str(one)) != model_digest(str(other))
    assert model_digest("Qwen/Qwen2.5-VL-3B-Instruct") == "Qwen/Qwen2.5-VL-3B-Instruct"


@pytest.mark.parametrize("config_class", [PPOConfig, SFTConfig])
def test_what_decides_what_is_learnt_is_not_free(config_class):
    flags = dotted.leaf_types(config_class)
    settings = settings_of_the_run(config_class())
    assert settings.keys() == {flag for flag in flags if not is_free(flag)}
    decisive = (
        "adam.lr",
        "train.seed",
        "train.batch_size",
        "ds.zero_stage",
        "ds.lora.rank",
        "data.max_len",
        "max_norm",
    )
    assert all(any(flag == name or flag.endswith(f".{name}") for flag in settings) for name in decisive)
    assert not any(flag.startswith(("ckpt.", "logger.", "eval.")) for flag in settings)
