"""Workers as forks: they are what Ray has started in their place, and end as it does."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from lmm_r1 import cpu
from lmm_r1.cluster import worker_processes
from lmm_r1.cluster.worker_processes import ForkServer, close_server, fork_server, worker_runtime

ENVIRONMENT = {cpu.BACKEND: "cpu", "OF_WORKERS": "1"}
TELLS = """
import json, os, random, signal, sys
import numpy as np
print(json.dumps({
    "arguments": sys.argv[1:], "folder": os.getcwd(), "path": sys.path[0], "name": __name__, "pid": os.getpid(),
    "first": os.environ.get("FIRST"), "of_workers": os.environ.get("OF_WORKERS"), "only_here": os.environ.get("ONLY_HERE"),
    "loaded": "lmm_r1.dotted" in sys.modules, "group": os.getpgid(0), "waits": signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL,
    "drawn": [random.random(), np.random.random()],
}))
print("to errors", file=sys.stderr)
"""


@pytest.fixture(scope="module", autouse=True)
def closed_behind() -> Iterator[None]:
    yield
    close_server()


@pytest.fixture
def server() -> ForkServer:
    return fork_server(ENVIRONMENT, ("lmm_r1.dotted", "numpy"))


def start(server: ForkServer, script: Path, *arguments: str, **settings: object) -> subprocess.Popen[str]:
    """Start a worker as Ray does: by a shell that goes over to the command."""
    command = ["bash", "-c", f'exec {server.python} "$@"', "_", str(script), *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, **{**pipes, **settings})


def written(folder: Path, text: str) -> Path:
    file = folder / "worker.py"
    file.write_text(text)
    return file


def test_a_fork_has_what_its_worker_was_started_with_and_what_is_loaded(server, tmp_path):
    script = written(tmp_path, TELLS)
    environment = {"FIRST": "é" * 40_000, "PATH": os.environ["PATH"]}
    told = []
    for number in range(2):
        worker = start(server, script, "--number", str(number), cwd=tmp_path, env=environment)
        output, errors = worker.communicate(timeout=60)
        assert (worker.returncode, errors) == (0, "to errors\n")
        told.append(json.loads(output))
    for number, one in enumerate(told):
        assert one["arguments"] == ["--number", str(number)]
        assert (one["folder"], one["path"], one["name"]) == (str(tmp_path), str(tmp_path), "__main__")
        # Its environment is that of the process in whose place it is, and not the server's.
        assert (one["first"], one["of_workers"], one["only_here"]) == ("é" * 40_000, None, None)
        assert one["loaded"]
        assert one["waits"]
        assert one["group"] == one["pid"] != worker.pid
    assert not set(told[0]["drawn"]) & set(told[1]["drawn"]), "each draws numbers of its own"


def test_what_ray_waits_for_ends_with_the_worker(server, tmp_path):
    script = written(tmp_path, "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)")
    worker = start(server, script)
    assert worker.stdout is not None
    os.kill(int(worker.stdout.readline()), signal.SIGKILL)
    worker.wait(timeout=60)


def test_without_a_server_a_worker_is_a_process_of_its_own(server, tmp_path):
    close_server()
    assert not server.folder.exists()
    output, errors = start(server, written(tmp_path, TELLS)).communicate(timeout=60)
    assert not json.loads(output)["loaded"], errors


def test_a_server_is_taken_again_for_the_same_environment_alone(server):
    assert fork_server(ENVIRONMENT, ("lmm_r1.dotted", "numpy")) is server
    other = fork_server({**ENVIRONMENT, "OF_WORKERS": "2"}, ("lmm_r1.dotted", "numpy"))
    assert other is not server
    assert server.process.returncode is not None
    assert not server.folder.exists()


def test_a_server_ends_with_its_driver(tmp_path):
    driver = (
        "import time\nfrom lmm_r1.cluster.worker_processes import fork_server\n"
        f"server = fork_server({ENVIRONMENT!r}, ['lmm_r1.dotted'])\n"
        "print(server.process.pid, server.folder, flush=True)\ntime.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", driver], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid, folder = process.stdout.readline().split()
    assert psutil.pid_exists(int(pid))
    process.kill()
    process.wait()
    deadline = time.monotonic() + 60
    while psutil.pid_exists(int(pid)):
        assert time.monotonic() < deadline, "the server goes on without its driver"
        time.sleep(0.02)
    assert not Path(folder).exists()


@pytest.mark.parametrize("case", ["CUDA", "a cluster that is joined"])
def test_workers_with_cuda_and_those_of_another_cluster_start_as_ray_starts_them(case, monkeypatch):
    monkeypatch.setenv(cpu.BACKEND, "cuda" if case == "CUDA" else "cpu")
    monkeypatch.setenv("RAY_ADDRESS", "" if case == "CUDA" else "127.0.0.1:1")
    monkeypatch.setattr(worker_processes, "fork_server", lambda *_: pytest.fail("no server is needed"))
    assert worker_runtime({"A": "1"}) == {
        "env_vars": {"A": "1"},
        "worker_process_setup_hook": "lmm_r1.cpu.prepare_worker",
    }
