"""A user's reward function gets the whole group: all responses, the images, and every other column of the row."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.conversations import load_rows, message, picture, row
from helpers.tables import table

from lmm_r1.config.ppo import RewardConfig
from lmm_r1.config.rewards import reward_functions
from lmm_r1.errors import UserError
from lmm_r1.scoring import Moment, ScoredResponse
from lmm_r1.scoring.functions import FunctionScorer
from remote_rm.verifier import Score

ROW = replace(row(message("user", picture(8, 4), "How many?"), answer="2"), columns={"bbox": [1, 2], "level": "easy"})


def batch(*responses: str, of=ROW) -> list[ScoredResponse]:
    return [
        ScoredResponse(row=of, prompt="<q>", query=f"<q>{text}", response=text, num_tokens=len(text) + 1)
        for text in responses
    ]


def scorer(folder: Path, code: str, *, name: str = "", **settings: str) -> FunctionScorer:
    path = folder / "rewards.py"
    path.write_text(code)
    [function] = reward_functions(RewardConfig(remote_url=f"{path}{name}", **settings))
    return FunctionScorer(function)


def scores(source: FunctionScorer, responses: list[ScoredResponse]) -> list[tuple[float, float, dict[str, float]]]:
    made = asyncio.run(source.rewards(responses))
    return [(item.reward, item.score, item.parts) for item in made]


def test_one_call_gets_the_whole_group_with_images_and_columns_by_name(tmp_path):
    code = """
CALLS = 0

def reward_func(queries, prompts, labels, bbox, images, responses, level="none", missing=3):
    global CALLS
    CALLS += 1
    assert [queries, labels, bbox] == [["<q>a", "<q>bb"], ["2", "2"], [[1, 2], [1, 2]]], (queries, labels, bbox)
    assert (level, missing) == (["easy", "easy"], 3), (level, missing)
    assert [[image.size for image in own] for own in images] == [[(8, 4)], [(8, 4)]]
    return {"rewards": [CALLS + len(text) for text in responses], "extra_logs": {"long": [0, 1]}}
"""
    assert scores(scorer(tmp_path, code), batch("a", "bb")) == [(2.0, 2.0, {"long": 0.0}), (3.0, 3.0, {"long": 1.0})]


def test_a_function_with_keywords_gets_all_there_is(tmp_path):
    code = """
def reward_func(queries, prompts, labels, **more):
    assert sorted(more) == ["bbox", "datasources", "image_scales", "images", "level", "response_lengths", "responses"], sorted(more)
    assert more["datasources"] == ["test"] and more["bbox"] == [[1, 2]]
    return more["response_lengths"]
"""
    assert [reward for reward, *_ in scores(scorer(tmp_path, code), batch("a", "bb"))] == [2.0, 3.0]


TOLD = """
def reward_func(queries, prompts, labels, step, held_out=None):
    assert held_out is (step == 3), (step, held_out)
    return [step for _ in queries]
"""
TOLD_ALL = """
def reward_func(queries, prompts, labels, **more):
    assert more["held_out"] is (more["step"] == 3)
    return [more["step"] for _ in queries]
"""
TOLD_EASYR1 = """
def compute_score(reward_inputs):
    assert all(one["held_out"] is (one["step"] == 3) for one in reward_inputs)
    return [{"overall": one["step"]} for one in reward_inputs]
"""


@pytest.mark.parametrize("code", [TOLD, TOLD_ALL, TOLD_EASYR1])
def test_a_function_is_told_the_step_and_whether_the_row_is_held_out(tmp_path, code):
    source = scorer(tmp_path, code)
    # A column of the same name is hidden.
    own = replace(ROW, columns={"step": "boil the water"})
    source.check_rows([ROW, own])
    for step, held_out in ((1, False), (2, False), (3, True)):
        moment = Moment(step=step, held_out=held_out)
        given = [replace(item, moment=moment) for item in batch("a", "bb", of=own)]
        assert [reward for reward, *_ in scores(source, given)] == [step, step]


def test_a_function_of_openrlhf_gets_one_response_at_a_time_with_the_prompts_text(tmp_path):
    # As OpenRLHF's examples are written: a part of the log is one number for the call.
    code = """
import torch

