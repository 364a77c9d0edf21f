"""The loops: how rounds follow each other, what is skipped the second time, and what a user's own model takes."""

import os
import subprocess
import sys

import pytest
from helpers.commands import SCRIPTS, TRAINERS, printed_commands, trainer_config

from lmm_r1.cli.arguments import parse
from lmm_r1.config import DPOConfig, KDConfig, PPOConfig, RMConfig, SFTConfig, SupervisedConfig
from lmm_r1.config.evaluate import EvaluateConfig
from lmm_r1.config.evaluate import check as check_evaluation
from lmm_r1.config.generation import BatchConfig, check_batch

LOOPS = ("train_iterative_dpo.sh", "train_rejection_sampling.sh", "train_rm.sh", "train_kd.sh")
OWN = {"MODEL": "a model", "DATA": "rows.jsonl", "EVAL_IMAGE": "test.jsonl", "OUTPUT": "runs/a loop"}


def of(command: str, commands: list[list[str]], config: type) -> list:
    """The settings of each printed `command`."""
    module = f"lmm_r1.cli.{command}"
    printed = [words[words.index(module) + 1 :] for words in commands if module in words]
    return [parse(config, argv, prog=command, description="") for argv in printed]


def trained(commands: list[list[str]]) -> list[PPOConfig | SupervisedConfig]:
    return [trainer_config(command) for command in commands if TRAINERS.keys() & set(command)]


@pytest.mark.parametrize(
    ("script", "kind", "selection"),
    [
        ("train_iterative_dpo.sh", DPOConfig, "dpo_pairs"),
        ("train_rejection_sampling.sh", SFTConfig, "rejection_sampling"),
    ],
)
def test_a_round_samples_from_the_last_rounds_model_and_trains_it(script, kind, selection, tmp_path):
    commands = printed_commands(SCRIPTS / script, "--adam.lr", "1e-7", folder=tmp_path, ROUNDS="2", N="5", **OWN)
    stages, sampled = trained(commands), of("batch_inference", commands, BatchConfig)
    assert {type(stage) for stage in stages} == {kind}
    assert [stage.model.model_name_or_path for stage in stages] == ["a model", "runs/a loop/round_1"]
    assert [stage.ckpt.output_dir for stage in stages] == ["runs/a loop/round_1", "runs/a loop/round_2"]
    assert {stage.adam.lr for stage in stages} == {1e-7}
    assert [job.model for job in sampled] == ["a model", "runs/a loop/round_1"]
    assert [stage.data.dataset for stage in stages] == [str(job.selected) for job in sampled]
    assert len({job.seed for job in sampled}) == 2
    assert {(job.data, job.n_samples, job.select, job.reward) for job in sampled} == {
        ("rows.jsonl", 5, selection, "math")
    }
    if kind is DPOConfig:
        assert [stage.ref.model_name_or_path for stage in stages] == ["a model", "runs/a loop/round_1"]
    *measured, table = of("evaluate", commands, EvaluateConfig)
    assert [one.checkpoints for one in measured] == [
        ("start=a model",),
        ("round_1=runs/a loop/round_1",),
        ("round_2=runs/a loop/round_2",),
    ]
    assert {one.files for one in measured} == {("image=test.jsonl",)}
    names = ("start", "round_1", "round_2")
    assert table.compare == tuple(f"{name}={one.output}" for name, one in zip(names, measured, strict=True))
    for job in sampled:
        check_batch(job)
    for one in (*measured, table):
        check_evaluation(one)


def test_rl_takes_the_rewards_of_the_model_that_learned_the_starts_pairs(tmp_path):
    commands = printed_commands(SCRIPTS / "train_rm.sh", folder=tmp_path, HELD_OUT="more.jsonl", NUM_GPUS="2", **OWN)
    rm, rl = trained(commands)
    pairs, held_out = of("batch_inference", commands, BatchConfig)
    assert isinstance(rm, RMConfig)
    assert (pairs.model, pairs.data, pairs.select, pairs.engines) == ("a model", "rows.jsonl", "dpo_pairs", 2)
    assert (held_out.model, held_out.data, held_out.select) == ("a model", "more.jsonl", "dpo_pairs")
    assert (pairs.max_per_prompt, held_out.max_per_prompt) == (1, 1)
    assert (rm.model.model_name_or_path, rm.data.dataset) == ("a model", str(pairs.selected))
    assert rm.eval.dataset == str(held_out.selected)
    assert (rl.actor.model_name_or_path, rl.data.prompt_dataset) == ("a model", "rows.jsonl")
    assert (rl.reward.model_name_or_path, rl.reward.remote_url) == (rm.ckpt.output_dir, None)
    assert (rl.reward.num_gpus_per_node, rl.actor.num_gpus_per_node) == (2, 2)
    *measured, _ = of("evaluate", commands, EvaluateConfig)
    assert [one.checkpoints for one in measured] == [("start=a model",), (f"rl={rl.ckpt.output_dir}",)]


