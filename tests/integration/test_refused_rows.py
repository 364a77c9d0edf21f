"""Rows that cannot be encoded: found before a run by every command that trains, and left out where that is asked for."""

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.commands import error_of, flags, lines_of_error, ppo, supervised, tree, without_ray, write_rows
from helpers.commands_here import start_anew
from PIL import Image

from lmm_r1.cli import check_data, train_sft
from lmm_r1.supervised import sft

pytestmark = pytest.mark.usefixtures("own_environment")

CASES = Path(__file__).resolve().parents[1] / "data" / "cases"
REFUSED_IMAGE = "the processor refuses the images or videos (10x5000): absolute aspect ratio must be smaller than 200"
SKIP = "or leave it out with --data.bad_rows skip"


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Callable[[str], Path]) -> Path:
    return tiny_checkpoint("qwen2_5_vl")


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for file in CASES.iterdir():
        shutil.copy(file, tmp_path)
    without_ray(tmp_path, monkeypatch)
    return tmp_path


def read(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (CASES / name).read_text().splitlines()]


def kd(model: Path, **changes: object) -> list[str]:
    return [*supervised(model, **changes), *flags({"teacher.model_name_or_path": model})]


def as_pair(row: dict[str, Any]) -> dict[str, Any]:
    return {"prompt": row["messages"][:1], "chosen": row["messages"][1:], "rejected": "five"}


def as_it_is(row: dict[str, Any]) -> dict[str, Any]:
    return row


# By the command: its flags, and what it makes of the rows of the cases.
COMMANDS = {
    "train_sft": (supervised, as_it_is),
    "train_kd": (kd, as_it_is),
    "train_dpo": (supervised, as_pair),
    "train_rm": (supervised, as_pair),
}


def test_rl_is_not_started_with_an_image_that_the_processor_refuses(model, work, capfd):
    shutil.copy("F05_extreme_aspect_rl.jsonl", "rows.jsonl")
    before = tree(work)
    sentence = error_of("train_ppo_ray", ppo(model), capfd=capfd)
    assert sentence == f"rows.jsonl line 5: {REFUSED_IMAGE}, got 500.0; take the row out, {SKIP}"
    assert tree(work) == before
    too_few = error_of("train_ppo_ray", ppo(model, data__bad_rows="skip", rollout__batch_size=5), capfd=capfd)
    assert too_few.startswith("--data.prompt_dataset rows.jsonl gives 4 prompts, fewer than --rollout.batch_size 5")


def test_held_out_rows_of_rl_are_checked_alike(model, work, capfd):
    write_rows(work, *read("F05_extreme_aspect_rl.jsonl")[:4])
    held_out = {"eval__dataset": "F05_extreme_aspect_rl.jsonl", "eval__steps": 1}
    sentence = error_of("train_ppo_ray", ppo(model, **held_out), capfd=capfd)
    assert sentence.startswith(f"F05_extreme_aspect_rl.jsonl line 5: {REFUSED_IMAGE}")


@pytest.mark.parametrize("command", COMMANDS)
def test_no_supervised_run_begins_with_an_image_that_the_processor_refuses(command, model, work, capfd):
    argv, form = COMMANDS[command]
    write_rows(work, *map(form, read("F05_extreme_aspect_sft.jsonl")))
    before = tree(work)
    sentence = error_of(command, argv(model), capfd=capfd)
    assert sentence == f"rows.jsonl line 7: {REFUSED_IMAGE}, got 500.0; take the row out, {SKIP}"
    assert tree(work) == before
    too_few = error_of(command, argv(model, data__bad_rows="skip", train__batch_size=7), capfd=capfd)
    assert too_few.startswith("--data.dataset rows.jsonl gives 6 rows, fewer than --train.batch_size 7")


@pytest.mark.parametrize("command", ["train_sft", "train_kd"])
def test_a_template_that_rewrites_history_is_found_before_the_run_and_its_advice_leads_on(command, model, work, capfd):
    argv, _ = COMMANDS[command]
    given = {"data__dataset": "F06_multi_turn_think.jsonl", "data__tokenizer_chat_template": "F06_think.jinja"}
    before = tree(work)
    sentence = error_of(command, argv(model, **given), capfd=capfd)
    assert sentence.startswith(
        "F06_multi_turn_think.jsonl line 7: the chat template writes the messages up to 2 differently when more follow"
    )
    assert sentence.endswith(
        f"by --data.tokenizer_chat_template, and SFT learns the last turn only by --data.no_multiturn, {SKIP}"
    )
    assert tree(work) == before
    last_turn = [*argv(model, **given, train__batch_size=8), "--data.no_multiturn"]
    assert "gives 7 rows, fewer than --train.batch_size 8" in error_of(command, last_turn, capfd=capfd)
    skips = argv(model, **given, train__batch_size=8, data__bad_rows="skip")
    assert "gives 6 rows, fewer than --train.batch_size 8" in error_of(command, skips, capfd=capfd)


@pytest.mark.parametrize("command", ["train_dpo", "train_rm"])
def test_a_response_whose_turns_are_rewritten_is_found_before_the_run(command, model, work, capfd):
    argv, form = COMMANDS[command]
    write_rows(work, *map(form, read("F06_multi_turn_think.jsonl")))
    given = {"data__tokenizer_chat_template": "F06_think.jinja"}
    sentence = error_of(command, argv(model, **given), capfd=capfd)
    assert sentence.startswith("rows.jsonl line 7: the chat template writes the messages up to 2 differently")
    assert "no_multiturn" not in sentence


