"""`lmm-r1 check_data` on a file with everything wrong in it."""

import json
from pathlib import Path

import pytest
from helpers.commands import write_rows
from PIL import Image

from lmm_r1.cli.check_data import main

pytestmark = pytest.mark.contract

BROKEN_JPEG = b"\xff\xd8\xff\xe0" + bytes(40) + b"\xff\xd9"


def prompt(text: str, answer: str, image: str | None = None) -> dict:
    content = [{"type": "text", "text": text}]
    if image is not None:
        content.insert(0, {"type": "image", "image": image})
    return {"messages": [{"role": "user", "content": content}], "answer": answer}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    Image.new("RGB", (64, 32), "red").save(tmp_path / "red.png")
    (tmp_path / "broken.jpg").write_bytes(BROKEN_JPEG)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_everything_that_is_wrong_is_found_by_line_and_shown(folder, tiny_checkpoint, capsys):
    held_out = folder / "held"
    held_out.mkdir()
    (held_out / "red.png").write_bytes((folder / "red.png").read_bytes())
    rows = [
        prompt("Which colour?", "red", "red.png"),
        prompt("What is 2 + 2?", "4"),
        prompt("what is 2+2?", "4"),
        prompt("What is 2 + 2?", "5"),
        prompt("What is half?", r"\frac{1}{"),
        prompt("No answer?", ""),
        prompt("word " * 300, "7"),
        prompt("Broken?", "1", "broken.jpg"),
        {"messages": [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "<answer>hi</answer>"}]},
    ]
    file, other = write_rows(folder, *rows), write_rows(held_out, rows[0])
    flags = ["--model", str(tiny_checkpoint("qwen2_5_vl")), "--max_len", "256", "--max_new_tokens", "64"]
    with pytest.raises(SystemExit) as ended:
        main([str(file), *flags, "--against", str(other), "--output", "found.json"])
    assert ended.value.code == 3
    found = json.loads(Path("found.json").read_text())
    assert [(finding["kind"], finding["index"]) for finding in found["findings"]] == [
        ("row", 7),
        ("answer", 5),
        ("length", 6),
        ("gold refused", 4),
        ("leak", 0),
        ("duplicate", 2),
        ("contradiction", 3),
    ]
    assert (found["rows"], found["usable"], found["conversations"]) == (9, 8, 1)
    spreads = {spread["name"]: spread for spread in found["distributions"]}
    assert spreads["pixels per image"]["largest"] == 64 * 32
    assert spreads["tokens per prompt"]["count"] == 7
    assert (spreads["tokens per prompt"]["limit"], spreads["tokens per conversation"]["limit"]) == (192, 256)
    said = capsys.readouterr().out
    assert f"leak: 1 row, which is in another file, too\n  {file} line 1: asks what {other} line 1 asks\n" in said
    page = Path("check_data.html").read_text()
    assert "data:image/png;base64," in page
    assert "takes" in page
    assert "<script" not in page


def test_a_good_file_ends_with_code_0_and_no_model_is_needed(folder, capsys):
    file = write_rows(folder, prompt("What is 2 + 2?", "4"), prompt("Which colour?", "red", "red.png"))
    main([str(file), "--html", "page.html", "--thumbnails", "1"])
    assert "nothing was found" in capsys.readouterr().out
    assert Path("page.html").read_text().count("<article") == 1


def test_images_are_told_to_a_model_that_takes_none(folder, tiny_checkpoint):
    file = write_rows(folder, prompt("Which colour?", "red", "red.png"))
    with pytest.raises(SystemExit):
        main([str(file), "--model", str(tiny_checkpoint("llm")), "--output", "found.json"])
    (finding,) = json.loads(Path("found.json").read_text())["findings"]
    assert (finding["kind"], finding["index"]) == ("encoding", 0)
    assert "plain language model" in finding["what"]


def test_a_response_in_a_column_of_its_own_counts_as_the_turn_that_sft_learns(folder, tiny_checkpoint):
    asked = [{"role": "user", "content": "Hi."}]
    rows = [
        {"messages": [*asked, {"role": "assistant", "content": text}], "image": None}
        for text in ("Hey.", "Hey.", "Ho.")
    ]
    with pytest.raises(SystemExit):
        main([str(write_rows(folder, *rows)), "--output", "found.json"])
    found = json.loads(Path("found.json").read_text())
    assert [finding["kind"] for finding in found["findings"]] == ["duplicate", "contradiction"]
    file = write_rows(
        folder, {"prompt": "Count.", "response": "1 2 3"}, {"prompt": "Tell.", "response": "word " * 300}
    )
    with pytest.raises(SystemExit):
        main([str(file), "--model", str(tiny_checkpoint("llm")), "--max_len", "128", "--output", "found.json"])
    found = json.loads(Path("found.json").read_text())
    (finding,) = (finding for finding in found["findings"] if finding["kind"] == "length")
    assert (finding["index"], "SFT leaves it out" in finding["what"]) == (1, True)
    assert [spread["count"] for spread in found["distributions"]] == [2, 2]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--max_len", "64", "--max_new_tokens", "64"], "leaves no room for a prompt"),
        (["--verifiers", "maths"], "--verifiers maths"),
        (["--output", "check_data.html"], "is where the page goes"),
        (["--judge_timeout", "0"], "--judge_timeout"),
    ],
)
def test_what_cannot_be_is_refused_by_name(folder, capsys, flags, told):
    file = write_rows(folder, prompt("What is 2 + 2?", "4"))
    with pytest.raises(SystemExit) as ended:
        main([str(file), *flags])
    assert ended.value.code == 1
    assert told in capsys.readouterr().err
