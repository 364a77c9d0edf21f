"""The processes of the Ray that a run starts: those it asked for, and none that outlive a killed worker."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress

import psutil
import pytest
import ray
from ray import cloudpickle

from lmm_r1.cluster import nodes

pytestmark = pytest.mark.slow


@ray.remote(num_cpus=0)
class Engine:
    """Has a process of its own, as vLLM's has on a GPU."""

    def start(self) -> tuple[int, int]:
        return os.getpid(), subprocess.Popen(["sleep", "600"]).pid


@pytest.fixture(scope="module")
def started() -> Iterator[None]:
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(nodes.ADDRESS, raising=False)
        nodes.connect(num_cpus=2, include_dashboard=False, log_to_driver=False)
        yield
        ray.shutdown()


@pytest.mark.usefixtures("started")
def test_no_worker_is_started_that_nobody_asked_for():
    ray.get(Engine.remote().start.remote())
    titles = []
    for process in psutil.Process().children(recursive=True):
        # One may have ended since, or has ended and was not yet asked for its code.
        with suppress(psutil.NoSuchProcess):
            titles.append(process.cmdline()[:1])
    assert not [title for title in titles if title and title[0].startswith("ray::IDLE")]


@pytest.mark.usefixtures("started")
def test_the_process_of_an_engine_whose_worker_is_killed_ends_with_it():
    worker, child = ray.get(Engine.remote().start.remote())
    os.kill(worker, signal.SIGKILL)
    deadline = time.monotonic() + 30
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "it would keep the GPU's memory"
        time.sleep(0.1)
