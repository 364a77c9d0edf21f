"""Training in the process of the tests, whose libraries are loaded already: DeepSpeed, and commands run to their end."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import deepspeed
import pytest
import ray
import torch
import torch.distributed as dist
from helpers.launched_ranks import free_ports, launch

from lmm_r1 import cpu
from lmm_r1.host.strategy import default_to_one_process

_engines: list[deepspeed.DeepSpeedEngine] = []


def destroy_engines() -> None:
    """Free what engines hold, a bucket of up to 2 GB each among it: a process with dozens of them cannot be forked."""
    while _engines:
        _engines.pop().destroy()


def start_anew(patch: pytest.MonkeyPatch) -> None:
    """Let a training in this process make groups of its own: DeepSpeed keeps those of the first one for good."""
    patch.setattr("deepspeed.comm.comm.cdb", None)
    patch.setattr("deepspeed.utils.groups._WORLD_GROUP", None)


@contextmanager
def one_process() -> Iterator[None]:
    """DeepSpeed with this process alone, on the CPU; what that changes around it is put back."""
    environment = dict(os.environ)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        changed = [(torch.cuda, name) for name in ("current_device", "set_device", "synchronize", "current_stream")]
        changed.append((importlib.import_module("openrlhf.utils.deepspeed.deepspeed"), "init_device_mesh"))
        changed.append((importlib.import_module("deepspeed.comm.torch"), "build_shm_op"))
        for owner, name in changed:
            patch.setattr(owner, name, getattr(owner, name))
        start_anew(patch)
        initialize = deepspeed.initialize

        def noted(*arguments: Any, **named: Any) -> Any:
            engine, *others = initialize(*arguments, **named)
            _engines.append(engine)
            return engine, *others

        patch.setattr(deepspeed, "initialize", noted)
        cpu.prepare_process()
        default_to_one_process()
        yield
        # Where vLLM ran in this process, its end was that of the group, too.
        if dist.is_initialized():
            destroy_engines()
            dist.destroy_process_group()
        _engines.clear()
    os.environ.clear()
    os.environ.update(environment)


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a command ended."""

    code: int
    stdout: str
    stderr: str


def run_here(command: str, argv: Sequence[str], *, folder: Path, columns: int = 120) -> Ended:
    """Run `lmm-r1 COMMAND` in a folder, with what it changes in this process put back."""
    main, before = import_module(f"lmm_r1.cli.{command}").main, dict(os.environ)
    code = 0
    # Files of the system: an engine asks for their numbers.
    with TemporaryFile("w+") as out, TemporaryFile("w+") as err, pytest.MonkeyPatch.context() as patch:
        start_anew(patch)
        _take_threads_of_a_process()
        patch.setenv("COLUMNS", str(columns))
        patch.chdir(folder)
        try:
            with redirect_stdout(out), redirect_stderr(err):
                main(argv)
        except SystemExit as ended:
            code = int(ended.code or 0)
        finally:
            # As the end of its process would, where the command failed.
            ray.shutdown()
            os.environ.clear()
            os.environ.update(before)
        said = [stream.seek(0) or stream.read() for stream in (out, err)]
    return Ended(code=code, stdout=said[0], stderr=said[1])


def _take_threads_of_a_process() -> None:
    """Let PyTorch compute as in a process of its own: engines that earlier tests had here change its number of threads.

    Sums over another number of threads differ in their last bits.
    """
    if "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def run_in_ranks(commands: Sequence[Sequence[str]], *, count: int, folder: Path) -> list[list[Ended]]:
    """How each command ended, on each of so many ranks; `folder` is made."""
    folder.mkdir()
    # The store of one meeting may still stand when the next one begins.
    listed = [(port, list(map(str, argv))) for port, argv in zip(free_ports(len(commands)), commands, strict=True)]
    (folder / "commands.json").write_text(json.dumps(listed))
    launch("helpers.commands_here", str(folder / "commands.json"), count=count, folder=folder / "logs").wait()
    ranks = [json.loads((folder / f"ended{rank}.json").read_text()) for rank in range(count)]
    return [[Ended(**ended) for ended in of_ranks] for of_ranks in zip(*ranks, strict=True)]


def main() -> None:
    file = Path(sys.argv[1])
    ended = []
    for port, argv in json.loads(file.read_text()):
        os.environ["MASTER_PORT"] = str(port)
        ended.append(run_here("train_sft", argv, folder=file.parent))
    (file.parent / f"ended{os.environ['RANK']}.json").write_text(json.dumps([vars(one) for one in ended]))


if __name__ == "__main__":
    main()