def test_students_of_one_start_make_as_many_updates_on_the_teachers_responses(tmp_path):
    flag = ("--model.kd_loss", "jsd")
    commands = printed_commands(SCRIPTS / "train_kd.sh", *flag, folder=tmp_path, TEACHER="a teacher", **OWN)
    alone, taught = trained(commands)
    (job,) = of("batch_inference", commands, BatchConfig)
    assert (job.model, job.data, job.n_samples, job.min_reward) == ("a teacher", "rows.jsonl", 1, 0.0)
    assert (type(alone), type(taught)) == (SFTConfig, KDConfig)
    for student in (alone, taught):
        assert (student.model.model_name_or_path, student.data.dataset) == ("a model", str(job.selected))
        for part in ("adam", "train", "lr_scheduler"):
            assert getattr(student, part) == getattr(alone, part), part
    assert (taught.teacher.model_name_or_path, taught.model.kd_coef, taught.model.kd_loss) == ("a teacher", 1.0, "jsd")
    *measured, table = of("evaluate", commands, EvaluateConfig)
    assert [one.checkpoints[0].split("=")[0] for one in measured] == ["start", "alone", "taught", "teacher"]
    assert table.baseline == "alone"


@pytest.mark.parametrize("script", LOOPS)
def test_a_loop_without_a_model_makes_a_tiny_one_and_all_rows(script, tmp_path):
    commands = printed_commands(SCRIPTS / script, folder=tmp_path, OUTPUT="runs/small", SEED="3")
    cold_start, *others = trained(commands)
    assert cold_start.model.model_name_or_path == "runs/small/tiny"
    assert cold_start.train.seed == 3
    start = {getattr(stage, "actor", None) or stage.model for stage in others[:1]}
    assert {model.model_name_or_path for model in start} == {"runs/small/cold_start"}
    made = {words[words.index("--output") + 1] for words in commands if "lmm_r1.cli.make_task" in words}
    used = [job.data for job in of("batch_inference", commands, BatchConfig)]
    used += [file.split("=")[1] for one in of("evaluate", commands, EvaluateConfig) for file in one.files]
    learned = [stage.data.dataset for stage in (cold_start, *others) if isinstance(stage, SupervisedConfig)]
    used += [path for paths in learned for path in paths.split(",") if path.startswith("runs/small/data/")]
    assert made == set(used)


def test_what_is_finished_is_not_done_again(tmp_path):
    output, folder = tmp_path / "loop", tmp_path / "empty"
    folder.mkdir()
    for done in ("round_1/stage.json", "measured/start.json", "measured/round_1.json"):
        (output / done).parent.mkdir(parents=True, exist_ok=True)
        (output / done).write_text("{}", encoding="utf-8")
    own = OWN | {"OUTPUT": str(output), "ROUNDS": "2"}
    commands = printed_commands(SCRIPTS / "train_iterative_dpo.sh", folder=folder, **own)
    assert [command[2].removeprefix("lmm_r1.cli.") for command in commands] == [
        *("batch_inference", "train_dpo", "evaluate"),
        "evaluate",
    ]
    (job,) = of("batch_inference", commands, BatchConfig)
    assert job.model == str(output / "round_1")


@pytest.mark.parametrize("missing", ["DATA", "EVAL_IMAGE"])
@pytest.mark.parametrize("script", LOOPS)
def test_a_model_without_rows_is_refused(script, missing, tmp_path):
    given = {name: value for name, value in OWN.items() if name != missing}
    done = subprocess.run(
        ["bash", str(SCRIPTS / script)],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "DRY_RUN": "1", "PYTHON": sys.executable} | given,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"{script}: MODEL=a model needs DATA, rows with answers, and held-out ones in EVAL_TEXT or EVAL_IMAGE\n"
    )
