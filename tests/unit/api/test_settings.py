"""Settings and rows of a call, what it changes in its process, and how its errors are told."""

import asyncio
import gc
import importlib
import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lmm_r1.api import functions, own_process, read_config, row_file, without_flags
from lmm_r1.config import PPOConfig, SFTConfig
from lmm_r1.data.files import read_row_file
from lmm_r1.data.images import load_image
from lmm_r1.data.messages import images_of
from lmm_r1.errors import UserError


def test_the_runs_that_functions_name_exist(monkeypatch):
    named: list[str] = []
    monkeypatch.setattr(functions, "_supervised", lambda run, *settings: named.append(run))
    for train in (functions.train_sft, functions.train_dpo, functions.train_rm, functions.train_kd):
        train()
    for module, _, name in (run.partition(":") for run in named):
        assert isinstance(getattr(importlib.import_module(f"lmm_r1.supervised.{module}"), name), type)


def test_a_mapping_is_nested_or_dotted_or_both_and_its_values_are_those_of_the_flags():
    config = read_config(
        PPOConfig,
        {
            "actor": {"model_name_or_path": Path("models/m"), "adam": {"lr": 1e-6}, "eps_clip_low_high": (0.1, 0.3)},
            "train.seed": 3,
            "ckpt.max_mem": math.inf,
            "reward.function_kwargs": {"weight": 0.5},
            "data.max_len": "64",
            "eval.dataset": None,
        },
        {"train.seed": 4},
    )
    assert config.actor.model_name_or_path == "models/m"
    assert (config.actor.adam.lr, config.actor.eps_clip_low_high) == (1e-6, (0.1, 0.3))
    assert (config.train.seed, config.ckpt.max_mem, config.data.max_len) == (4, math.inf, 64)
    assert (config.reward.function_kwargs, config.eval.dataset) == ('{"weight": 0.5}', None)


def test_a_file_stands_under_what_goes_before_it_and_a_dataclass_likewise(tmp_path):
    file = tmp_path / "stage.yaml"
    file.write_text("train:\n  seed: 5\n  batch_size: 2\n")
    config = read_config(SFTConfig, file, {"train.batch_size": 4})
    assert (config.train.seed, config.train.batch_size) == (5, 4)
    assert read_config(SFTConfig, config, {"train.seed": 6}).train.seed == 6


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"trian.seed": 1}, "config: unknown key trian.seed; did you mean train.seed?"),
        ({"train": {"seed": "x"}}, "config: train.seed must be a whole number, not 'x'"),
        ({"train": 3}, "config: train is a group of settings, not a setting"),
        ({"train.seed": object}, "config: <class 'object'> is no value of a setting; give a text, a number or a list"),
        (3, "config is a int; give a mapping of settings, the path of a YAML file, or a SFTConfig"),
        ("none.yaml", "none.yaml: No such file or directory; check the path"),
    ],
)
def test_what_cannot_be_read_is_told_without_flags(given, told):
    with pytest.raises(UserError) as error:
        read_config(SFTConfig, given)
    assert str(error.value) == told


def test_environment_and_garbage_collector_are_put_back_where_a_call_fails_too():
    before, thresholds = dict(os.environ), gc.get_threshold()

    def failing() -> None:
        os.environ["DS_ACCELERATOR"] = "cpu"
        os.environ.pop("PATH")
        gc.set_threshold(50_000, 20, 100)
        raise UserError("no")

    with pytest.raises(UserError), own_process():
        failing()
    assert (dict(os.environ), gc.get_threshold()) == (before, thresholds)


def test_where_an_event_loop_runs_as_in_a_notebook_a_call_may_run_its_own_and_that_one_goes_on():
    async def work() -> str:
        await asyncio.sleep(0)
        return "done"

    async def cell() -> list[object]:
        here = asyncio.get_running_loop(), asyncio.current_task()
        with own_process():
            done = asyncio.run(work())
        await asyncio.sleep(0)
        return [done, here == (asyncio.get_running_loop(), asyncio.current_task())]

    assert asyncio.run(cell()) == ["done", True]


@pytest.mark.parametrize(
    ("sentence", "told"),
    [
        ("--train.batch_size 3 must be a multiple of --n", "train.batch_size 3 must be a multiple of n"),
        ("--reward.remote_url python:right: it\nhangs", "reward.remote_url right: it hangs"),
        ("saved in -- x; the same command goes on", "saved in -- x; the same call goes on"),
    ],
)
def test_a_sentence_about_flags_becomes_one_about_settings(sentence, told):
    assert without_flags(sentence) == told


QUESTION = {"role": "user", "content": "1 + 1?"}


def test_images_in_memory_and_numbers_of_numpy_come_back_from_the_file(tmp_path):
    picture = Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3))
    picture.save(tmp_path / "picture.png")
    stored = (tmp_path / "picture.png").read_bytes()
    shown = {"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": "What?"}]}
    rows = [
        {"messages": [shown], "answer": str(np.int64(7)), "box": np.array([1, 2])},
        {"messages": [{"role": "user", "content": "<image> What?"}], "images": [stored], "answer": "8"},
        {"messages": [{"role": "user", "content": "<image> What?"}], "images": [{"bytes": stored}], "answer": "9"},
    ]
    path = row_file(iter(rows), folder=tmp_path, argument="rows")
    read = read_row_file(path).rows
    assert [row.answer for row in read.values()] == ["7", "8", "9"]
    assert read[0].columns["box"] == [1, 2]
    for row in read.values():
        (part,) = images_of(row.messages)
        assert np.array_equal(np.asarray(load_image(part, location="here")), np.asarray(picture))


def test_other_rows_never_take_the_place_of_a_file(tmp_path):
    first, second = (
        row_file([{"messages": [QUESTION], "answer": answer}], folder=tmp_path, argument="rows") for answer in "23"
    )
    assert first != second
    assert json.loads(Path(first).read_text())["answer"] == "2"
    assert row_file([{"messages": [QUESTION], "answer": "2"}], folder=tmp_path, argument="rows") == first


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([], "eval_rows is empty; give at least one row"),
        ([{"answer": "2"}, "text"], r"eval_rows\[1\] is a str; a row is a mapping"),
        ([{"answer": {1}}], r"eval_rows\[0\]: a set is nothing that a row can hold; a row holds texts"),
    ],
)
def test_what_is_no_row_is_told_with_its_place(rows, told, tmp_path):
    with pytest.raises(UserError, match=f"^{told}"):
        row_file(rows, folder=tmp_path, argument="eval_rows")
    assert list(tmp_path.iterdir()) == []
