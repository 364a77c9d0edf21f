"""Lists of rewards with weights: one sum in training, batch inference, evaluation and check_data."""

import asyncio
import json
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import psutil
import pytest
from helpers.conversations import message, row
from helpers.tables import table

from lmm_r1.api.functions import named_rewards
from lmm_r1.config.ppo import RewardConfig
from lmm_r1.config.rewards import check_reward, columns_of, reward_list
from lmm_r1.data.sample import Completion
from lmm_r1.errors import UserError
from lmm_r1.generation.engine import Outcome
from lmm_r1.scoring import ScoredResponse
from lmm_r1.scoring.sources import make_judge, make_scorer
from lmm_r1.tools.batch import RowLog, run_job
from lmm_r1.tools.data_check import function_findings
from lmm_r1.tools.evaluation.board import MeasuredFile
from lmm_r1.tools.evaluation.rows import judge_responses

FILE = """
def length(responses):
    return [0.9 if len(text) < 40 else 1 / 3 for text in responses]

def graded(responses, labels):
    right = [float(label in text) for text, label in zip(responses, labels)]
    shares = [1 / len(text) for text in responses]
    return {"rewards": [3 * one - 1 for one in right], "scores": right, "extra_logs": {"share": shares}}
"""
ROW = row(message("user", "1 + 1?"), answer="2")
SAID = ["<think>x</think><answer>2</answer>", "<answer>2</answer>", f"<think>{'x' * 40}</think><answer>3</answer>", ""]
# Right, in format, and short (0.9) or long (1/3): 1 + 0.5 + 0.09; 1 + 0.09; 0.5 + 1/30; 0.09.
TOTALS = pytest.approx([1.59, 1.09, 8 / 15, 0.09], abs=1e-12)
SPEC = "math=1,format=0.5,reward.py:length=0.1"
PARTS = {"accuracy": 1.0, "math": 1.0, "format": 1.0, "reward/length": 0.9, "ungradable": 0.0, "timed_out": 0.0}
DONE = [Completion(text=text, num_tokens=9, finish_reason="stop") for text in SAID]
judge_of = partial(make_judge, flag="--reward", workers=1)


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "reward.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)


def in_training(reward: str, *said: str, **functions) -> list:
    scorer = make_scorer(RewardConfig(remote_url=reward), given=functions)
    batch = [ScoredResponse(row=ROW, prompt="", query=text, response=text, num_tokens=9) for text in said]
    scores = asyncio.run(scorer.rewards(batch))
    asyncio.run(scorer.close())
    return scores


def in_batch_inference(reward: str) -> list[dict]:
    log = RowLog(Path("out.jsonl"))
    log.open({}, overwrite=False, flag="--output")
    outcomes = [Outcome(index=index, row=ROW, completions=(one,)) for index, one in enumerate(DONE)]
    with judge_of(reward) as judge:
        run_job(outcomes, order=range(4), log=log, scorer=judge, on_progress=lambda totals: None)
    return [response for record in log.records() for response in record["responses"]]


def in_evaluation(reward: str) -> list:
    file = MeasuredFile(name="rows", source="rows", verifiers=columns_of([reward]), ks=(1,), rows={0: ROW})
    with ExitStack() as stack:
        judges = {one: stack.enter_context(judge_of(one)) for one in file.verifiers if not reward_list(one)}
        return judge_responses({0: DONE}, checkpoint="c", file=file, judges=judges)


def test_one_list_gives_the_same_sums_everywhere():
    trained = in_training(SPEC, *SAID)
    assert [score.reward for score in trained] == TOTALS
    assert [score.score for score in trained] == [1.0, 1.0, 0.0, 0.0], "the first part says what is right"
    assert trained[0].parts == PARTS
    batch = in_batch_inference(SPEC)
    assert [response["reward"] for response in batch] == TOTALS
    assert batch[0]["scores"] == PARTS
    measured = in_evaluation(SPEC)
    assert [one.verdicts[SPEC].score for one in measured] == TOTALS
    assert [one.verdicts[SPEC].right for one in measured] == [True, True, False, False]
    assert {name: verdict.score for name, verdict in measured[2].verdicts.items()} == pytest.approx(
        {"math": 0.0, "format": 1.0, "reward.py:length": 1 / 3, SPEC: 8 / 15}
    )
    with judge_of(SPEC) as judge:
        findings, told = function_findings({0: ROW}, SPEC, judge)
    # The answer in its tags, 50 characters: 1 + 0.5 + 1/30.
    assert (findings, told.split(" own answers ")[1][:7], told[-15:]) == ([], "1.53333", "0.09 on average")


def test_a_function_adds_its_reward_and_judges_by_its_score():
    # Rewards 2 and -1, scores 1 and 0; with the function first, it decides what is right.
    first, second = in_training("reward.py:graded=0.5,format=-1", SAID[1], SAID[2])
    assert (first.reward, first.score, first.parts["accuracy"]) == (1.0, 1.0, 1.0)
    assert (second.reward, second.score, second.parts["reward/graded"]) == (-1.5, 0.0, -1.0)
    assert first.parts["reward/graded/share"] == 1 / len(SAID[1])


def test_python_takes_functions_names_and_weights_in_one_list():
    def right(responses, labels):
        return [0.9 * (label in text) for text, label in zip(responses, labels, strict=True)]

    spec, functions = named_rewards([(right, 0.5), "format=0.1", ("math", 1 / 3)])
    assert spec == "python:right=0.5,format=0.1,math=0.3333333333333333"
    [score] = in_training(spec, SAID[0], **functions)
    assert score.reward == pytest.approx(0.45 + 0.1 + 1 / 3)
    with pytest.raises(UserError, match="^reward: two functions are called <lambda>; rename one"):
        named_rewards([lambda responses: responses, lambda responses: []])


def test_a_failing_function_ends_a_job_and_its_process_ends_with_the_judge():
    before = psutil.Process().children()
    with pytest.raises(UserError, match=r"reward.py, line 7: the reward function raised ZeroDivisionError"):
        in_batch_inference("math,reward.py:graded")
    kept = map(json.loads, Path("out.jsonl").read_text().splitlines())
    assert [record["responses"][0]["reward"] for record in kept] == [3.0, 3.0, -1.0]
    assert psutil.Process().children() == before
    with pytest.raises(UserError, match="ZeroDivisionError"):
        judge_of("reward.py:graded").check_rows([ROW])


@pytest.mark.parametrize(("spec", "said"), table("scoring/reward_lists", "what_is_no_list_is_refused"))
def test_what_is_no_list_is_refused(spec, said):
    with pytest.raises(UserError) as refused:
        check_reward(spec, flag="--reward")
    assert str(refused.value).startswith(f"--reward {said}")
