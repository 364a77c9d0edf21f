"""Runs that are killed in the middle of what they do with files, and repeated as they were."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.commands import error_of, flags, write_rows
from helpers.killed_runs import KillableCommand, Moment, appears, lines_in, python
from helpers.saved_checkpoints import complete_steps, newest_common_step
from safetensors.torch import load_file

from lmm_r1.data.training_rows import PromptStream
from lmm_r1.host.checkpoint_folder import DELETING, SAVING
from lmm_r1.records.run_folder import read_run

pytestmark = pytest.mark.slow
STEPS = 6
RL_STEPS = 5
REWARD = "def reward_func(queries, prompts, labels):\n    return {'rewards': [float(len(query) % 2) for query in queries]}\n"


@pytest.fixture(scope="module")
def make_command(tiny_checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable:
    """A function that gives the command of a run in a new folder, and the folder."""
    data = tmp_path_factory.mktemp("rows")
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"What is {number} + 1?"},
                {"role": "assistant", "content": f"<answer>{number + 1}</answer>"},
            ],
            "answer": str(number + 1),
        }
        for number in range(2 * STEPS)
    ]
    values = {
        "model.model_name_or_path": tiny_checkpoint("llm"),
        "data.dataset": write_rows(data, *rows),
        "train.batch_size": 2,
        "train.micro_batch_size": 1,
        "train.max_epochs": 1,
        "ds.param_dtype": "fp32",
        "adam.lr": 1e-2,
        "ckpt.save_steps": 1,
        "ckpt.max_num": 1,
    }

    def made() -> tuple[KillableCommand, Path]:
        folder = tmp_path_factory.mktemp("run")
        paths = {"ckpt.output_dir": folder / "model"}
        argv = python("lmm_r1.cli.train_sft", *flags(values | paths))
        return KillableCommand(argv=argv, cwd=folder), folder / "model"

    return made


def losses(run: Path) -> list[tuple[int, float]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["loss"]) for line in lines]


def test_a_run_killed_in_saves_and_in_an_eviction_ends_as_one_that_was_not(make_command):
    command, expected = make_command()
    whole = command.run_here()
    assert whole.code == 0, whole.output
    assert [step for step, _ in losses(expected)] == list(range(1, STEPS + 1))
    assert len({loss for _, loss in losses(expected)}) == STEPS

    command, run = make_command()
    checkpoints = run / "checkpoints"
    moments: dict[str, Moment] = {
        "in the first save": appears(checkpoints, f"{SAVING}global_step1"),
        "in an eviction": appears(checkpoints, f"{DELETING}global_step1*"),
        "in a save": appears(checkpoints, f"{SAVING}global_step4"),
        "in a step": lines_in(run / "metrics.jsonl", 5),
    }
    for name, moment in moments.items():
        ended = command.run(kill=moment, limit_s=120)
        assert ended.killed, f"{name}: {ended.output}"
        steps = complete_steps(checkpoints)
        assert steps or name == "in the first save", name
        assert [stage.state for stage in read_run(run).stages] == ["stopped"]
    ended = command.run_here()
    assert ended.code == 0, ended.output
    assert complete_steps(checkpoints) == [STEPS]
    assert losses(run) == losses(expected), "the same data in the same order, and no step twice"
    weights, wanted = (load_file(folder / "model.safetensors") for folder in (run, expected))
    assert weights.keys() == wanted.keys()
    assert all((weights[name] == tensor).all() for name, tensor in wanted.items())
    assert json.loads((run / "stage.json").read_text())["steps"] == STEPS


@pytest.fixture
def refused(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], own_environment: None
) -> Callable[..., str]:
    """A function that gives a command to this process, with other settings; it returns why the command ends at once.

    It changes no file of the run that it is about.
    """

    def refusal(command: KillableCommand, *changes: str, run: Path) -> str:
        monkeypatch.chdir(command.cwd)
        module, *argv = command.argv[2:]
        before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
        said = error_of(module.rpartition(".")[2], [*argv, *changes], capfd=capfd)
        assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
        return said

    return refusal


ANOTHER_RUN = "holds checkpoints of another run"


def rl_run(folder: Path, *, model: Path, prompts: int) -> tuple[list[str], dict[str, object]]:
    """The questions and the flags of a run of `RL_STEPS` steps of so many prompts, each of which is saved."""
    questions = [f"What is {number} + 1?" for number in range(prompts * RL_STEPS)]
    rows = [{"messages": [{"role": "user", "content": text}], "answer": "1"} for text in questions]
    (folder / "reward.py").write_text(REWARD)
    return questions, {
        "actor.model_name_or_path": model,
        "actor.num_gpus_per_node": 1,
        "ref.num_gpus_per_node": 1,
        "data.prompt_dataset": write_rows(folder, *rows),
        "data.max_len": 128,
        "reward.remote_url": "reward.py",
        "algo.kl.init_coef": 0,
        "rollout.batch_size": prompts,
        "rollout.n_samples_per_prompt": 2,
        "rollout.max_new_tokens": 8,
        "rollout.micro_batch_size": 4,
        "train.batch_size": 4,
        "train.micro_batch_size": 4,
        "ds.param_dtype": "fp32",
        "ckpt.output_dir": "run",
        "ckpt.save_steps": 1,
        "ckpt.max_num": 1,
        "logger.rollouts_per_step": 2 * prompts,
    }


def test_policy_and_critic_killed_in_a_save_and_in_an_eviction_go_on_from_one_step(tiny_checkpoint, tmp_path, refused):
    prompts = 2
    questions, values = rl_run(tmp_path, model=tiny_checkpoint("llm"), prompts=prompts)
    values |= {"critic.num_gpus_per_node": 1, "algo.advantage.estimator": "gae"}
    argv = python("lmm_r1.cli.train_ppo_ray", "--train.colocate_all", *flags(values))
    command, run = KillableCommand(argv=argv, cwd=tmp_path), tmp_path / "run"
    policy, critic = folders = [run / "checkpoints" / name for name in ("_actor", "_critic")]
    moments = [appears(critic, f"{SAVING}global_step2"), appears(policy, f"{DELETING}global_step3*")]
    common = []
    for moment in moments:
        ended = command.run(kill=moment, limit_s=240)
        assert ended.killed, ended.output
        assert [stage.state for stage in read_run(run).stages] == ["stopped"]
        common.append(newest_common_step(folders))
    assert common[0] in (1, 2)
    assert common[1] == 4, "the step before was only deleted as both had this one"
    assert ANOTHER_RUN in refused(command, "--actor.adam.lr", "0.5", run=run)
    ended = command.run_here()
    assert ended.code == 0, ended.output
    assert f"resumed at step 4/{RL_STEPS}" in ended.output
    assert [stage.state for stage in read_run(run).stages] == ["finished"]
    assert [complete_steps(folder) for folder in folders] == [[RL_STEPS], [RL_STEPS]]

    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, RL_STEPS + 1))
    rollouts = [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]
    shown = [(rollout["step"], rollout["messages"][0]["content"][0]["text"]) for rollout in rollouts]
    order = PromptStream(questions, seed=42, episodes=1)
    assert shown == [(step, text) for step in steps for text in order.take(prompts) for _ in range(2)]
