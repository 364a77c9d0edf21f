"""Bad input to the real commands: one sentence on stderr, an exit code, no Ray started and nothing written."""

import io
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
from helpers.commands import (
    ANSWERED,
    QUESTION,
    TWO_ANSWERS,
    error_of,
    error_of_process,
    lines_of_error,
    ppo,
    supervised,
    tree,
    with_image,
    without_ray,
    write_rows,
)
from helpers.processes import warm_python
from helpers.tables import table
from PIL import Image

from lmm_r1 import hub

ROOT = Path(__file__).resolve().parents[2]
NOWHERE = "http://127.0.0.1:9/get_reward"


pytestmark = pytest.mark.usefixtures("own_environment")


@pytest.fixture(scope="session")
def tiny_models(tiny_checkpoint: Callable[[str], Path]) -> dict[str, Path]:
    """A small checkpoint of each kind: `image` takes images, `text` does not."""
    return {"image": tiny_checkpoint("qwen2_5_vl"), "text": tiny_checkpoint("llm")}


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Libraries that may ask the hub, and a hub that does not answer."""
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    hub.is_reachable.cache_clear()
    yield
    hub.is_reachable.cache_clear()


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder of a command, in which two good rows and a reward function lie."""
    write_rows(tmp_path, QUESTION, QUESTION)
    without_ray(tmp_path, monkeypatch)
    (tmp_path / "file").write_text("not a folder")
    return tmp_path


def encoded(kind: str) -> bytes:
    """A noisy image, so that most of the file is pixels."""
    buffer = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 255, (40, 40, 3), dtype=np.uint8)
    Image.fromarray(noise).save(buffer, format=kind)
    return buffer.getvalue()


def sft(model: Path | str, **changes: object) -> list[str]:
    return supervised(model, **{"train__max_epochs": 1, "ckpt__path": "checkpoints", **changes})


