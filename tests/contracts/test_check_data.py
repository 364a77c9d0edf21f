"""`lmm-r1 check_data` on a file with everything wrong in it."""

import contextlib
import json
import re
import shutil
from pathlib import Path

import pytest
from helpers.commands import write_rows
from helpers.tables import table
from PIL import Image

from lmm_r1.cli.check_data import main
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits.checkpoint import Checkpoint, check_embeddings

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


def test_what_a_reward_function_gives_the_rows_own_answers_is_shown(folder, capsys):
    (folder / "grades.py").write_text("FOUND = r'boxed{(.*)}'\n")
    (folder / "rewards.py").write_text(
        "import re, grades\n\ndef boxed(completions, gold, **kwargs):\n"
        "    found = [re.search(grades.FOUND, one[0]['content']) for one in completions]\n"
        "    return [float(bool(one) and one[1] == right) / int(right) for one, right in zip(found, gold)]\n"
    )
    rows = [prompt("1 + 1?", "2") | {"gold": "2"}, prompt("2 + 2?", "4") | {"gold": "5"}, prompt("0?", "0")]
    file = write_rows(folder, *rows, prompt("1 - 1?", "0") | {"gold": "0"})
    with pytest.raises(SystemExit):
        main([str(file), "--reward", "rewards.py:boxed", "--output", "found.json"])
    found = json.loads(Path("found.json").read_text())
    kinds = [(finding["kind"], finding["index"]) for finding in found["findings"]]
    assert kinds == [("gold refused", 2), ("gold refused", 3), ("gold wrong", 1)]
    assert "asks for gold" in found["findings"][0]["what"]
    assert "rewards.py, line 5: the reward function raised ZeroDivisionError" in found["findings"][1]["what"]
    assert (
        "rewards.py:boxed gives the rows' own answers 0 to 0.5 (mean 0.25), and empty responses 0"
        in found["notes"][-1]
    )


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


def test_the_kind_is_named_where_the_columns_do_not_tell_it(folder):
    row = {"q": "1 + 1?", "good": "2", "bad": "3"}
    found = judged(folder, row, flags=("--input_key", "q", "--chosen_key", "good", "--rejected_key", "bad"))
    assert (found["kind"], found["findings"]) == ("preference", [])
    # A preference can be checked as the prompt and the response that RL and SFT take.
    row = {"prompt": "1 + 1?", "chosen": "2", "rejected": "3"}
    assert judged(folder, row, flags=("--kind", "prompts"))["kind"] == "prompts"


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--reward", "exact"], "--reward exact: "),
        (["--kind", "prompts", "--chosen_key", "x"], "--chosen_key x: is for preferences"),
        (["--kind", "preference", "--format", "pairs"], "--format pairs is for another kind of rows"),
    ],
)
def test_flags_that_judged_rows_have_no_use_for_are_refused(folder, capsys, flags, told):
    file = write_rows(folder, {"prompt": "1 + 1?", "chosen": "2", "rejected": "3"})
    with pytest.raises(SystemExit) as ended:
        main([str(file), *flags])
    assert ended.value.code == 1
    assert told in capsys.readouterr().err


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


@pytest.mark.parametrize(("added", "special", "found"), [(1, True, 2), (0, False, 0)])
def test_ids_without_an_embedding_are_found_and_refused_by_name_and_padded_rows_are_not(
    added, special, found, folder, tiny_checkpoint
):
    """The tiny model has a row for each id; a padded vocabulary has more."""
    model = folder / "model"
    shutil.copytree(tiny_checkpoint("llm"), model)
    checkpoint = Checkpoint(str(model))
    rows = checkpoint.config.vocab_size
    assert len(checkpoint.tokenizer) <= rows
    fillers = [f"<filler {number}>" for number in range(rows - len(checkpoint.tokenizer) + added)]
    checkpoint.tokenizer.add_tokens(fillers, special_tokens=special)
    checkpoint.tokenizer.save_pretrained(model)
    findings = judged(folder, prompt("What is 2 + 2?", "4"), prompt("Why?", "5"), flags=("--model", str(model)))[
        "findings"
    ]
    assert [finding["kind"] for finding in findings] == ["encoding"] * found
    said = f"the tokenizer has {rows + 1} ids and the model {rows} embeddings, so that {(fillers or [''])[-1]!r}"
    assert all(said in finding["what"] for finding in findings)
    with pytest.raises(UserError, match=re.escape(said)) if added else contextlib.nullcontext():
        check_embeddings(Checkpoint(str(model)))


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


def test_options_that_are_not_shown_and_columns_that_nothing_reads_are_told(folder):
    found = judged(folder, {"problem": "Which?", "choices": ["cat", "dog"], "answer": 1, "id": 7})
    assert found_kinds(found) == [("options", 0)]
    assert "columns that no training reads: choices (1 row), id (1 row)" in found["notes"]
