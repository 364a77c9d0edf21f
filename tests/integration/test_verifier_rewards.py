"""Rewards by a verifier that the engines ask themselves: no service is started, and none need be named."""

import asyncio
import os

import psutil
import pytest
import ray

import lmm_r1
from lmm_r1.config.ppo import RewardConfig
from lmm_r1.data.messages import Message, Row, TextPart
from lmm_r1.errors import UserError
from lmm_r1.records.run_folder import trained_reading
from lmm_r1.scoring import ScoredResponse
from lmm_r1.scoring.sources import MOST_WORKERS, make_scorer
from remote_rm.verifier import Score

pytestmark = pytest.mark.slow

THOUGHT = "<think>It is easy.</think>"


def row(answer: str) -> Row:
    question = Message(role="user", parts=(TextPart("What is 1/3 + 1/3?"),))
    return Row(messages=(question,), answer=answer, datasource="default", location="rows.jsonl line 1")


def given(response: str, *, of: Row) -> ScoredResponse:
    return ScoredResponse(row=of, prompt="p", query="?", response=response, num_tokens=9)


def test_the_scores_of_a_group_are_the_verifiers_and_its_workers_end_with_it():
    def children() -> int:
        return len(psutil.Process().children(recursive=True))

    async def scored() -> tuple[list[Score], int]:
        scorer = make_scorer(RewardConfig(remote_url="composition:math=1.0,format=0.5"))
        said = [f"{THOUGHT}<answer>2/3</answer>", "<answer>2/3</answer>", f"{THOUGHT}<answer>3/2</answer>", ""]
        try:
            return await scorer.rewards([given(text, of=row("\\frac{2}{3}")) for text in said]), children()
        finally:
            await scorer.close()

    scores, working = asyncio.run(scored())
    assert [score.reward for score in scores] == [1.5, 1.0, 0.5, 0.0]
    # An answer that is late is told from a wrong one in the metrics.
    parts = [(score.parts["accuracy"], score.parts["timed_out"]) for score in scores]
    assert parts == [(1.0, 0.0), (1.0, 0.0), (0.0, 0.0), (0.0, 0.0)]
    assert working - children() == min(MOST_WORKERS, os.cpu_count())


def test_a_label_that_it_cannot_judge_by_and_an_unknown_setting_are_told_with_the_flag():
    scorer = make_scorer(RewardConfig(remote_url="exact"))
    with pytest.raises(UserError, match="^rows.jsonl line 1: exact cannot judge by this row's answer"):
        scorer.check_rows([row("seven"), row(" ")])
    with pytest.raises(UserError, match="^--reward.remote_url list:shuffled: list has no setting 'shuffled'"):
        make_scorer(RewardConfig(remote_url="list:shuffled"))


def test_a_run_that_names_no_reward_is_judged_by_the_math_verifier(tiny_checkpoint, tmp_path, capfd, monkeypatch):
    rows = [{"messages": [{"role": "user", "content": f"What is {n} + 1?"}], "answer": str(n + 1)} for n in range(4)]
    values = {
        "actor.model_name_or_path": tiny_checkpoint("llm"),
        "data.max_len": 1024,
        "algo.kl.init_coef": 0,
        "rollout.batch_size": 2,
        "rollout.n_samples_per_prompt": 2,
        "rollout.max_new_tokens": 8,
        "train.batch_size": 4,
        "train.micro_batch_size": 2,
        "ds.param_dtype": "fp32",
        "train.colocate_all": True,
        "ckpt.output_dir": tmp_path / "run",
    }

    async def cell() -> lmm_r1.TrainedRun:
        # Of four steps, the callback ends the run after the second.
        return lmm_r1.train_rl(values, rows=rows, epochs=2, on_step=lambda step, metrics: step < 2)

    # Wide enough for lines that are looked for.
    monkeypatch.setenv("COLUMNS", "200")
    environment = dict(os.environ)
    run = asyncio.run(cell())
    assert (dict(os.environ), ray.is_initialized()) == (environment, False)
    said = capfd.readouterr().out
    assert "rewards: the verifier math, called by the engines themselves; --reward selects another source" in said
    assert "system prompt of 4 of 4 prompts (--data.system_prompt think; none adds none): Think through" in said
    assert "rl: 2 steps in 0:0" in said
    assert (run.name, run.steps, run.folder) == ("rl", 2, tmp_path / "run")
    assert [row.step for row in run.metrics.rows] == [1, 2]
    assert trained_reading(["elsewhere", str(run.folder), "later"]) == ("think", None)
    assert all({"accuracy", "format"} <= row.values.keys() for row in run.metrics.rows)
