"""A run that generates and trains at the same time on real Ray, DeepSpeed and vLLM; killed and taken up.

With images, a filter of groups, a critic and evaluations in its midst.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.commands import flags, write_rows
from helpers.commands_here import run_here
from helpers.conversations import picture
from helpers.killed_runs import KillableCommand, lines_in, python
from helpers.run_folders import check_listed

from lmm_r1.cli import report
from lmm_r1.data.training_rows import PromptStream

pytestmark = [pytest.mark.slow, pytest.mark.full]

STEPS, PROMPTS, SAMPLES, AHEAD = 6, 2, 2, 2
# Questions whose groups are dropped: one of those that the second step takes, and one of the fourth.
EASY = (1, 8)
REWARD = """
def reward_func(queries, prompts, labels):
    easy = [float(label == "easy") for label in labels]
    return {"rewards": [float(len(query) % 2) for query in queries], "extra_logs": {"easy": easy}}
"""


def asked(folder: Path) -> tuple[list[str], Path]:
    """Questions, of which every other one has an image, and the file of their rows."""
    questions = [f"What is {number} + 1?" for number in range(STEPS * PROMPTS + len(EASY))]
    rows = []
    for number, text in enumerate(questions):
        image = folder / f"{number}.png"
        picture(56, 56).save(image)
        parts = [{"type": "image", "image": str(image)}] * (number % 2) + [{"type": "text", "text": text}]
        answer = "easy" if number in EASY else "1"
        rows.append({"messages": [{"role": "user", "content": parts}], "answer": answer})
    return questions, write_rows(folder, *rows)


def test_a_run_made_asynchronously_learns_from_every_prompt_once_though_it_is_killed(
    tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    questions, rows = asked(tmp_path)
    (tmp_path / "reward.py").write_text(REWARD)
    held_out = tmp_path / "held_out"
    held_out.mkdir()
    values = {
        "actor.model_name_or_path": tiny_checkpoint("qwen2_5_vl"),
        "actor.adam.lr": 1e-3,
        "data.prompt_dataset": rows,
        "data.max_len": 256,
        "reward.remote_url": "reward.py",
        "algo.kl.init_coef": 0,
        "algo.advantage.estimator": "gae",
        "algo.dynamic_filtering_part": "easy",
        "algo.dynamic_filtering_max_batches": 3,
        "rollout.batch_size": PROMPTS,
        "rollout.n_samples_per_prompt": SAMPLES,
        "rollout.max_new_tokens": 100,
        "train.batch_size": PROMPTS * SAMPLES,
        "train.micro_batch_size": PROMPTS * SAMPLES,
        "train.async_queue_size": AHEAD,
        "ds.param_dtype": "fp32",
        "ckpt.output_dir": "run",
        "ckpt.save_steps": 1,
        "eval.dataset": write_rows(
            held_out, {"messages": [{"role": "user", "content": "What is 99 + 1?"}], "answer": "1"}
        ),
        "eval.steps": 2,
        "logger.rollouts_per_step": PROMPTS * SAMPLES,
    }
    switches = ("--train.async_enable", "--train.partial_rollout_enable", "--algo.dynamic_filtering_enable")
    switches += ("--algo.dynamic_filtering_range", "-0.5", "0.5")
    run = tmp_path / "run"
    command = KillableCommand(argv=python("lmm_r1.cli.train_ppo_ray", *switches, *flags(values)), cwd=tmp_path)
    # Behind the second step there is a line of its evaluation.
    ended = command.run(kill=lines_in(run / "metrics.jsonl", 4), limit_s=240)
    assert ended.killed, ended.output
    ended = command.run_here()
    assert ended.code == 0, ended.output
    assert "resumed at step" in ended.output
    resumed = int(ended.output.partition("resumed at step ")[2].partition("/")[0])
    assert 1 <= resumed < STEPS

    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    check_listed(run, "Every RL run", "Critic", "Asynchronous rollouts")
    metrics = [line for line in lines if "reward" in line]
    assert [line["step"] for line in metrics] == list(range(1, STEPS + 1))
    assert all("critic_loss" in line and "values" in line for line in metrics)
    evaluated = [line["step"] for line in lines if any(name.startswith("eval_") for name in line)]
    assert evaluated == [2, 4, 6]
    assert [line["filtered_groups"] for line in metrics] == [0, 1, 0, 1, 0, 0]
    recorded = [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]
    rollouts = [rollout for rollout in recorded if not rollout.get("held_out")]
    text = {id(rollout): rollout["messages"][0]["content"][-1]["text"] for rollout in rollouts}
    kept = [(rollout["step"], text[id(rollout)]) for rollout in rollouts if not rollout.get("dropped")]
    left_out = [(rollout["step"], text[id(rollout)]) for rollout in rollouts if rollout.get("dropped")]
    order = PromptStream(questions, seed=42, episodes=1).take(len(questions))
    learnt = [question for question in order if questions.index(question) not in EASY]
    assert kept == [
        (step, question)
        for step in range(1, STEPS + 1)
        for question in learnt[PROMPTS * (step - 1) : PROMPTS * step]
        for _ in range(SAMPLES)
    ]
    assert left_out == [
        (step, questions[number]) for step, number in zip((2, 4), EASY, strict=True) for _ in range(SAMPLES)
    ]
    for rollout in rollouts:
        age = rollout["step"] - 1 - rollout["weight_version"]
        assert 0 <= age <= min(AHEAD, rollout["step"] - 1)
        # The first rollout behind a resume is of the weights that are resumed with.
        assert age == 0 or rollout["step"] != resumed + 1
        assert [version for version, _ in rollout["weights"]] == sorted({version for version, _ in rollout["weights"]})
        assert sum(tokens for _, tokens in rollout["weights"]) == rollout["response_tokens"]
    assert [line["async/staleness_max"] for line in metrics][1:] != [0] * (STEPS - 1)
    assert metrics[0]["mismatch/mean"] < 1e-3
    assert metrics[resumed]["mismatch/mean"] < 1e-3
    for before, after in zip(metrics[resumed:], metrics[resumed + 1 :], strict=False):
        assert after["span/generation_began"] < before["span/update_ended"], "both go on at the same time"

    report.main([str(run), "--output", str(tmp_path / "report.html")])
    assert "Generation and update" in (tmp_path / "report.html").read_text()


def test_while_it_generates_the_model_under_the_adapters_is_the_reference(tiny_checkpoint, tmp_path):
    questions = [{"messages": [{"role": "user", "content": f"{number} + 1?"}], "answer": "1"} for number in range(8)]
    (tmp_path / "reward.py").write_text(REWARD)
    given = f"""--actor.model_name_or_path {tiny_checkpoint("llm")} --actor.adam.lr 1e-2 --algo.kl.init_coef 0.01
    --data.prompt_dataset {write_rows(tmp_path, *questions)} --reward reward.py --rollout.batch_size 2
    --rollout.n_samples_per_prompt 2 --rollout.max_new_tokens 8 --train.batch_size 4 --train.async_enable
    --train.async_queue_size 1 --ds.lora.rank 4 --ds.param_dtype fp32 --ckpt.output_dir run"""
    ended = run_here("train_ppo_ray", given.split(), folder=tmp_path)
    assert ended.code == 0, ended.output
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    assert [line["async/staleness_max"] for line in metrics] == [0, 1, 1, 1]
    # Adapters begin as nothing, and no update changes the reference. The estimate may be negative.
    assert metrics[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert all(abs(line["kl"]) > 1e-2 for line in metrics[1:])
