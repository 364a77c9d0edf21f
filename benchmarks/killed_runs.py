"""Runs that are killed at random moments and repeated as they were, against runs that were not; JSON on the last line.

python benchmarks/killed_runs.py [--sft 34] [--ppo 16] [--asynchronous 20] [--seed 1] [--output benchmarks/results/killed_runs.json]

Every kill is SIGKILL to all processes of the command: at start, in a step, a save or an eviction. A run that ends has to
have the steps of one that was not killed, each once, with the same data in the same order.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machine import ROOT, machine_name
from measuring import parser_of, publish, run_quietly

# What kills a command with all that it has started is the tests'.
sys.path.insert(0, str(ROOT / "tests"))
from helpers.killed_runs import KillableCommand, Moment, python

REWARD = (
    "def reward_func(queries, prompts, labels):\n    return {'rewards': [len(query) % 3 / 3 for query in queries]}\n"
)
SAVES = ["--ckpt.save_steps", "1", "--ckpt.max_num", "1", "--ds.param_dtype", "fp32"]
# Share of the kills that come at any time from the start on, and not at a step that a session has reached.
AT_ANY_TIME = 0.25


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A command that is killed, and what two of its runs must have in common."""

    argv: list[str]
    steps: int
    start_s: float
    """About how long it takes to its first step."""
    seen: Callable[[Path], list[Any]]
    """(run folder) -> what it has learnt from, step by step."""


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--sft", type=int, default=34, help="kills of supervised fine-tuning")
    parser.add_argument("--ppo", type=int, default=16, help="kills of RL with a critic")
    parser.add_argument("--asynchronous", type=int, default=20, help="kills of RL with rollouts made ahead")
    parser.add_argument("--seed", type=int, default=1, help="of the moments")
    arguments = parser.parse_args()
    result: dict[str, Any] = {"machine": machine_name(), "seed": arguments.seed}
    with tempfile.TemporaryDirectory() as folder:
        scenarios = make_scenarios(Path(folder))
        asked = {"sft": arguments.sft, "ppo": arguments.ppo, "asynchronous": arguments.asynchronous}
        for name, kills in asked.items():
            if not kills:
                continue
            chance = random.Random(f"{arguments.seed} {name}")
            result[name] = measure(scenarios[name], Path(folder) / f"{name}_runs", kills=kills, chance=chance)
    publish(result, arguments.output)


def make_scenarios(folder: Path) -> dict[str, Scenario]:
    """Make a tiny model and rows, and return the commands that train on them."""
    tiny, rows, prompts = folder / "tiny", folder / "rows", folder / "prompts"
    run_quietly("make_tiny_model", "--arch", "qwen2_5_vl", "--output", tiny)
    task = ("make_task", "digits", "--modality", "mixed", "--split", "train")
    run_quietly(*task, "--rows", 160, "--solutions", "--output", rows)
    run_quietly(*task, "--rows", 24, "--output", prompts)
    (folder / "reward.py").write_text(REWARD)
    sft = f"--model.model_name_or_path {tiny} --data.dataset {rows} --train.batch_size 4 --train.micro_batch_size 4"
    rl = (
        f"--actor.model_name_or_path {tiny} --data.prompt_dataset {prompts} --reward.remote_url {folder}/reward.py "
        "--algo.kl.init_coef 0 --actor.num_gpus_per_node 1 --rollout.batch_size 2 --rollout.n_samples_per_prompt 2 "
        "--train.batch_size 4 "
    )
    ppo = (
        f"{rl} --train.colocate_all --algo.advantage.estimator gae --critic.num_gpus_per_node 1 "
        "--rollout.max_new_tokens 8 --data.max_len 160 --logger.rollouts_per_step 2"
    )
    # So long that updates come in the midst of responses.
    asynchronous = (
        f"{rl} --train.async_enable --train.async_queue_size 2 --train.partial_rollout_enable "
        "--rollout.max_new_tokens 64 --data.max_len 256 --logger.rollouts_per_step 4"
    )
    return {
        "sft": Scenario(
            argv=python("lmm_r1.cli.train_sft", *sft.split(), "--train.max_epochs", "1", *SAVES),
            steps=40,
            start_s=8,
            seen=lambda run: [line["loss"] for line in records(run / "metrics.jsonl")],
        ),
        "ppo": Scenario(
            argv=python("lmm_r1.cli.train_ppo_ray", *ppo.split(), *SAVES),
            steps=12,
            start_s=20,
            seen=lambda run: [line["messages"] for line in records(run / "rollouts.jsonl")],
        ),
        "asynchronous": Scenario(
            argv=python("lmm_r1.cli.train_ppo_ray", *asynchronous.split(), *SAVES),
            steps=12,
            start_s=20,
            seen=lambda run: [line["messages"] for line in records(run / "rollouts.jsonl")],
        ),
    }


def measure(scenario: Scenario, folder: Path, *, kills: int, chance: random.Random) -> dict[str, Any]:
    """Kill a command so many times, starting a new run whenever one ends, and return what was seen."""
    began = time.time()
    folder.mkdir()
    expected = folder / "whole"
    ended = command(scenario, expected).run()
    assert ended.code == 0, ended.output
    assert steps_of(expected) == list(range(1, scenario.steps + 1)), steps_of(expected)
    reached: list[int] = []
    finished = 0
    while True:
        run = folder / f"run{finished}"
        moment = some_moment(scenario, run, chance) if len(reached) < kills else None
        session = command(scenario, run).run(kill=moment)
        if session.killed:
            reached.append(lines_of(run))
            print(f"{folder.name}: kill {len(reached)}/{kills} after step {reached[-1]}", file=sys.stderr)
        # It may also be killed when it has just said that it is finished.
        if session.killed and not (run / "stage.json").exists():
            continue
        assert session.killed or session.code == 0, session.output
        assert steps_of(run) == steps_of(expected), f"{run} has the steps {steps_of(run)}"
        assert scenario.seen(run) == scenario.seen(expected), f"{run} has learnt from other data than {expected}"
        finished += 1
        if moment is None:
            break
    return {
        "kills": len(reached),
        "killed_at_step": reached,
        "runs_finished_with_the_same_steps_and_data": finished,
        "steps": scenario.steps,
        "seconds": round(time.time() - began),
    }


def command(scenario: Scenario, run: Path) -> KillableCommand:
    return KillableCommand(argv=[*scenario.argv, "--ckpt.output_dir", str(run)], cwd=run.parent)


def some_moment(scenario: Scenario, run: Path, chance: random.Random) -> Moment:
    """Return a moment of the next session: any time of it, or some time after one of its next steps."""
    if chance.random() < AT_ANY_TIME:
        return later(lambda: True, seconds=chance.uniform(0, 1.5 * scenario.start_s))
    wanted = lines_of(run) + chance.randint(1, 3)
    return later(lambda: lines_of(run) >= wanted, seconds=chance.uniform(0, 0.5))


def later(moment: Moment, *, seconds: float) -> Moment:
    """So long after another moment."""
    since: list[float] = []

    def reached() -> bool:
        if not since and moment():
            since.append(time.monotonic())
        return bool(since) and time.monotonic() - since[0] >= seconds

    return reached


def lines_of(run: Path) -> int:
    """Return how many steps are recorded, those included that will be made again."""
    file = run / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def steps_of(run: Path) -> list[int]:
    return [line["step"] for line in records(run / "metrics.jsonl")]


def records(file: Path) -> list[dict[str, Any]]:
    lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith(b"\n")]


if __name__ == "__main__":
    main()
