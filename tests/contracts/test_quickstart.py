"""docs/quickstart.md: every command is accepted as it stands, in the project that `lmm-r1 init` writes."""

import json
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from helpers.commands import error_of
from helpers.tables import commands_of

from lmm_r1.cli import init
from lmm_r1.cli.arguments import parse
from lmm_r1.cli.make_tiny_model import TinyModelConfig
from lmm_r1.config import PPOConfig, SFTConfig
from lmm_r1.config import evaluate as evaluation
from lmm_r1.config import generation as chat
from lmm_r1.config import resolve, sized_ppo, sized_supervised
from lmm_r1.config.evaluate import CheckDataConfig, EvaluateConfig
from lmm_r1.config.generation import ChatConfig
from lmm_r1.config.rewards import reward_functions
from lmm_r1.data.files import read_row_file
from lmm_r1.data.images import load_image
from lmm_r1.data.messages import Row, images_of

PAGE = "docs/quickstart.md"
PROJECT, CHECK, BY_FLAGS = commands_of(PAGE)
CONFIGS: Mapping[str, type] = {
    "make_tiny_model": TinyModelConfig,
    "train_sft": SFTConfig,
    "train_ppo_ray": PPOConfig,
    "evaluate": EvaluateConfig,
    "interactive_chat": ChatConfig,
    "check_data": CheckDataConfig,
}


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """The folder that the page's first commands make, and are in then."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    made, entered = PROJECT[:2]
    assert (made[:2], entered[0]) == (["lmm-r1", "init"], "cd")
    init.main(made[2:])
    monkeypatch.chdir(entered[1])
    return tmp_path / entered[1]


def settled(command: list[str]) -> object:
    """The settings of a command of the page as they work; raises what the command would refuse."""
    program, name, *arguments = command
    assert program == "lmm-r1"
    config = parse(CONFIGS[name], arguments, prog=name, description="")
    if isinstance(config, PPOConfig):
        return sized_ppo(resolve(config), rows=40)[0]
    if isinstance(config, SFTConfig):
        return sized_supervised(resolve(config), rows=40, processes=1)[0]
    if isinstance(config, EvaluateConfig):
        config = evaluation.with_output(config)
        evaluation.check(config)
    if isinstance(config, ChatConfig):
        chat.check_chat(config)
    return config


@pytest.mark.parametrize("command", [*PROJECT[2:], *CHECK, *BY_FLAGS], ids=" ".join)
def test_a_command_of_the_page_is_accepted_as_it_stands(command, project):
    settled(command)


@pytest.mark.parametrize("commands", [PROJECT[2:], BY_FLAGS], ids=["project", "flags"])
def test_each_stage_goes_on_from_the_one_before(commands, project):
    sft, rl, evaluate, talk = map(settled, commands[-4:])
    assert sft.ckpt.output_dir == rl.actor.model_name_or_path == "runs/sft"
    assert evaluate.checkpoints == (sft.ckpt.output_dir, rl.ckpt.output_dir)
    assert talk.model == rl.ckpt.output_dir == "runs/rl"
    # The sizes that follow from 40 rows.
    assert (rl.rollout.batch_size, rl.rollout.n_samples_per_prompt, rl.train.batch_size) == (8, 8, 64)
    assert (sft.train.batch_size, sft.train.micro_batch_size) == (8, 8)


def said_of(row: Row) -> str:
    """Return the thought of a worked answer: the shape that the question names has the answer's colour."""
    (shape,) = re.findall(r"What colour is the (circle|square)\?$", row.messages[-1].parts[-1].text)
    return f"The {shape} is {row.answer}."


def shown_in(row: Row) -> list[str]:
    """Return the pixels of a row's image with its question, or an empty list for a row of text."""
    images = [load_image(image, location=row.location).tobytes().hex() for image in images_of(row.messages)]
    return [*images, row.messages[-1].parts[-1].text] if images else [row.location]


def test_a_project_has_rows_with_pictures_and_worked_answers(project):
    train, test = (list(read_row_file(f"rows/{split}").rows.values()) for split in ("train", "test"))
    assert (len(train), len(test)) == (40, 100)
    assert sum(bool(images_of(row.messages)) for row in train) == 20
    for row in train:
        assert row.response.parts[0].text == f"<think>{said_of(row)}</think><answer>{row.answer}</answer>"
    assert {row.answer for row in test} == {"red", "green", "blue", "yellow"}
    assert not {json.dumps(shown_in(row)) for row in train} & {json.dumps(shown_in(row)) for row in test}
    assert all(row.response is None and row.messages[-1].role == "user" for row in test)


def test_the_reward_of_a_project_is_taken_by_rl_and_worked_out_by_hand(project):
    [found] = reward_functions(settled(PROJECT[4]).reward)
    assert (found.path, found.name) == ("reward.py", "reward")
    names: dict = {}
    exec((project / "reward.py").read_text(encoding="utf-8"), names)
    responses = ["<think>2 3.</think><answer>2, 3</answer>", "<think>.</think><answer>4</answer>", "[2, 3]"]
    assert names["reward"]([], [], ["[2, 3]"] * 3, responses) == {
        "rewards": [1.1, 0.1, 0.0],
        "scores": [1.0, 0.0, 0.0],
        "extra_logs": {"form": [1.0, 1.0, 0.0]},
    }


def test_the_rows_own_worked_answers_earn_the_whole_reward(project):
    names: dict = {}
    exec((project / "reward.py").read_text(encoding="utf-8"), names)
    rows = [json.loads(line) for line in Path("rows/train/rows.jsonl").read_text().splitlines()]
    solved = [row["messages"][-1]["content"] for row in rows]
    scored = names["reward"]([], [], [row["answer"] for row in rows], solved)
    assert set(scored["rewards"]) == {1.1}


def test_a_folder_that_holds_something_is_refused_and_left_alone(tmp_path, capfd):
    (tmp_path / "notes.txt").write_text("mine")
    sentence = f"DIR {tmp_path} exists and is not empty; choose another folder"
    assert error_of("init", [str(tmp_path)], capfd=capfd) == sentence
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
