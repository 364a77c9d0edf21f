"""Two pretended GPUs: each worker gets its own, and nothing asks CUDA before Ray has assigned it."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray
from helpers import asked_cuda
from ray import cloudpickle

from lmm_r1 import cpu

pytestmark = pytest.mark.slow


@ray.remote(num_gpus=1)
class Worker:
    def state(self) -> tuple[str, bool]:
        """The GPU that is assigned, and what the run's code takes the worker for once all of it is imported."""
        import lmm_r1.rl.workers  # noqa: F401

        return os.environ["CUDA_VISIBLE_DEVICES"], cpu.has_cuda()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[dict[str, str]], Path]]:
    """A function that starts Ray with an environment for its workers, and gives the file of what they ask."""

    def started(environment: dict[str, str]) -> Path:
        notes = tmp_path / "asked"
        notes.touch()
        tests = str(Path(__file__).parents[1])
        path = os.pathsep.join(filter(None, (tests, os.environ.get("PYTHONPATH"))))
        variables = {**environment, asked_cuda.NOTES: str(notes), "PYTHONPATH": path}
        ray.init(
            address="local",
            num_cpus=2,
            num_gpus=2,
            include_dashboard=False,
            log_to_driver=False,
            runtime_env={"env_vars": variables, "worker_process_setup_hook": "helpers.asked_cuda.prepare"},
        )
        return notes

    # Workers can't import a test module.
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield started
    ray.shutdown()


def test_a_worker_sees_its_own_gpu_and_asks_for_none_before(start, monkeypatch):
    monkeypatch.setattr(cpu, "has_cuda", lambda: True)
    notes = start(cpu.worker_environment())
    workers = [Worker.remote() for _ in range(2)]
    states = ray.get([worker.state.remote() for worker in workers])
    assert sorted(states) == [("0", True), ("1", True)]
    # What OpenRLHF and DeepSpeed ask when they are imported comes after the assignment.
    assert set(notes.read_text().split()) <= {"0", "1"}
