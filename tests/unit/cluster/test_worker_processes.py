"""What Ray's workers find when they start."""

import pytest

from lmm_r1 import cpu
from lmm_r1.cluster import worker_runtime


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_workers_are_prepared_before_they_load_anything(backend, monkeypatch):
    monkeypatch.setenv(cpu.BACKEND, backend)
    hook = "lmm_r1.cpu.prepare_worker"
    assert worker_runtime({"A": "1"}) == {"env_vars": {"A": "1"}, "worker_process_setup_hook": hook}
