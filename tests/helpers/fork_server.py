"""A Python that has loaded the training stack, of which processes that tests start are forks.

PyTorch, vLLM, DeepSpeed and transformers take a core six seconds to load. `python -ES fork_server.py ask SOCKET ...` stands
in for Python: it hands its arguments, environment, folder and streams to a fork, and ends with the fork's exit code.
"""

import json
import os
import socket
import sys
from pathlib import Path

# None of these loads Ray, whose library takes the process that loads it for the worker of a certain job and node.
MODULES = (
    "transformers.trainer",
    "deepspeed",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.worker.cpu_model_runner",
    "lmm_r1.models.actor",
    "lmm_r1.generation.request",
)
_ROOT = Path(__file__).parents[2]
# The first variable of a server: a process can only be given a title as long as that one stays in its place.
_FIRST = "LMM_R1_FORK_SERVER"
# The other side of a server's standard input: it ends with this process.
_held: list[object] = []


def ask(path: str, *arguments: str) -> None:
    """Let the server fork, and end as the fork does."""
    server = socket.socket(socket.AF_UNIX)
    try:
        server.connect(path)
    except (FileNotFoundError, ConnectionRefusedError):
        os.execv(sys.executable, [sys.executable, *arguments])
    asked = {"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd()}
    text = json.dumps(asked).encode()
    server.sendall(text[socket.send_fds(server, [text], [0, 1, 2]) :])
    server.shutdown(socket.SHUT_WR)
    # A killed fork sends no code.
    code = server.recv(1)
    raise SystemExit(code[0] if code else 1)


def _forked(descriptor: int) -> socket.socket:
    """Answer each request by a fork, and return its connection there; end with whoever holds standard input."""
    import atexit
    import gc
    import importlib
    import select
    import signal

    from lmm_r1 import cpu

    with socket.socket(fileno=descriptor) as listener:
        cpu.prepare_process()
        for module in MODULES:
            importlib.import_module(module)
        assert "ray" not in sys.modules
        # A command that does not load DeepSpeed writes none of its tables at the end; others see to it themselves.
        tables = sys.modules["deepspeed.ops.transformer.inference.triton.matmul_ext"]
        atexit.unregister(tables.matmul_ext_update_autotune_table)
        # What forks share stays shared: the collector would write to it.
        gc.freeze()
        # Ended forks need not be waited for.
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        while True:
            if sys.stdin in select.select([listener, sys.stdin], [], [])[0]:
                # At a usual end libraries would count what is left of them.
                os._exit(0)
            connection, _ = listener.accept()
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                return connection
            connection.close()


def _become(connection: socket.socket) -> list[str]:
    """Take over the environment, folder and streams of the process that asked; return its arguments."""
    import random

    import numpy as np

    text, streams, _, _ = socket.recv_fds(connection, 2**16, 3)
    while part := connection.recv(2**16):
        text += part
    asked = json.loads(text)
    # As Ray does for a worker of its own: what ends the worker ends what it has started, and no more.
    os.setpgid(0, 0)
    for place, stream in enumerate(streams):
        os.dup2(stream, place)
        os.close(stream)
    for name in os.environ.keys() - asked["environment"].keys() - {_FIRST}:
        del os.environ[name]
    os.environ.update(asked["environment"])
    os.chdir(asked["folder"])
    random.seed()
    np.random.seed()
    return asked["arguments"]


def serve(descriptor: str) -> None:
    """Load, wait for requests, and in each fork run the file that is asked for."""
    import atexit
    import runpy

    sys.path[0] = str(_ROOT)
    clients: list[socket.socket] = []
    codes = [1]

    def end() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        for client in clients:
            client.send(bytes([codes[-1] & 0xFF]))
        os._exit(codes[-1])

    # Registered before libraries are loaded, so that it runs after their own handlers.
    atexit.register(end)
    clients.append(_forked(int(descriptor)))
    sys.argv = _become(clients[0])
    sys.path[0] = str(Path(sys.argv[0]).parent)
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
        codes.append(0)
    except SystemExit as ended:
        codes.append(ended.code if isinstance(ended.code, int) else int(ended.code is not None))
        raise


def start(folder: Path, environment: dict[str, str]) -> str:
    """Start the server of this process, whose socket is in the folder; return the command that stands in for Python."""
    import subprocess

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "socket"))
        # Who asks from now on waits until all is loaded.
        listener.listen(64)
        server = subprocess.Popen(
            [sys.executable, __file__, "serve", str(listener.fileno())],
            stdin=subprocess.PIPE,
            env={_FIRST: str(folder), **os.environ, **environment},
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )
    _held.append(server)
    return f"{sys.executable} -ES {__file__} ask {folder / 'socket'}"


if __name__ == "__main__":
    {"ask": ask, "serve": serve}[sys.argv[1]](*sys.argv[2:])
