"""`lmm-r1 check_data` on a file with everything wrong in it."""

import contextlib
import json
from pathlib import Path

import pytest
from helpers.commands import write_rows
from helpers.tables import table
from PIL import Image

from lmm_r1.cli.check_data import main

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


def test_everything_that_is_wrong_is_found_by_line(folder, tiny_checkpoint, capsys):
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
    # The conversation, too: RL asks it without the turn to learn from.
    assert spreads["tokens per prompt"]["count"] == 8
    assert (spreads["tokens per prompt"]["limit"], spreads["tokens per conversation"]["limit"]) == (192, 256)
    said = capsys.readouterr().out
    assert f"leak: 1 row, which is also in another file\n  {file} line 1: asks what {other} line 1 asks\n" in said


def test_a_good_file_ends_with_code_0_and_no_model_is_needed(folder, capsys):
    file = write_rows(folder, prompt("What is 2 + 2?", "4"), prompt("Which colour?", "red", "red.png"))
    main([str(file)])
    assert "No problems found" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--max_len", "64", "--max_new_tokens", "64"], "--max_new_tokens 64 must be below --max_len 64"),
        (["--reward", "maths"], "--reward maths"),
        (["--reward", "none.py:f"], "--reward none.py: no such file"),
        (["--output", "."], "--output . is a folder; name a file"),
        (["--judge_timeout", "0"], "--judge_timeout"),
    ],
)
def test_what_cannot_be_is_refused_by_name(folder, capsys, flags, told):
    file = write_rows(folder, prompt("What is 2 + 2?", "4"))
    with pytest.raises(SystemExit) as ended:
        main([str(file), *flags])
    assert ended.value.code == 1
    assert told in capsys.readouterr().err


def judged(folder: Path, *rows: dict, flags: tuple[str, ...] = ()) -> dict:
    """What is found in rows with judged responses."""
    with contextlib.suppress(SystemExit):
        main([str(write_rows(folder, *rows)), "--output", "found.json", *flags])
    return json.loads(Path("found.json").read_text())


def found_kinds(found: dict) -> list[tuple[str, int]]:
    return [(finding["kind"], finding["index"]) for finding in found["findings"]]


def test_preferences_are_told_as_such_and_bad_ones_by_line(folder, tiny_checkpoint, capsys):
    asked = "<image>Which colour?"
    rows = [
        {"prompt": asked, "images": ["red.png"], "chosen": "red", "rejected": "blue", "margin": 2},
        {"prompt": asked, "images": ["red.png"], "chosen": "red", "rejected": "green"},
        {"prompt": asked, "images": ["red.png"], "chosen": "red ", "rejected": "blue"},
        {"prompt": asked, "images": ["red.png"], "chosen": "blue", "rejected": "red"},
        {"prompt": "1 + 1?", "chosen": "2", "rejected": "2"},
        {"prompt": "Tell.", "chosen": "word " * 300, "rejected": "No."},
    ]
    held = folder / "held"
    held.mkdir()
    (held / "red.png").write_bytes((folder / "red.png").read_bytes())
    other = write_rows(held, prompt("Which colour?", "red", "red.png"))
    flags = ("--model", str(tiny_checkpoint("qwen2_5_vl")), "--max_len", "256", "--against", str(other))
    found = judged(folder, *rows, flags=flags)
    assert (found["kind"], found["rows"], found["usable"]) == ("preference", 6, 5)
    assert found["counts"] == {"pairs": 5, "pairs with a margin": 1}
    assert found_kinds(found) == [
        ("row", 4),
        ("length", 5),
        *(("leak", index) for index in range(4)),
        ("duplicate", 2),
        ("contradiction", 3),
    ]
    told = {(finding["kind"], finding["index"]): finding["what"] for finding in found["findings"]}
    assert told["row", 4].startswith("chosen and rejected are equal")
    assert "the prompt with chosen takes" in told["length", 5]
    assert told["contradiction", 3].endswith("but has the verdict 'blue' instead of 'red'")
    (lengths,) = (spread for spread in found["distributions"] if spread["name"] == "tokens per conversation")
    assert lengths["count"] == 10
    said = capsys.readouterr().out
    assert "6 rows of the kind preference: 5 pairs, 1 pairs with a margin\n" in said
    assert "5 rows of the kind preference in the format preference (preferences)" in said


SPELLED = tuple(table("contracts/check_data", "spelled"))


@pytest.mark.parametrize("model", [None, "llm"])
def test_rows_that_spell_special_tokens_are_found_with_how_often_they_do(folder, tiny_checkpoint, capsys, model):
    file = write_rows(folder, *SPELLED[:3])
    flags = [] if model is None else ["--model", str(tiny_checkpoint(model))]
    with pytest.raises(SystemExit):
        main([str(file), *flags, "--output", "found.json"])
    found = json.loads(Path("found.json").read_text())["findings"]
    told = {finding["index"]: finding["what"] for finding in found if finding["kind"] == "special tokens"}
    # No token of this model; without one, known ones of several are looked for.
    other = {} if model == "llm" else {1: "the user's text: </s>"}
    assert told == {0: "the user's text: <|im_end|> (2 x), <|im_start|>; the assistant's text: <|im_end|>", **other}
    rows = "2 rows, each of which" if other else "1 row, which"
    assert (
        f"special tokens: {rows} writes special tokens as text, which do not act as a turn or an end"
        in capsys.readouterr().out
    )


def test_rows_that_rl_refuses_are_found_if_they_begin_the_response_and_counted_otherwise(folder):
    begun = {
        "messages": [
            {
                "role": "user",
                "content": [{"type": "image", "image": "IMAGE_PLACEHOLDER"}, {"type": "text", "text": "?"}],
            },
            {"role": "assistant", "content": "Let me think."},
        ],
        "image": "red.png",
    }
    found = judged(folder, {**begun, "decoded_message": "cat"}, {**begun, "answer": "7"})
    assert found_kinds(found)[0] == ("answer", 0)
    assert "has no answer for RL to reward" in found["findings"][0]["what"]
    turns = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hey."}]
    found = judged(folder, {"messages": turns}, {"messages": turns * 2, "answer": "4"})
    assert found_kinds(found) == []
    assert any(note.startswith("train_ppo_ray refuses 2 of the 2 rows") for note in found["notes"])
    masked = [turns[0], {**turns[1], "loss": False}]
    assert found_kinds(judged(folder, {"messages": masked})) == [("answer", 0)]
