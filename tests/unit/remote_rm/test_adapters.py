"""The adapters for other trainers, called as those trainers call them."""

from __future__ import annotations

import importlib.util
import pickle
import sys
from collections import defaultdict
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest

from remote_rm.adapters import EasyR1Scores, TRLReward, VerlScore

RIGHT = "<think>two twos</think><answer>4</answer>"
README = Path(__file__).resolve().parents[3] / "remote_rm/README.md"


def documented(heading: str) -> str:
    """Return the Python code of README's section for a trainer, which has at most ten lines."""
    section = README.read_text(encoding="utf-8").split(f"\n### {heading}\n")[1].split("\n##")[0]
    code = section.split("```python\n")[1].split("```")[0]
    assert len(code.splitlines()) <= 10
    return code


def loaded(code: str, folder: Path, *, name: str) -> ModuleType:
    """Load a file by its path and put it into sys.modules, as verl and EasyR1 do."""
    file = folder / "rewards.py"
    file.write_text(code)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[name]
    return module


def test_verl_gets_a_dict_with_score_and_acc_for_keywords(tmp_path):
    compute_score = loaded(documented("verl"), tmp_path, name="custom_module").compute_score

    # verl wraps the function to add the arguments of the config, and gives each response by keywords.
    def with_kwargs(function, extra, *arguments, **keywords):
        return function(*arguments, **{**keywords, **extra})

    called = partial(with_kwargs, compute_score, {})
    row = {"data_source": "openai/gsm8k", "ground_truth": "4", "extra_info": {"index": 3, "num_turns": 2}}
    right = called(**row, solution_str=f"{RIGHT}<|im_end|>", reward_router_address=None)
    assert right == {"score": 1.0, "accuracy": 1.0, "format": 1.0, "ungradable": 0.0, "timed_out": 0.0, "acc": 1.0}
    wrong = called(**row, solution_str="<think>so</think><answer>5</answer>")
    assert (wrong["score"], wrong["acc"], wrong["format"]) == (0.0, 0.0, 1.0)
    # PRIME's reward manager sends the function to processes.
    again = pickle.loads(pickle.dumps(compute_score))
    assert again(**row, solution_str=RIGHT)["score"] == 1.0


def test_easyr1_gets_a_dict_with_overall_for_each_reward_input(tmp_path):
    module = loaded(documented("EasyR1"), tmp_path, name="custom_reward_fn")
    assert module.REWARD_TYPE == "batch"
    reward_fn = partial(module.compute_score, **{})
    inputs = [
        {"response": RIGHT, "response_length": 9, "ground_truth": "4"},
        {"response": "The answer is 4.", "response_length": 5, "ground_truth": "4"},
        {"response": RIGHT, "response_length": 9, "ground_truth": "5"},
    ]
    scores = reward_fn(inputs)
    metrics = defaultdict(list)
    for score in scores:
        for key, value in score.items():
            metrics[key].append(value)
    # 1.0 for the accuracy and 0.5 for the format.
    assert metrics["overall"] == [1.5, 1.0, 0.5]
    assert metrics["accuracy"] == [1.0, 1.0, 0.0]
    assert metrics["format"] == [1.0, 0.0, 1.0]
    assert pickle.loads(pickle.dumps(module.compute_score))(inputs) == scores


def test_trl_gets_a_list_of_numbers_for_texts_and_for_messages():
    namespace: dict[str, TRLReward] = {}
    exec(documented("TRL").split("trainer =")[0], namespace)
    reward = namespace["reward"]
    assert reward.__name__ == "math"
    assert pickle.loads(pickle.dumps(reward)).label == "solution"
    columns = {"solution": ["4", "5"], "level": [1, 2], "trainer_state": object(), "log_metric": print}
    texts = reward(prompts=["2+2?", "2+3?"], completions=[RIGHT, RIGHT], completion_ids=[[1], [2]], **columns)
    assert texts == [1.5, 0.5]
    asked = [{"role": "user", "content": "2+2?"}]
    said = [{"role": "assistant", "content": RIGHT}]
    parts = [
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "<think>so</think>"}, {"type": "text", "text": "<answer>5</answer>"}],
        }
    ]
    messages = reward(prompts=[asked, asked], completions=[said, parts], completion_ids=[[1], [2]], **columns)
    assert messages == [1.5, 1.5]


def test_without_the_column_of_its_labels_trl_is_told_what_to_name():
    with pytest.raises(ValueError, match="no column 'answer'.*label=\"solution\""):
        TRLReward()(prompts=["2+2?"], completions=["4"], completion_ids=[[1]], solution=["4"])


@pytest.mark.parametrize(
    ("kind", "settings", "told"),
    [
        (VerlScore, {"verifier": "maths"}, "unknown verifier 'maths'; did you mean math?"),
        (EasyR1Scores, {"settings": {"format_wait": 1}}, "math has no setting 'format_wait'"),
    ],
)
def test_a_wrong_verifier_or_setting_is_refused_when_the_adapter_is_made(kind, settings, told):
    with pytest.raises(ValueError, match=told):
        kind(**settings)
