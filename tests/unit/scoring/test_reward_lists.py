"""Lists of rewards with weights: one sum in training, batch inference and evaluation, by verifiers and functions."""

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
from lmm_r1.batch import RowLog, run_job
from lmm_r1.config.evaluate import EvaluateConfig, check
from lmm_r1.config.ppo import RewardConfig
from lmm_r1.config.rewards import check_reward, columns_of, reward_functions, reward_list, verifier_from
from lmm_r1.data.recipes.recipe import SuiteSampling
from lmm_r1.data.sample import Completion
from lmm_r1.errors import UserError
from lmm_r1.evaluation.board import MeasuredFile
from lmm_r1.evaluation.rows import RowSet, judge_responses
from lmm_r1.evaluation.scores import summarize
from lmm_r1.generation.engine import Outcome
from lmm_r1.scoring import ScoredResponse
from lmm_r1.scoring.sources import make_judge, make_scorer
from remote_rm.verifier import Item

FILE = """
def length(responses):
    return [0.9 if len(text) < 40 else 1 / 3 for text in responses]

def graded(responses, labels):
    right = [float(label in text) for text, label in zip(responses, labels)]
    return {"rewards": [3 * one - 1 for one in right], "scores": right, "extra_logs": {"chars": list(map(len, responses))}}

def broken(responses):
    return [1 / len(text) for text in responses]
"""
ROW = row(message("user", "1 + 1?"), answer="2")
SAID = ["<think>x</think><answer>2</answer>", "<answer>2</answer>", f"<think>{'x' * 40}</think><answer>3</answer>", ""]
# Right, in format, and short (0.9) or long (1/3): 1 + 0.5 + 0.09; 1 + 0.09; 0.5 + 1/30; 0.09.
TOTALS = pytest.approx([1.59, 1.09, 8 / 15, 0.09], abs=1e-12)
SPEC = "math=1,format=0.5,reward.py:length=0.1"
PARTS = {"accuracy": 1.0, "math": 1.0, "format": 1.0, "reward/length": 0.9, "ungradable": 0.0}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "reward.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def completions(*texts: str) -> tuple[Completion, ...]:
    return tuple(Completion(text=text, num_tokens=len(text) + 1, finish_reason="stop") for text in texts)


def in_training(reward: str, *said: str, **functions) -> list:
    async def scored():
        scorer = make_scorer(RewardConfig(remote_url=reward), given=functions)
        try:
            scorer.check_rows([ROW])
            return await scorer.rewards(
                [ScoredResponse(row=ROW, prompt="", query=text, response=text, num_tokens=9) for text in said]
            )
        finally:
            await scorer.close()

    return asyncio.run(scored())


def in_batch_inference(reward: str, *said: str) -> list[dict]:
    log = RowLog(Path("out.jsonl"))
    log.open({}, overwrite=False, flag="--output")
    outcomes = [Outcome(index=index, row=ROW, completions=completions(text)) for index, text in enumerate(said)]
    with make_judge(reward, flag="--reward", workers=1) as judge:
        order = list(range(len(said)))
        run_job(outcomes, order=order, log=log, scorer=judge, on_progress=lambda totals: None)
    return [response for record in log.records() for response in record["responses"]]


def in_evaluation(*rewards: str) -> list:
    file = MeasuredFile(name="rows", source="rows", verifiers=columns_of(rewards), ks=(1,))
    row_set = RowSet(file=file, rows={0: ROW}, sampling=SuiteSampling())
    with ExitStack() as stack:
        judge = partial(make_judge, flag="--reward", workers=1)
        judges = {one: stack.enter_context(judge(one)) for one in file.verifiers if not reward_list(one)}
        return judge_responses({0: completions(*SAID)}, checkpoint="c", row_set=row_set, judges=judges)


