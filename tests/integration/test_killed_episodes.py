"""A run on episodes whose policy and whose engine are killed, repeated after each, and the same run undisturbed."""

import json
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.commands import flags, write_rows
from helpers.killed_runs import KillableCommand, kills, python
from helpers.saved_checkpoints import complete_steps

from lmm_r1.data.training_rows import PromptStream

pytestmark = pytest.mark.slow

STEPS, PROMPTS, SAMPLES = 3, 2, 2
TEXTS = [f"What is {number} + 1?" for number in range(STEPS * PROMPTS)]
# Shows each episode its seed, and pays by it. In the step behind one that was saved, it waits for the kill that is to hit it.
ENVIRONMENT = """
import asyncio
from pathlib import Path

from lmm_r1.agents.environment import Answered, Environment, Episode
from lmm_r1.data.messages import TextPart

HERE = Path(__file__).parent
KILLS = {"global_step1": "policy", "global_step2": "engine"}


class Seeds(Environment):
    name = "seeds"
    rewards = ("paid",)

    def begin(self, row, *, seed):
        return ToldItsSeed(seed)


class ToldItsSeed(Episode):
    def __init__(self, seed):
        self.seed = seed

    async def answer(self, turn):
        if turn.number == 1:
            return Answered(rewards={"paid": float(self.seed % 5)})
        latest = HERE / "run/checkpoints/_actor/latest"
        kill = KILLS.get(latest.read_text()) if latest.is_file() else None
        if kill is not None and not (HERE / f"{kill} is killed").exists():
            (HERE / f"{kill} is awaited").touch()
            while not (HERE / f"{kill} is killed").exists():
                await asyncio.sleep(0.01)
        return Answered(shown=(TextPart(f"seed {self.seed}"),))
"""
SCHEDULE = '{"paid": {"from": 1, "to": 0, "steps": 4}}'


@pytest.fixture
def make_command(tiny_checkpoint: Callable[[str], Path], tmp_path: Path) -> Callable[[str], KillableCommand]:
    """A function from the name of a folder to the command of a run in it; all are of the same rows."""
    rows = write_rows(tmp_path, *({"messages": [{"role": "user", "content": text}]} for text in TEXTS))

    def made(name: str) -> KillableCommand:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "seeds.py").write_text(ENVIRONMENT)
        values = {
            "actor.model_name_or_path": tiny_checkpoint("llm"),
            "actor.num_gpus_per_node": 1,
            "actor.adam.lr": 1e-2,
            "ref.num_gpus_per_node": 1,
            "data.prompt_dataset": rows,
            "data.max_len": 128,
            "train.agent": "seeds.py",
            "train.batch_size": PROMPTS * SAMPLES,
            "reward.part_weights": SCHEDULE,
            "algo.kl.init_coef": 0,
            # The likeliest token alone: an engine that is started anew draws other numbers than one that has gone on.
            "rollout.top_k": 1,
            "algo.mismatch_limit": "inf",
            "rollout.batch_size": PROMPTS,
            "rollout.n_samples_per_prompt": SAMPLES,
            "rollout.max_new_tokens": 8,
            "ds.param_dtype": "fp32",
            "ckpt.output_dir": "run",
            "ckpt.save_steps": 1,
            "ckpt.max_num": 1,
            "logger.rollouts_per_step": PROMPTS * SAMPLES,
        }
        argv = python("lmm_r1.cli.train_ppo_ray", "--train.colocate_all", *flags(values))
        return KillableCommand(argv=argv, cwd=folder, environment={"LMM_R1_TEST_WORKERS": uuid.uuid4().hex})

    return made


def records(command: KillableCommand) -> list[tuple[object, ...]]:
    """All episodes; those of a group are recorded as they have ended, in any order."""
    lines = map(json.loads, (command.cwd / "run" / "rollouts.jsonl").read_text().splitlines())
    return sorted(
        (
            line["step"],
            line["group"],
            line["messages"][0]["content"][0]["text"],
            line["end"],
            line["reward"],
            [
                (turn["role"], "".join(part.get("text", "<image>") for part in turn["content"]))
                for turn in line["said"]
            ],
        )
        for line in lines
    )


def weights(command: KillableCommand) -> list[tuple[int, float]]:
    lines = map(json.loads, (command.cwd / "run" / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["part_weight/paid"]) for line in lines]


def test_a_run_that_is_killed_in_its_episodes_makes_the_episodes_of_one_that_was_not(make_command):
    whole = make_command("whole")
    for name in ("policy", "engine"):
        (whole.cwd / f"{name} is killed").touch()
    ended = whole.run_here()
    assert ended.code == 0, ended.output

    command = make_command("killed")
    mark = command.environment["LMM_R1_TEST_WORKERS"]
    # An idle process has its actor's name; one with a task, the name of the class that the actor's is made of.
    deaths = {
        name: kills(title, mark, when=(command.cwd / f"{name} is awaited").exists)
        for name, title in (("policy", "ray::KitPolicyActor"), ("engine", "ray::RolloutRayActor.generate"))
    }

    def kill() -> bool:
        for name, dead in deaths.items():
            if dead():
                (command.cwd / f"{name} is killed").touch()
        return False

    first, second, third = (command.run(kill=kill, limit_s=400) for _ in range(3))
    assert [ended.code == 0 for ended in (first, second, third)] == [False, False, True], third.output
    assert f"resumed at step 1/{STEPS}" in second.output
    assert f"resumed at step 2/{STEPS}" in third.output
    assert json.loads((command.cwd / "run/stage.json").read_text())["steps"] == STEPS
    assert complete_steps(command.cwd / "run/checkpoints/_actor") == [STEPS]

    found, expected = records(command), records(whole)
    seeds = {turns[1] for *_, turns in found}
    assert len(seeds) == STEPS * PROMPTS * SAMPLES, "each episode has a seed of its own"
    assert found == expected, "the same episodes in the same steps, none lost and none twice"
    assert len({turns[0] for *_, turns in found}) > 1, "what is said changes with what is learnt"
    assert weights(command) == weights(whole) == [(1, 1.0), (2, 0.75), (3, 0.5)]
    order = PromptStream(TEXTS, seed=42, episodes=1)
    asked = {(step, text) for step in range(1, STEPS + 1) for text in order.take(PROMPTS)}
    assert Counter((step, text) for step, _, text, *_ in found) == dict.fromkeys(asked, SAMPLES)