# Lines of rows.jsonl for train_ppo_ray, and what the sentence must hold: where, what is wrong, what to do.
BAD_ROWS = {
    "missing image": (
        [QUESTION, with_image("no.png")],
        ["rows.jsonl line 2: no image file", "no.png; relative paths"],
    ),
    "cut PNG": ([QUESTION, with_image("cut.png")], ["rows.jsonl line 2: cannot read", "cut.png: ", "; replace it"]),
    "cut JPEG": ([QUESTION, with_image("cut.jpg")], ["rows.jsonl line 2: cannot read", "cut.jpg: ", "; replace it"]),
    "no answer": (
        [QUESTION, {"messages": QUESTION["messages"]}],
        ['rows.jsonl line 2: the answer "answer" is missing (found: messages); fill it in', "--data.label_key"],
    ),
    "malformed line": (
        [QUESTION, '{"messages": ['],
        ["rows.jsonl line 2: not valid JSON: Expecting value at column 15; correct or remove the line"],
    ),
    "unknown role": (
        [{**QUESTION, "messages": [{"role": "robot", "content": "?"}]}],
        ["rows.jsonl line 1: ", "has the role 'robot'; known roles are system, user, assistant, tool"],
    ),
    "answer in the prompt": (
        [QUESTION, TWO_ANSWERS],
        ["rows.jsonl line 2: ", "must not end with one of several assistant turns; such rows are for train_sft"],
    ),
    "too few rows": (
        [QUESTION],
        ["--data.prompt_dataset rows.jsonl gives 1 prompts, fewer than --rollout.batch_size 2; lower it or add rows"],
    ),
    "no rows": ([], ["rows.jsonl holds no rows"]),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_a_bad_row_stops_rl_before_it_starts(case, tiny_models, work, capfd):
    rows, parts = BAD_ROWS[case]
    for name, kind in (("cut.png", "PNG"), ("cut.jpg", "JPEG")):
        data = encoded(kind)
        (work / name).write_bytes(data[: len(data) // 2])
    write_rows(work, *rows)
    before = tree(work)
    sentence = error_of("train_ppo_ray", ppo(tiny_models["image"]), capfd=capfd)
    assert [part for part in parts if part not in sentence] == []
    assert tree(work) == before


def test_all_bad_rows_of_a_file_are_listed_with_what_each_lacks(tiny_models, work, capfd):
    write_rows(work, QUESTION, "{]", with_image("no.png"), TWO_ANSWERS, [], QUESTION)
    sentence, *lines = lines_of_error("train_ppo_ray", ppo(tiny_models["image"]), capfd=capfd)
    assert sentence == (
        "rows.jsonl: 4 of its 6 rows cannot be used; correct or remove them, or leave them out with --data.bad_rows skip:"
    )
    assert [line.split(";")[0] for line in lines] == [
        "  rows.jsonl line 2: not valid JSON: Expecting property name enclosed in double quotes at column 2",
        f"  rows.jsonl line 3: no image file {work}/no.png",
        "  rows.jsonl line 4: a prompt for RL must not end with one of several assistant turns",
        "  rows.jsonl line 5: must be a JSON object, not list",
    ]
    write_rows(work, *[ANSWERED] * 2, *[QUESTION] * 25)
    sentence, *lines = lines_of_error("train_sft", sft(tiny_models["text"]), capfd=capfd)
    assert sentence.startswith("rows.jsonl: 25 of its 27 rows cannot be used; ")
    assert [line.split(":")[0] for line in lines] == ["  rows.jsonl line 3 (25 rows, this is the first)"]
    write_rows(work, *[ANSWERED] * 2, *[with_image(f"{number}.png", base=ANSWERED) for number in range(25)])
    _, *lines = lines_of_error("train_sft", sft(tiny_models["text"]), capfd=capfd)
    assert (len(lines), lines[-1]) == (21, "  and 5 more")


def test_bad_rows_that_are_skipped_are_counted_and_too_few_are_left(tiny_models, work, capfd):
    write_rows(work, QUESTION, TWO_ANSWERS, "{]")
    sentence = error_of("train_ppo_ray", ppo(tiny_models["image"], data__bad_rows="skip"), capfd=capfd)
    assert sentence.startswith("--data.prompt_dataset rows.jsonl gives 1 prompts, fewer than --rollout.batch_size 2")


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([ANSWERED, with_image("no.png", base=ANSWERED)], "line 2: no image file"),
        ([ANSWERED, with_image("cut.png", base=ANSWERED)], "cut.png: image file is truncated; replace it or drop"),
        ([ANSWERED, "{]"], "line 2: not valid JSON"),
        ([ANSWERED], "--data.dataset rows.jsonl gives 1 rows, fewer than --train.batch_size 2; lower it or add rows"),
        ([ANSWERED, QUESTION], "line 2: an assistant turn must follow a prompt; SFT rows end with one"),
    ],
)
def test_a_bad_row_stops_sft_before_it_starts(rows, sentence, tiny_models, work, capfd):
    (work / "cut.png").write_bytes(encoded("PNG")[:-500])
    write_rows(work, *rows)
    before = tree(work)
    assert sentence in error_of("train_sft", sft(tiny_models["image"]), capfd=capfd)
    assert tree(work) == before


@pytest.mark.parametrize(("command", "argv"), [("train_ppo_ray", ppo), ("train_sft", sft)])
def test_images_are_never_dropped_for_a_plain_language_model(command, argv, tiny_models, work, capfd):
    (work / "a.png").write_bytes(encoded("PNG"))
    base = QUESTION if command == "train_ppo_ray" else ANSWERED
    write_rows(work, base, with_image("a.png", base=base))
    before = tree(work)
    sentence = error_of(command, argv(tiny_models["text"]), capfd=capfd)
    assert sentence.startswith("rows.jsonl line 2: the row has an image, but --")
    assert f"model_name_or_path {tiny_models['text']} is a plain language model; give a multimodal" in sentence
    assert tree(work) == before


def rewrite_config(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def cut_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def remove(*names: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return damage


def overwrite(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text) and None


# What is done to a good checkpoint, and what the sentence about it must hold beside the folder's name.
BAD_MODELS = {
    "unknown model_type": (
        lambda folder: rewrite_config(folder, model_type="martian_vl"),
        ["no kit for model_type 'martian_vl'", "known: ", "qwen2_5_vl"],
    ),
    "no image processor": (
        remove("processor_config.json"),
        ["no image processor in this checkpoint; copy processor_config.json or preprocessor_config.json, the tok"],
    ),
    "damaged image processor": (overwrite("processor_config.json", "{"), ["cannot be loaded", "; copy processor"]),
    "no tokenizer": (remove("tokenizer.json", "tokenizer_config.json"), ["no tokenizer in this checkpoint; copy the"]),
    "no chat template": (remove("chat_template.jinja"), ["no chat template in this checkpoint; copy the original"]),
    "damaged chat template": (overwrite("chat_template.jinja", "{% if %}"), ["the chat template of", "is broken"]),
    "no config": (remove("config.json"), ["no config.json in this folder; is it a Hugging Face checkpoint?"]),
    "damaged config": (overwrite("config.json", '{"model_type": '), ["config.json: not valid JSON (", "; copy the"]),
    "config of another kind": (overwrite("config.json", "[]"), ["config.json: a JSON object is needed, not list"]),
    "no weights": (remove("model.safetensors"), ["no weights in this folder (model.safetensors or ", "; copy them"]),
    "cut weights": (cut_weights, ["model.safetensors: the weight file is damaged (", "; copy it again"]),
}


@pytest.mark.parametrize(("command", "argv"), [("train_ppo_ray", ppo), ("train_sft", sft)])
@pytest.mark.parametrize("case", BAD_MODELS)
def test_a_damaged_checkpoint_stops_training_before_it_starts(case, command, argv, tiny_models, work, capfd):
    damage, parts = BAD_MODELS[case]
    shutil.copytree(tiny_models["image"], work / "model")
    damage(work / "model")
    before = tree(work)
    sentence = error_of(command, argv("model"), capfd=capfd)
    assert sentence.startswith("model")
    assert [part for part in parts if part not in sentence] == []
    assert tree(work) == before


@pytest.mark.parametrize("model", ["runs/cold_start", "no-such-model"])
@pytest.mark.usefixtures("no_network")
def test_a_model_that_is_nowhere_is_told_at_once_without_network(model, work, capfd):
    started = time.monotonic()
    for command, argv in (("train_ppo_ray", ppo), ("train_sft", sft)):
        sentence = error_of(command, argv(model), capfd=capfd)
        assert sentence.startswith(f"{model}: no such folder, and no model of this name can be had from the hub (")
        assert sentence.endswith("; check the path or the name")
    assert time.monotonic() - started < 20  # the imports; the hub's retries would take 35 s each


@pytest.mark.parametrize(
    ("rows", "sentence"), table("integration/bad_input", "rows_that_are_nowhere_are_told_at_once_without_network")
)
@pytest.mark.usefixtures("no_network")
def test_rows_that_are_nowhere_are_told_at_once_without_network(rows, sentence, tiny_models, work, capfd):
    argv = ppo(tiny_models["image"], data__prompt_dataset=rows)
    assert error_of("train_ppo_ray", argv, capfd=capfd).startswith(sentence)


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (None, ["bad.py: no such file; check the path"]),
        ("def reward_func(:", ["bad.py: the file cannot be imported (SyntaxError: ", "line 1", "; correct it"]),
        ("import no_such_module", ["(ModuleNotFoundError: No module named 'no_such_module'); correct it"]),
        ("x = 1", ["bad.py: the file defines no reward_func(queries, prompts, labels)"]),
    ],
)
def test_a_reward_function_that_cannot_be_had_is_told_before_ray_starts(content, parts, tiny_models, work, capfd):
    if content is not None:
        (work / "bad.py").write_text(content)
    before = tree(work)
    sentence = error_of("train_ppo_ray", ppo(tiny_models["image"], reward__remote_url="bad.py"), capfd=capfd)
    assert sentence.startswith("--reward.remote_url bad.py: ")
    assert [part for part in parts if part not in sentence] == []
    assert set(tree(work)) - set(before) <= {"__pycache__"}


def test_a_reward_server_that_is_down_is_told_before_ray_starts(tiny_models, work, capfd):
    before = tree(work)
    sentence = error_of("train_ppo_ray", ppo(tiny_models["image"], reward__remote_url=NOWHERE), capfd=capfd)
    assert sentence.startswith(f"--reward.remote_url {NOWHERE}: no reward server listens at {NOWHERE} (")
    assert sentence.endswith(
        "start one with `python -m remote_rm.math_verifier --port PORT` and give its address, ending in /get_reward"
    )
    assert tree(work) == before


@pytest.mark.parametrize(("command", "argv"), [("train_ppo_ray", ppo), ("train_sft", sft)])
def test_a_finished_stage_is_never_overwritten(command, argv, tiny_models, work, capfd):
    write_rows(work, *[QUESTION if command == "train_ppo_ray" else ANSWERED] * 2)
    (work / "out").mkdir()
    (work / "out" / "stage.json").write_text("{}")
    before = tree(work)
    sentence = error_of(command, argv(tiny_models["image"]), capfd=capfd)
    assert sentence.startswith("--ckpt.output_dir out: this stage is finished (stage.json is there)")
    assert "--ckpt.overwrite" in sentence
    assert {name: data for name, data in tree(work).items() if "__pycache__" not in name} == before


def test_rows_that_are_all_longer_than_the_budget_are_refused_before_a_run_starts(tiny_models, work, capfd):
    (work / "a.png").write_bytes(encoded("PNG"))
    write_rows(work, ANSWERED, with_image("a.png", base=ANSWERED))
    before = tree(work)
    # The question has 7 tokens.
    sentence = error_of("train_sft", sft(tiny_models["image"], data__max_len=8), capfd=capfd)
    assert sentence == "every row of --data.dataset rows.jsonl is longer than --data.max_len 8; raise it"
    sentence = error_of("train_ppo_ray", ppo(tiny_models["image"], data__max_len=9), capfd=capfd)
    assert sentence.startswith(
        "--data.max_len 9 leaves 8 tokens for a prompt, and the shortest one's text and template"
    )
    assert tree(work) == before


def process_environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.mark.slow
def test_an_image_row_longer_than_the_budget_is_skipped_and_counted_in_sft(tiny_models, work):
    Image.new("RGB", (560, 560)).save(work / "large.png")  # 20 x 20 placeholders
    write_rows(work, ANSWERED, with_image("large.png", base=ANSWERED))
    argv = sft(tiny_models["image"], data__max_len=300, data__overlong_images="keep")
    command = [warm_python(), "-m", "lmm_r1.cli.train_sft", *argv]
    ended = subprocess.run(command, cwd=work, env=process_environment(), capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert "1 rows longer than --data.max_len 300 were skipped" in ended.stdout
    metrics = json.loads((work / "out" / "metrics.jsonl").read_text())
    assert (metrics["step"], metrics["overlong_rows"]) == (1, 1.0)
    assert metrics["grad_norm"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "argv", "told"),
    [
        ("train_ppo_ray", partial(ppo, reward__remote_url=NOWHERE), "no reward server listens at"),
        ("train_sft", sft, "rows.jsonl line 2: no image file"),
    ],
)
def test_a_process_of_its_own_says_no_more_than_the_sentence(command, argv, told, tiny_models, work):
    if command == "train_sft":
        write_rows(work, ANSWERED, with_image("no.png", base=ANSWERED))
    sentence = error_of_process(
        f"lmm_r1.cli.{command}",
        argv(tiny_models["image"]),
        cwd=work,
        prefix=f"lmm-r1 {command}: error: ",
        env=process_environment(),
    )
    assert told in sentence
    assert not (work / "out").exists()