def test_one_list_gives_the_same_sums_in_training_batch_inference_and_evaluation():
    trained = in_training(SPEC, *SAID)
    assert [score.reward for score in trained] == TOTALS
    assert [score.score for score in trained] == [1.0, 1.0, 0.0, 0.0], "the first part says what is right"
    assert trained[0].parts == {**PARTS, "timed_out": 0.0}
    batch = in_batch_inference(SPEC, *SAID)
    assert [response["reward"] for response in batch] == TOTALS
    assert batch[0]["scores"].items() >= PARTS.items()
    measured = in_evaluation(SPEC)
    assert [response.verdicts[SPEC].score for response in measured] == TOTALS
    found = summarize(measured, verifiers=columns_of([SPEC]), ks=[1]).verifiers
    # The columns: 2 of 4 right, 2 in format, lengths 3 x 0.9 and 1/3, and the mean of the sums.
    means = {"math": 0.5, "format": 0.5, "reward.py:length": 91 / 120, SPEC: 991 / 1200}
    assert {name: scores.accuracy.mean for name, scores in found.items()} == pytest.approx(means)
    assert found[SPEC].pass_at_k[1].mean == 0.5


def test_a_list_of_verifiers_is_their_composition_everywhere():
    spec = "math=1,format=0.5"
    assert verifier_from(spec) == verifier_from("composition:math=1,format=0.5")
    measured = in_evaluation(spec)
    assert [response.verdicts[spec].score for response in measured] == [1.5, 1.0, 0.5, 0.0]
    assert verifier_from(spec).score(Item(prompt="", response=SAID[2], label="2")).reward == 0.5


def test_a_function_adds_its_reward_and_judges_by_its_score():
    # Rewards 2 and -1, scores 1 and 0; with the function first, it decides what is right.
    first, second = in_training("reward.py:graded=0.5,format=-1", SAID[1], "<think>x</think><answer>3</answer>")
    assert (first.reward, first.score, first.parts["accuracy"]) == (1.0, 1.0, 1.0)
    assert (second.reward, second.score, second.parts["reward/graded"]) == (-1.5, 0.0, -1.0)
    assert first.parts["reward/graded/chars"] == len(SAID[1])
    [alone] = in_batch_inference("reward.py:graded", "it is 2")
    assert (alone["reward"], alone["scores"]) == (2.0, {"chars": 7.0})


def test_python_takes_functions_names_and_weights_in_one_list():
    def right(responses, labels):
        return [0.9 * (label in text) for text, label in zip(responses, labels, strict=True)]

    spec, functions = named_rewards([(right, 0.5), "format=0.1", ("reward.py:length", 0.1)])
    assert spec == "python:right=0.5,format=0.1,reward.py:length=0.1"
    [score] = in_training(spec, SAID[0], **functions)
    assert score.reward == pytest.approx(0.45 + 0.1 + 0.09)
    assert named_rewards(right) == ("python:right", {"right": right})
    with pytest.raises(UserError, match="^reward: two functions are called right; rename one"):
        named_rewards([right, partial(right).func.__class__(right.__code__, {}, "right")])


def test_processes_of_functions_end_with_the_judge_and_a_failing_one_ends_the_job():
    before = psutil.Process().children()
    with pytest.raises(UserError, match=r"reward.py, line 10: the reward function raised ZeroDivisionError"):
        in_batch_inference("math,reward.py:broken", "ab", "", "abc")
    assert [json.loads(line)["responses"][0]["reward"] for line in Path("out.jsonl").read_text().splitlines()] == [0.5]
    assert psutil.Process().children() == before


@pytest.mark.parametrize(("spec", "said"), table("scoring/reward_lists", "what_is_no_list_is_refused"))
def test_what_is_no_list_is_refused(spec, said):
    with pytest.raises(UserError) as refused:
        check_reward(spec, flag="--reward")
    assert str(refused.value).startswith(said)
    with pytest.raises(UserError):
        check(EvaluateConfig(checkpoints=("m",), files=("f",), output=Path("o.json"), reward=(spec,)))


def test_one_reward_is_no_list_and_settings_of_a_function_need_one_function():
    for spec in (
        "math",
        "list:unordered,format_weight=0",
        "reward.py:length",
        "a=1/reward.py",
        "http://a/r,http://b/r",
    ):
        assert reward_list(spec) == ()
    config = RewardConfig(remote_url="math,reward.py:length=2,reward.py:graded", score_key="acc")
    with pytest.raises(
        UserError, match="^--reward.score_key acc is for a reward function: give one as .* not math,reward"
    ):
        reward_functions(config)
