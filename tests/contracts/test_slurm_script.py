"""The SLURM script with commands that write down how they are called, in the place of SLURM's, Ray's and the stage."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from helpers.tables import table

SCRIPT = Path(__file__).parents[2] / "examples" / "scripts" / "lmm_r1" / "slurm.sh"
NOTE = 'echo "$(basename "$0") $*" >> "$NOTES"\n'
COMMANDS = table("contracts/slurm_script", "commands")
STAGE = """#!/usr/bin/env bash
echo "stage $RAY_ADDRESS $REWARD_HOST $NUM_GPUS $*" >> "$NOTES"
trap 'echo saved >> "$NOTES"; exit 143' TERM
[[ $SECONDS_TO_RUN == 0 ]] && exit "$CODE"
sleep "$SECONDS_TO_RUN" & wait "$!"
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen]]:
    """A function that starts the script on three nodes of four GPUs, with a stage that ends as it is told."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, body in COMMANDS.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{NOTE}{body}\n")
        (folder / name).chmod(0o755)
    project = tmp_path / "project" / "examples" / "scripts" / "lmm_r1"
    project.mkdir(parents=True)
    (project / "a_stage.sh").write_text(STAGE)
    (tmp_path / "nodes").touch()
    # As SLURM runs it: a copy, elsewhere.
    copied = tmp_path / "slurm_script"
    copied.write_text(SCRIPT.read_text())
    started: list[subprocess.Popen] = []

    def run(*flags: str, **variables: str) -> subprocess.Popen:
        environment = {
            "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
            "NOTES": str(tmp_path / "notes"),
            "NODES": str(tmp_path / "nodes"),
            "STAGE": "a_stage.sh",
            "SLURM_SUBMIT_DIR": str(tmp_path / "project"),
            "SLURM_JOB_NODELIST": "node-[5-7]",
            "SLURM_JOB_NUM_NODES": "3",
            "SLURM_GPUS_ON_NODE": "4",
            "SECONDS_TO_RUN": "0",
            "CODE": "0",
        }
        started.append(
            subprocess.Popen(
                ["bash", str(copied), *flags],
                cwd=tmp_path,
                env=environment | variables,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        )
        return started[-1]

    yield run
    for process in started:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def notes(folder: Path) -> list[str]:
    file = folder / "notes"
    lines = file.read_text().splitlines() if file.exists() else []
    return [line for line in lines if line != "ray status"]


def left_over(process: subprocess.Popen) -> list[list[str]]:
    """What still runs of the script's session when it has had time to end."""
    for _ in range(100):
        found = [other for other in psutil.process_iter() if _session(other) == process.pid]
        if not found:
            return []
        time.sleep(0.05)
    return [other.cmdline() for other in found]


def _session(process: psutil.Process) -> int | None:
    try:
        return None if process.status() == psutil.STATUS_ZOMBIE else os.getsid(process.pid)
    except (psutil.NoSuchProcess, ProcessLookupError):
        return None


def test_ray_is_started_on_every_node_before_the_stage_and_ended_after_it(start, tmp_path):
    process = start("--train.seed", "7")
    assert process.wait(timeout=30) == 0, process.stderr.read()
    ray_start = "ray start --num-gpus 4 --disable-usage-stats --block"
    assert notes(tmp_path) == [
        "scontrol show hostnames node-[5-7]",
        "srun --overlap --nodes 1 --ntasks 1 --nodelist node-5 hostname --ip-address",
        f"srun --overlap --nodes 1 --ntasks 1 --nodelist node-5 {ray_start} --head --node-ip-address 10.0.0.5 --port 6379",
        f"srun --overlap --nodes 2 --ntasks-per-node 1 --exclude node-5 {ray_start} --address 10.0.0.5:6379",
        "stage 10.0.0.5:6379 10.0.0.5 4 --actor.num_nodes 3 --critic.num_nodes 3 --ref.num_nodes 3 "
        "--vllm.num_engines 12 --train.seed 7",
    ]
    assert left_over(process) == []


def test_a_stage_that_fails_is_the_jobs_failure(start):
    assert start(CODE="3").wait(timeout=30) == 3


def test_sigterm_reaches_the_stage_and_is_waited_for(start, tmp_path):
    process = start(SECONDS_TO_RUN="60")
    deadline = time.monotonic() + 30
    while not any(line.startswith("stage") for line in notes(tmp_path)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    # As `--signal=B:` sends it: to the batch script alone.
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 143
    assert notes(tmp_path)[-1] == "saved"


def test_a_node_that_does_not_join_is_told(start):
    process = start(SLURM_JOB_NUM_NODES="4", START_WAIT_S="2")
    assert process.wait(timeout=30) == 1
    assert "only 3 of 4 nodes joined Ray" in process.stderr.read()
