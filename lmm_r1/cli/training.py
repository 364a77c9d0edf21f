"""What the training commands share: they read flags, prepare the process, and start PyTorch's launcher for several GPUs."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import resource_tracker
from pathlib import Path
from types import FrameType

from lmm_r1 import cpu
from lmm_r1.cli import user_errors
from lmm_r1.cli.arguments import parse
from lmm_r1.config import Config, PPOConfig, SupervisedConfig, model_path, resolve
from lmm_r1.config.hardware import PROCESSES, check_machine, supervised_processes
from lmm_r1.config.rewards import GivenFunctions
from lmm_r1.records.metrics import NO_CALLBACKS, Callbacks
from lmm_r1.train.first_checks import check_first


@contextmanager
def training(
    config_class: type[Config], argv: Sequence[str] | None, *, prog: str, description: str
) -> Iterator[Config]:
    """Yield the resolved settings in a process that is ready to train; errors of users end the process with a sentence."""
    config = parse(config_class, argv, prog=prog, description=description, first_help=config_class.first_help)
    with user_errors(prog):
        config = resolve(config)
        prepare_training(config)
        yield config


def train_supervised(
    run: str, config_class: type[Config], argv: Sequence[str] | None = None, *, prog: str, description: str
) -> None:
    """Train as the flags say, in one process for each visible GPU unless a launcher has started several.

    Args:
        run: the class of the run, as MODULE:CLASS.
    """
    with training(config_class, argv, prog=prog, description=description) as config:
        assert isinstance(config, SupervisedConfig), "RL starts its own workers"
        if "RANK" in os.environ or (count := supervised_processes(config)) == 1:
            train_run(run, config)
        else:
            train_in_ranks(run, config, count=count, prog=prog)


def train_run(run: str, config: SupervisedConfig, *, callbacks: Callbacks = NO_CALLBACKS) -> None:
    """Train in this process."""
    from lmm_r1.supervised.start import train
    from lmm_r1.tools.planning.choices import planned

    module, _, name = run.partition(":")
    train(getattr(importlib.import_module(module), name), config, plan=planned, callbacks=callbacks)


def prepare_training(
    config: PPOConfig | SupervisedConfig, *, reward: GivenFunctions | None = None, dry: bool = False
) -> None:
    """Prepare this process for the training stack; refusals come before the stack is loaded.

    Args:
        reward: the reward functions that were given to this process instead of in a file.
        dry: nothing is trained, so that rows, folder and machine are not checked.
    """
    if isinstance(config, PPOConfig) and not dry:
        check_machine(config)
    from lmm_r1 import cpu
    from lmm_r1.lmm_kits.registry import kit_name_of
    from lmm_r1.records.tracker_backends import check_trackers

    check_trackers(config.logger)
    if config.ckpt.push_to_hub is not None:
        from lmm_r1.hub import check_uploadable

        check_uploadable(config.ckpt.push_to_hub, flag="--ckpt.push_to_hub")
    # A launcher starts several processes, of which one checks.
    if not dry and os.environ.get("RANK", "0") == "0":
        check_first(config, reward=reward)
    kit_name_of(model_path(config), trust_remote_code=config.train.trust_remote_code)
    cpu.prepare_process()


# How long the others may take to end after the first that failed, in seconds; what waits for it in NCCL never ends.
_GRACE_S = 60.0
_STOPS = (signal.SIGINT, signal.SIGTERM)
# Of Linux's prctl.
_SET_DEATH_SIGNAL = 1


def train_in_ranks(run: str, config: SupervisedConfig, *, count: int, prog: str) -> None:
    """Train in `count` processes; ends this one with the message and the exit code of the first that failed.

    Args:
        run: the class of the run, as MODULE:CLASS.
    """
    from torch import multiprocessing
    from torch.distributed import TCPStore

    each = ", one per GPU" if cpu.own_cuda() else ""
    print(f"{config.logger.stage_name}: {count} processes{each}; {PROCESSES} sets another number", flush=True)
    # On a port of this machine alone; the processes meet there.
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    environment = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
    }
    with tempfile.TemporaryDirectory(prefix="lmm-r1-ranks-") as folder:
        # Until a process can end with a message, its signals wait; the start of Python's tracker would release them.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
        ranks = multiprocessing.start_processes(
            _rank, (run, config, environment, Path(folder), prog), nprocs=count, join=False
        )

        def forward(number: int, frame: FrameType | None) -> None:
            for process in ranks.processes:
                if process.exitcode is None:
                    os.kill(process.pid, number)

        # They end after the current step.
        for number in _STOPS:
            signal.signal(number, forward)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)
        try:
            while not ranks.join(grace_period=_GRACE_S):
                pass
        except multiprocessing.ProcessExitedException as error:
            print(_said(error.error_index, error.exit_code, Path(folder), prog=prog), file=sys.stderr)
            raise SystemExit(abs(error.exit_code) + 128 * (error.exit_code < 0)) from None


def _rank(
    place: int, run: str, config: SupervisedConfig, environment: dict[str, str], folder: Path, prog: str
) -> None:
    """Train as one of the processes, of which the first prints."""
    import torch

    os.environ.update(environment, RANK=str(place), LOCAL_RANK=str(place))
    # PyTorch has asked for Ctrl-C when the starting process is killed, which a shell's background jobs ignore.
    ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGTERM)
    if place:
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    cores = len(os.sched_getaffinity(0)) // int(environment["WORLD_SIZE"])
    torch.set_num_threads(max(1, min(cores, torch.get_num_threads())))
    cpu.prepare_process()
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)
        train_run(run, config)
    except BaseException:
        # What a terminal sends to all processes is forwarded, too, and may come once more.
        signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
        # Of all messages one is printed, with the lines that otherwise only the first rank prints.
        os.environ["RANK"] = "0"
        with (folder / f"{place}.error").open("w") as said, contextlib.redirect_stderr(said):
            try:
                with user_errors(prog):
                    raise
            except Exception:
                traceback.print_exc()
                raise SystemExit(1) from None


def _said(place: int, code: int, folder: Path, *, prog: str) -> str:
    """Return the message of a process that failed."""
    if (folder / f"{place}.error").exists():
        # What failed because of it failed later.
        return min(folder.glob("*.error"), key=lambda file: file.stat().st_mtime_ns).read_text().rstrip()
    how = f"was killed by signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"ended with exit code {code}"
    advice = "; the machine may be out of memory" if -code == signal.SIGKILL else ""
    return f"{prog}: error: rank {place} {how}{advice}"
