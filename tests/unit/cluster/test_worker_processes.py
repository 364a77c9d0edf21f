"""What Ray's workers find when they start, and the forks that tests start in the place of Python."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from helpers.processes import forking_python

from lmm_r1 import cpu
from lmm_r1.cluster.worker_processes import worker_runtime

TELLS = """
import json, os, random, sys
print(json.dumps([sys.argv[1:], os.getcwd(), os.environ.get("FIRST"), "vllm" in sys.modules, os.getpgid(0) == os.getpid()]))
print(random.random(), file=sys.stderr)
"""


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_workers_are_prepared_before_they_load_anything(backend, monkeypatch):
    monkeypatch.setenv(cpu.BACKEND, backend)
    hook = "lmm_r1.cpu.prepare_worker"
    assert worker_runtime({"A": "1"}) == {"env_vars": {"A": "1"}, "worker_process_setup_hook": hook}


def started(script: Path, text: str, *arguments: str, **settings: object) -> subprocess.Popen[str]:
    """Start a worker as Ray does: by a shell that goes over to the command."""
    script.write_text(text)
    command = ["bash", "-c", f'exec {forking_python()} "$@"', "_", str(script), *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, **{**pipes, **settings})


def test_a_fork_has_the_arguments_folder_and_environment_of_what_it_stands_for(tmp_path):
    environment = {"FIRST": "é" * 40_000, "PATH": os.environ["PATH"]}
    drawn = []
    for number in "01":
        worker = started(tmp_path / "worker.py", TELLS, "--number", number, cwd=tmp_path, env=environment)
        output, errors = worker.communicate(timeout=120)
        assert json.loads(output) == [["--number", number], str(tmp_path), "é" * 40_000, True, True]
        drawn.append(errors)
    assert drawn[0] != drawn[1]


def test_what_stands_for_a_fork_ends_with_it_and_its_code(tmp_path):
    worker = started(tmp_path / "worker.py", "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)")
    os.kill(int(worker.stdout.readline()), signal.SIGKILL)
    worker.wait(timeout=60)
    for text, code in {"": 0, "raise SystemExit(3)": 3, "raise ValueError": 1, "os._exit(0)": 1}.items():
        worker = started(tmp_path / "worker.py", f"import atexit, os\natexit.register(print, 'at the end')\n{text}")
        output, errors = worker.communicate(timeout=60)
        assert worker.returncode == code, errors
        assert output == ("" if "_exit" in text else "at the end\n")