@pytest.mark.parametrize("command", COMMANDS)
def test_an_end_token_of_another_name_is_found_before_the_run(command, model, work, capfd):
    argv, form = COMMANDS[command]
    shutil.copytree(model, "renamed")
    shutil.copy("F09_tokenizer_config.json", "renamed/tokenizer_config.json")
    write_rows(work, *map(form, read("F09_eos.jsonl") * 2))
    for skips in ({}, {"data__bad_rows": "skip"}):
        sentence, *others = lines_of_error(command, argv("renamed", **skips), capfd=capfd)
        said = " ".join([sentence, *others])
        assert ("line 1 (2 rows, this is the first): the chat" in said) == (not skips)
        assert (
            "the chat template ends an assistant turn with 'A<|im_end|>\\n', in which the tokenizer's end token <|endoftext|> is missing"
            in said
        )
        assert "let eos_token in the checkpoint's tokenizer_config.json be the token that the template writes" in said
        assert "--data.bad_rows" not in said, "nothing would be left"
    assert not Path("out").exists()


def findings(file: str, model: Path | str) -> list[tuple[int, str]]:
    """Return what check_data finds against the encoding of rows: places, and how each sentence begins."""
    argv = [file, "--model", str(model), "--output", "found.json"]
    with pytest.raises(SystemExit):
        check_data.main(argv)
    found = json.loads(Path("found.json").read_text())["findings"]
    return [(one["index"], one["what"]) for one in found if one["kind"] == "encoding"]


@pytest.mark.parametrize("form", [as_it_is, as_pair])
def test_check_data_tells_turns_apart_as_a_training_does(form, model, work):
    shutil.copytree(model, "rewriting")
    for file in Path("rewriting").glob("*chat_template*"):
        file.unlink()
    shutil.copy("F06_think.jinja", "rewriting/chat_template.jinja")
    write_rows(work, *map(form, read("F06_multi_turn_think.jsonl")))
    ((index, what),) = findings("rows.jsonl", "rewriting")
    assert (index, what.startswith("the chat template writes the messages up to 2 differently")) == (6, True)
    shutil.copytree(model, "renamed")
    shutil.copy("F09_tokenizer_config.json", "renamed/tokenizer_config.json")
    write_rows(work, *map(form, read("F09_eos.jsonl")))
    ((index, what),) = findings("rows.jsonl", "renamed")
    assert (index, "the tokenizer's end token <|endoftext|> is missing" in what) == (0, True)


def broken_png() -> bytes:
    """Return an image with a good beginning and a good ending, whose pixels cannot be decoded."""
    stream = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 255, (40, 40, 3), dtype=np.uint8)
    Image.fromarray(noise).save(stream, "PNG")
    content = bytearray(stream.getvalue())
    content[len(content) // 2 : len(content) // 2 + 64] = bytes(64)
    return bytes(content)


def learned(argv: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    start_anew(monkeypatch)
    train_sft.main(argv)


def steps_of(run: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def left_out(run: Path) -> list[tuple[int, str]]:
    lines = map(json.loads, (run / "left_out_rows.jsonl").read_text().splitlines())
    return [(line["index"], line["reason"].split(":")[0]) for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_pixels_that_break_in_a_run_stop_it_with_advice_that_leads_on(workers, model, work, monkeypatch, capfd):
    rows = read("F05_extreme_aspect_sft.jsonl")
    image = rows[5]["messages"][0]["content"][0]
    Path("broken.png").write_bytes(broken_png())
    rows[5]["messages"][0]["content"][0] = {**image, "image": "broken.png"}
    write_rows(work, *rows)
    given = {"train__max_epochs": 1, "train__batch_size": 2, "data__bad_rows": "stop", "ckpt__save_steps": 1}
    given |= {"data__dataloader_num_workers": workers}
    argv = [*supervised(model, **given), "--data.keep_order"]
    # The refused one is no row of the run: its size says so.
    assert "rows.jsonl line 7: the processor refuses" in error_of("train_sft", argv, capfd=capfd)
    write_rows(work, *rows[:6])
    with pytest.raises(SystemExit):
        learned(argv, monkeypatch)
    said = capfd.readouterr().err
    assert "step 3: rows.jsonl line 6: cannot read the image " in said
    assert "To continue this run, repeat the command with --data.bad_rows skip, which leaves the row out" in said
    assert steps_of(Path("out")) == [1, 2]
    learned([*argv, "--data.bad_rows", "skip"], monkeypatch)
    assert steps_of(Path("out")) == [1, 2, 3]
    assert left_out(Path("out")) == [(5, "rows.jsonl line 6")]
    assert "a row is left out: rows.jsonl line 6: cannot read the image " in capfd.readouterr().out


@pytest.mark.slow
def test_a_run_goes_on_after_a_row_that_it_has_left_out_was_removed(model, work, monkeypatch):
    rows = read("F05_extreme_aspect_sft.jsonl")
    write_rows(work, *rows[-1:], *rows[:-1])
    given = {"data__bad_rows": "skip", "train__max_epochs": 1, "ckpt__save_steps": 1}
    encode, calls = sft.encode_sample, iter(range(1 + 2 * 2))
    monkeypatch.setattr(sft, "encode_sample", lambda *row, **named: next(calls) + 1 and encode(*row, **named))
    with pytest.raises(SystemExit):
        learned(supervised(model, **given), monkeypatch)
    monkeypatch.setattr(sft, "encode_sample", encode)
    assert (steps_of(Path("out")), left_out(Path("out"))) == ([1, 2], [(0, "rows.jsonl line 1")])
    write_rows(work, *rows[:-1])
    learned(supervised(model, **given), monkeypatch)
    assert steps_of(Path("out")) == [1, 2, 3]