def reward_func(queries, prompts, labels):
    assert (len(queries), prompts, labels) == (1, ["<q>"], ["2"])
    reward = torch.tensor([[float(len(query) - len(prompt)) for query, prompt in zip(queries, prompts)]])
    return {"rewards": reward, "scores": reward / 2, "extra_logs": {"length": reward.mean().item()}}
"""
    given = batch("a", "bb", "cccc")
    expected = [(1.0, 0.5, {"length": 1.0}), (2.0, 1.0, {"length": 2.0}), (4.0, 2.0, {"length": 4.0})]
    assert scores(scorer(tmp_path, code), given) == expected


def test_a_function_of_trl_gets_completions_as_messages_and_columns_by_name(tmp_path):
    code = """
def accuracy_reward(completions, level, prompts, **kwargs):
    assert prompts[0][0]["role"] == "user" and len(prompts) == 2
    assert level == ["easy", "easy"] and kwargs["bbox"] == [[1, 2], [1, 2]]
    return [float(len(completion[0]["content"])) for completion in completions]
"""
    source = scorer(tmp_path, code, name=":accuracy_reward")
    assert scores(source, batch("a", "bb")) == [(1.0, 1.0, {}), (2.0, 2.0, {})]
    lacks = scorer(tmp_path, "def f(completions, solution):\n    return [0]\n", name=":f")
    with pytest.raises(UserError, match=r"f in --reward.remote_url .* asks for solution, .* \(found: bbox, level\)"):
        lacks.check_rows([ROW])


def test_a_function_of_trl_gets_the_ids_of_completions_and_the_steps_before_this_one(tmp_path):
    code = """
def f(completion_ids, trainer_state, completions, **kwargs):
    return [len(ids) + trainer_state.global_step for ids in completion_ids]
"""
    source = scorer(tmp_path, code, name=":f")
    source.check_rows([ROW])
    given = [replace(one, token_ids=(5, 6), moment=Moment(step=3, held_out=False)) for one in batch("a", "bb")]
    assert [reward for reward, _, _ in scores(source, given)] == [4.0, 4.0]


@pytest.mark.parametrize(("code", "rewards"), table("scoring/function_signatures", "found_by_their_signature"))
def test_a_function_is_found_by_its_signature(tmp_path, code, rewards):
    assert [reward for reward, _, _ in scores(scorer(tmp_path, code), batch("a", "bb"))] == rewards


@pytest.mark.parametrize(("code", "name", "sentence"), table("scoring/function_signatures", "refused"))
def test_a_wrong_signature_is_refused_when_the_file_is_read(tmp_path, code, name, sentence):
    with pytest.raises(UserError) as raised:
        scorer(tmp_path, code, name=name)
    assert sentence in str(raised.value)


@pytest.mark.parametrize("returned", ["[1.0]", "[None, 1.0]", "3"])
def test_what_a_function_of_trl_must_return_is_told(tmp_path, returned):
    source = scorer(tmp_path, f"def f(completions, **kwargs):\n    return {returned}\n", name=":f")
    with pytest.raises(UserError, match="f gave no usable reward .*; return a list with one number for each of the 2"):
        scores(source, batch("a", "bb"))


def test_a_function_of_verl_gets_one_response_and_its_label(tmp_path):
    code = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert (data_source, ground_truth, extra_info) == ("test", "2", {"index": 7})
    if solution_str == "a":
        return 0.25
    return {"score": len(solution_str), "acc": 1.0, "pred": solution_str}
"""
    own = replace(ROW, columns={"extra_info": {"index": 7}})
    made = scores(scorer(tmp_path, code), batch("a", "bb", of=own))
    assert made == [(0.25, 0.25, {}), (2.0, 1.0, {"acc": 1.0})]


def test_the_columns_of_r1_v_reach_a_function_that_asks_for_them(tmp_path):
    code = "def f(completions, solution, level, **kwargs):\n    return [float(solution == ['<answer> 4 </answer>'])]\n"
    (read,) = load_rows(str(Path(__file__).resolve().parents[2] / "data" / "cases" / "F11_reward_columns_r1v.jsonl"))
    source = scorer(tmp_path, code, name=":f")
    source.check_rows([read])
    assert scores(source, batch("4", of=read)) == [(1.0, 1.0, {})]


