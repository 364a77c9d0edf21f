"""How Ray's workers start: what they find, and without CUDA as forks of one process that has loaded their libraries.

PyTorch, vLLM, DeepSpeed and transformers take a core six seconds to load, once for all workers of a run here. Ray's runtime
environment has a `py_executable`, by default Python; here it is `fork_client.py`, which asks for a fork. A fork cannot go
on with a GPU, so workers with CUDA, and those of a cluster that a run joins, load their libraries themselves.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import random
import runpy
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# None of these loads Ray, whose library takes the process that loads it for the worker of a certain job and node.
MODULES = (
    "transformers.trainer",
    "deepspeed",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.worker.cpu_model_runner",
    "lmm_r1.models.actor",
    "lmm_r1.generation.codec",
)
_CLIENT = Path(__file__).with_name("fork_client.py")
_ROOT = Path(__file__).parents[2]
# The first variable of a server and its forks: a process can only be given a title as long as that one stays in its place.
_FIRST = "LMM_R1_FORK_SERVER"
# Standard input, output and errors.
_STREAMS = 3


@dataclass(frozen=True, kw_only=True)
class ForkServer:
    """A process that becomes a worker by a fork whenever it is asked; it ends with this one."""

    process: subprocess.Popen[bytes]
    folder: Path
    environment: Mapping[str, str]
    modules: tuple[str, ...]

    @property
    def python(self) -> str:
        """The command that Ray is to start workers with, in place of Python."""
        return shlex.join([sys.executable, "-ES", str(_CLIENT), str(self.folder / "socket")])

    def close(self) -> None:
        """End the server; its forks continue."""
        assert self.process.stdin is not None, "it is a pipe"
        self.process.stdin.close()
        # It may still be loading.
        self.process.kill()
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


KIT_VARIABLE = "LMM_R1_KIT"
"""The files of kits that were registered, with semicolons between them; workers inherit it."""

# One at most, which is kept for the next run of this process.
_running: list[ForkServer] = []


def run_environment() -> dict[str, str]:
    """Return the environment variables of a training run's workers; what the user has set stays."""
    from lmm_r1 import cpu
    from lmm_r1.cluster import nodes

    variables = {"TOKENIZERS_PARALLELISM": "true", "VLLM_LOGGING_LEVEL": "WARNING", **cpu.worker_environment()}
    variables |= {} if nodes.joins() else nodes.LOOPBACK_ENVIRONMENT
    return {name: os.environ.get(name, value) for name, value in variables.items()}


def worker_runtime(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return Ray's runtime environment for workers with these environment variables, and start what they are forked from."""
    kits = {name: value for name in (KIT_VARIABLE,) if (value := os.environ.get(name))}
    runtime = {"env_vars": {**environment, **kits}, "worker_process_setup_hook": "lmm_r1.cpu.prepare_worker"}
    if _are_forked():
        runtime["py_executable"] = fork_server(environment).python
    return runtime


def load_ahead(environment: Mapping[str, str]) -> None:
    """Start what workers are forked from, if they are, while this process does something else."""
    if _are_forked():
        fork_server(environment)


def _are_forked() -> bool:
    from lmm_r1 import cpu
    from lmm_r1.cluster import nodes

    return not nodes.joins() and not cpu.has_cuda()


def fork_server(environment: Mapping[str, str], modules: Sequence[str] = MODULES) -> ForkServer:
    """Return a server of forks with these environment variables; one that runs is taken again.

    Args:
        environment: what libraries may read while they are loaded. Each fork has the whole environment of who asks for it.
        modules: what is loaded before the first fork.
    """
    while _running:
        server = _running.pop()
        if server.process.poll() is None and (server.environment, server.modules) == (environment, tuple(modules)):
            _running.append(server)
            return server
        server.close()
    folder = Path(tempfile.mkdtemp(prefix="lmm_r1_workers_"))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "socket"))
        # Who asks from now on waits until all is loaded.
        listener.listen(64)
        # A session of its own: Ctrl-C in a terminal is for this process, which ends the server.
        process = subprocess.Popen(
            [sys.executable, __file__, str(listener.fileno()), str(folder), *modules],
            stdin=subprocess.PIPE,
            env={_FIRST: str(folder), **os.environ, **environment},
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )
    server = ForkServer(process=process, folder=folder, environment=dict(environment), modules=tuple(modules))
    _running.append(server)
    return server


@atexit.register
def close_server() -> None:
    """End the server that this process keeps, if there is one."""
    while _running:
        _running.pop().close()


def _serve(descriptor: int, folder: Path, modules: Sequence[str]) -> socket.socket:
    """Answer each request by a fork; return in the fork the connection that it came over.

    Ends with the process that has the other side of standard input.

    Args:
        descriptor: of the socket that listens, in the folder.
    """
    from lmm_r1 import cpu

    with socket.socket(fileno=descriptor) as listener:
        cpu.prepare_process()
        for module in modules:
            importlib.import_module(module)
        assert "ray" not in sys.modules, "it would be none of a worker's"
        # What forks share stays shared: the collector would write to it.
        gc.freeze()
        # Ended forks need not be waited for.
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        while True:
            ready, _, _ = select.select([listener, sys.stdin], [], [])
            if sys.stdin in ready:
                shutil.rmtree(folder, ignore_errors=True)
                # At a usual end libraries would count what is left of them.
                os._exit(0)
            connection, _ = listener.accept()
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                return connection
            connection.close()


def _become(connection: socket.socket) -> list[str]:
    """Take over the environment, folder and streams of the process that Ray has started; return its arguments."""
    text, streams, _, _ = socket.recv_fds(connection, 2**16, _STREAMS)
    while part := connection.recv(2**16):
        text += part
    asked = json.loads(text)
    # As Ray does for a worker of its own: what ends the worker ends what it has started, and no more.
    os.setpgid(0, 0)
    for place, stream in enumerate(streams):
        os.dup2(stream, place)
        os.close(stream)
    variables = asked["environment"]
    for name in os.environ.keys() - variables.keys() - {_FIRST}:
        del os.environ[name]
    os.environ.update(variables)
    os.chdir(asked["folder"])
    return list(asked["arguments"])


def _end(clients: Sequence[socket.socket], codes: Sequence[int]) -> None:
    """Tell the last of the codes to who waits for this fork, and end."""
    sys.stdout.flush()
    sys.stderr.flush()
    for client in clients:
        client.send(bytes([codes[-1] & 0xFF]))
    # At a usual end libraries would count what is left of them.
    os._exit(codes[-1])


def _main() -> None:
    # In place of this file's folder, whose modules have names that are not meant for all.
    sys.path[0] = str(_ROOT)
    # Registered before libraries are loaded, so that it runs after their own handlers.
    clients: list[socket.socket] = []
    codes = [1]
    atexit.register(_end, clients, codes)
    descriptor, folder, *modules = sys.argv[1:]
    clients.append(_serve(int(descriptor), Path(folder), modules))
    sys.argv = _become(clients[0])
    # Let each fork draw numbers of its own, as processes do that have set no seed.
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    script = sys.argv[0]
    sys.path[0] = str(Path(script).parent)
    try:
        runpy.run_path(script, run_name="__main__")
        codes.append(0)
    except SystemExit as end:
        codes.append(end.code if isinstance(end.code, int) else int(end.code is not None))
        raise


if __name__ == "__main__":
    _main()
