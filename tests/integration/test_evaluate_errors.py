"""Bad input to `lmm-r1 evaluate`: one sentence, an exit code, nothing written, and told before an engine is loaded."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.commands import QUESTION, error_of, flags, tree, with_image, write_rows
from helpers.processes import warm_python
from helpers.tables import table
from PIL import Image

pytestmark = pytest.mark.usefixtures("own_environment")

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_checkpoint: Callable[[str], Path]) -> Path:
    """The current folder of the command, with checkpoints `image` and `text`, and rows with and without images."""
    monkeypatch.chdir(tmp_path)
    for name, kit in (("image", "qwen2_5_vl"), ("text", "llm")):
        shutil.copytree(tiny_checkpoint(kit), tmp_path / name)
    Image.new("RGB", (56, 56)).save(tmp_path / "a.png")
    for name, row in (("text", QUESTION), ("image", with_image("../a.png"))):
        (tmp_path / f"{name}_rows").mkdir()
        write_rows(tmp_path / f"{name}_rows", QUESTION, row)
    (tmp_path / "file").write_text("not a folder")
    return tmp_path


def evaluate(**changes: object) -> list[str]:
    values = {"checkpoints": "m=image", "files": "f=text_rows", "output": "out/evaluation.json", "dtype": "float32"}
    return flags(values | changes)


@pytest.mark.parametrize(
    ("changes", "sentence"), table("integration/evaluate_errors", "bad_input_ends_with_one_sentence")
)
def test_bad_input_ends_with_one_sentence(changes, sentence, work, capfd):
    before = tree(work)
    assert error_of("evaluate", evaluate(**changes), capfd=capfd).startswith(sentence)
    assert tree(work) == before


@pytest.mark.parametrize(
    ("damaged", "sentence"),
    [
        ("processor_config.json", "image: no image processor in this checkpoint; copy processor_config.json or"),
        ("model.safetensors", "image: no weights in this folder (model.safetensors or "),
    ],
)
def test_the_last_checkpoint_is_checked_before_the_first_is_measured(damaged, sentence, work, capfd):
    (work / "image" / damaged).unlink()
    before = tree(work)
    argv = [*evaluate(checkpoints="first=text"), "--checkpoints", "first=text", "last=image"]
    assert error_of("evaluate", argv, capfd=capfd).startswith(sentence)
    assert tree(work) == before


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": QUESTION["messages"]}, 'text_rows/rows.jsonl line 1: the answer "answer" is missing'),
        (with_image("no.png"), "text_rows/rows.jsonl line 1: no image file "),
    ],
)
def test_a_file_of_bad_rows_only_is_an_error_with_the_first_reason(row, reason, work, capfd):
    write_rows(work / "text_rows", row)
    before = tree(work)
    sentence = f"text_rows/rows.jsonl: none of its 1 rows can be used; the first: {reason}"
    assert error_of("evaluate", evaluate(files="f=text_rows/rows.jsonl"), capfd=capfd).startswith(sentence)
    assert tree(work) == before


def test_a_label_that_a_verifier_refuses_is_told_before_anything_is_generated(work, capfd):
    write_rows(work / "text_rows", QUESTION, {**QUESTION, "answer": "$$"})
    sentence = "text_rows/rows.jsonl line 2: math cannot judge by this row's answer: the gold answer is empty"
    assert error_of("evaluate", evaluate(), capfd=capfd).startswith(sentence)


@pytest.mark.slow
def test_a_prompt_longer_than_the_budget_is_left_out_and_never_cut(work):
    command = [
        warm_python(),
        "-m",
        "lmm_r1.cli.evaluate",
        *evaluate(files="f=image_rows", max_model_len=32, backend="transformers", system_prompt="none"),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 3
    listed, sentence = ended.stderr.splitlines()[-2:]
    assert listed == "lmm-r1 evaluate: 1 row was left out, and everything else was done:"
    assert sentence.startswith("  image_rows/rows.jsonl line 2: the prompt takes ")
    assert sentence.endswith(" tokens, which leaves no room for a response in --max_model_len 32; raise it")
    assert "Traceback" not in ended.stderr
    [file] = json.loads((work / "out/evaluation.json").read_text())["checkpoints"][0]["files"].values()
    assert file["rows"] == 1
