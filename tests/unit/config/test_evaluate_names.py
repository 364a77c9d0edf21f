"""What is measured may be named by its path alone, and so is the file of its scores."""

from dataclasses import replace
from pathlib import Path

import pytest

from lmm_r1.config.evaluate import EvaluateConfig, named, with_output
from lmm_r1.errors import UserError


def test_a_path_without_a_name_is_called_like_its_file_or_folder():
    entries = ["runs/sft", "b=runs/rl", "Qwen/Qwen2.5-VL-3B-Instruct"]
    found = {"sft": "runs/sft", "b": "runs/rl", "Qwen2.5-VL-3B-Instruct": entries[2]}
    assert named(entries, flag="--checkpoints") == found
    files = ["data/test/rows.jsonl", "held.out.parquet", "rows.jsonl"]
    assert named(files, flag="--files") == {"test": files[0], "held.out": files[1], "rows": files[2]}


def test_a_path_that_holds_the_sign_is_one(tmp_path):
    (tmp_path / "lr=1").mkdir()
    assert named([str(tmp_path / "lr=1")], flag="--checkpoints") == {"lr=1": str(tmp_path / "lr=1")}


@pytest.mark.parametrize("entry", ["=runs/rl", "b=", ""])
def test_half_a_name_is_refused(entry):
    with pytest.raises(UserError, match="write NAME=PATH"):
        named([entry], flag="--checkpoints")


def test_two_paths_of_one_name_are_refused_and_where_a_name_is_needed_a_path_alone_is():
    with pytest.raises(UserError, match="the name rl is given twice; write NAME=PATH with another"):
        named(["a/rl", "b/rl"], flag="--checkpoints")
    with pytest.raises(UserError, match="--suite_data copies/mathvista: write NAME=PATH"):
        named(["copies/mathvista"], flag="--suite_data", bare=False)


def test_scores_go_to_a_file_that_is_named_after_what_is_measured():
    config = EvaluateConfig(checkpoints=("runs/sft", "my model=runs/rl"), files=("data/test/rows.jsonl",))
    assert with_output(config).output == Path("runs/evaluation/sft_my-model_on_test.json")
    assert with_output(replace(config, output=Path("a.json"))).output == Path("a.json")
    long = replace(config, checkpoints=tuple(f"runs/{number:050}" for number in range(5)))
    assert len(str(with_output(long).output.name)) == 125
    assert with_output(EvaluateConfig(compare=("a.json",))).output is None