BATCH_OF_DICTS = """
REWARD_NAME = "counting"
REWARD_TYPE = "batch"

def compute_score(reward_inputs, weight=0.5):
    assert len(reward_inputs) == 2
    return [
        {
            "overall": weight * (item["response"] == item["ground_truth"]) + (item["bbox"] == [1, 2]),
            "accuracy": item["response"] == item["ground_truth"],
            "length": item["response_length"],
        }
        for item in reward_inputs
    ]
"""


def test_a_batch_function_of_easyr1_runs_as_it_is(tmp_path):
    source = scorer(tmp_path, BATCH_OF_DICTS, name=":compute_score")
    assert scores(source, batch("2", "33")) == [
        (1.5, 1.5, {"accuracy": 1.0, "length": 2.0}),
        (1.0, 1.0, {"accuracy": 0.0, "length": 3.0}),
    ]


def test_a_sequential_function_gets_one_input_at_a_time(tmp_path):
    code = """
REWARD_TYPE = "sequential"

def compute_score(reward_input):
    assert reward_input["images"][0].size == (8, 4)
    return {"overall": reward_input["response_length"], "format": 1}
"""
    assert scores(scorer(tmp_path, code), batch("a", "bb")) == [
        (2.0, 2.0, {"format": 1.0}),
        (3.0, 3.0, {"format": 1.0}),
    ]


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("REWARD_TYPE = 'all'\ndef compute_score(inputs): ...\n", "REWARD_TYPE 'all' must be 'batch' or 'sequential'"),
        ("def compute_score(one, two, three): ...\n", "has the signature of no known reward function"),
        ("def other(): ...\n", r"defines no reward_func\(queries, prompts, labels\) and no compute_score"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_when_it_is_loaded(tmp_path, code, said):
    with pytest.raises(UserError, match=said):
        scorer(tmp_path, code)


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ("[{'overall': 1.0}]", "1 scores for 2 responses"),
        ("[{'accuracy': 1.0}] * 2", "KeyError: 'overall'"),
        ("[{'overall': None}] * 2", "TypeError"),
        ("[1.0, 2.0]", "AttributeError"),
        ("1.0", "no list of scores"),
    ],
)
def test_what_is_no_score_is_told_with_the_file_and_the_function(tmp_path, returned, said):
    source = scorer(tmp_path, f"def compute_score(inputs):\n    return {returned}\n")
    with pytest.raises(UserError, match=f"rewards.py: compute_score gave no usable reward .*{said}"):
        scores(source, batch("a", "b"))


def test_images_are_decoded_only_where_they_are_looked_at(tmp_path):
    missing = row(message("user", "p"), answer="1")
    broken = tmp_path / "rows.jsonl"
    broken.write_text('{"message": "<image>what?", "images": ["none.png"], "answer": "1"}\n')
    picture(8, 4).save(tmp_path / "none.png")
    (bad,) = load_rows(str(broken))
    (tmp_path / "none.png").write_bytes(b"no image")
    code = "def compute_score(inputs):\n    return [{'overall': len(item['images'])} for item in inputs]\n"
    assert scores(scorer(tmp_path, code), batch("a", of=bad)) == [(1.0, 1.0, {})]
    assert scores(scorer(tmp_path, code), batch("a", of=missing)) == [(0.0, 0.0, {})]
    code = "def compute_score(inputs):\n    return [{'overall': item['images'][-1].width} for item in inputs]\n"
    with pytest.raises(UserError, match="rows.jsonl line 1"):
        scores(scorer(tmp_path, code), batch("a", of=bad))


@pytest.mark.parametrize("text", ["weight=1", "[1]"])
def test_arguments_that_are_no_json_object_are_refused(text):
    with pytest.raises(UserError, match="--reward.function_kwargs"):
        reward_functions(RewardConfig(remote_url="rewards.py", function_kwargs=text))


def test_a_verifier_as_a_function_is_called_for_several_groups_at_a_time(tmp_path):
    code = """
import threading
from remote_rm.math_verifier import MathVerifier
from remote_rm.reward_function import reward_func_of

BOTH = threading.Barrier(2, timeout=20)

class Waiting(MathVerifier):
    def quick_score(self, item):
        BOTH.wait()
        return super().quick_score(item)

reward_func = reward_func_of(Waiting())
"""
    source = scorer(tmp_path, code)

    async def both() -> list[list[Score]]:
        return await asyncio.gather(source.rewards(batch("2")), source.rewards(batch("2")))

    assert [score.score for scores in asyncio.run(both()) for score in scores] == [1.0, 1.0]
