"""Processes that are started as a launcher such as torchrun starts them, on this machine, and what they train with."""

import os
import pickle
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from helpers.processes import warm_python


def constant_adam(adam: dict[str, Any], *, steps: int = 100) -> dict[str, Any]:
    """What a strategy prepares a model with: Adam at a constant rate, and gradients that are not clipped."""
    schedule = {"lr_scheduler": "constant", "lr_warmup_ratio": 0.0, "scheduler_steps": steps}
    return {"optim": "adam", "muon": {}, "adam": adam, "max_norm": 0.0, **schedule}


@dataclass(frozen=True)
class Ranks:
    processes: Sequence[subprocess.Popen]
    folder: Path
    """Where each of them writes what it prints, as rank0.log and so on."""

    def wait(self, *, seconds: float = 1200) -> None:
        """Wait until all have ended; fails with the ends of their output once one has failed, or when time is up."""
        deadline = time.monotonic() + seconds
        codes: list[int | None] = []
        try:
            while time.monotonic() < deadline:
                codes = [process.poll() for process in self.processes]
                # Where one has failed, the others would wait for it.
                if None not in codes or any(codes):
                    break
                time.sleep(0.1)
        finally:
            for process in self.processes:
                process.kill()
                process.wait()
        logs = [(self.folder / f"rank{rank}.log").read_text()[-3000:] for rank in range(len(self.processes))]
        assert not any(code is None or code for code in codes), "\n".join(logs)


def launch_cases(module: str, cases: Sequence[Any], folder: Path, *, count: int) -> Ranks:
    """Start the ranks on cases that they read in a new folder; `results_of` waits for them."""
    folder.mkdir()
    (folder / "cases.pickle").write_bytes(pickle.dumps(list(cases)))
    return launch(module, str(folder), count=count, folder=folder / "logs")


def results_of(ranks: Ranks, folder: Path) -> list[Any]:
    """What the first rank has written of each case."""
    ranks.wait()
    cases = pickle.loads((folder / "cases.pickle").read_bytes())
    return [torch.load(folder / f"case{number}.pt", weights_only=False) for number in range(len(cases))]


def free_ports(count: int) -> list[int]:
    """So many ports of this machine that nothing listens at."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def launch(module: str, *arguments: str, count: int, folder: Path) -> Ranks:
    """Start `python -m MODULE ARGUMENTS` once per rank, each on one thread; their logs go into a new folder."""
    folder.mkdir()
    (port,) = free_ports(1)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(parent) for parent in Path(__file__).parents[1:3]),
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(count),
        # An engine that ran in this process may have left its own.
        "LOCAL_WORLD_SIZE": str(count),
    }
    processes = []
    for rank in range(count):
        own = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        with (folder / f"rank{rank}.log").open("w") as log:
            command = [warm_python(), "-m", module, *arguments]
            processes.append(subprocess.Popen(command, env=own, stdout=log, stderr=subprocess.STDOUT))
    return Ranks(processes, folder)
