"""Ray clusters that the process of the tests keeps: a run that would start one on this machine joins one of its size.

Starting and ending a cluster takes longer than most runs here. Each run is a job of its own in it, whose workers and objects
end with the job. How a run starts, joins and leaves clusters of its own is tested without them.
"""

import atexit
import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import ray
from helpers.processes import forking_python
from ray.cluster_utils import Cluster

from lmm_r1 import cpu
from lmm_r1.cluster.nodes import patiently

# Of a run's settings, those of the cluster.
SIZES = ("num_cpus", "num_gpus", "include_dashboard")
# Clusters at most; the one that was longest unused goes first.
KEPT = 2


@dataclass(frozen=True)
class Kept:
    cluster: Cluster
    environment: dict[str, str]
    """What its workers find where a job says nothing else."""


_kept: dict[tuple[Any, ...], Kept] = {}


@contextmanager
def kept_clusters() -> Iterator[None]:
    """Let `ray.init` join a kept cluster where it would start one for a run."""
    started = ray.init

    def joined(**settings: Any) -> Any:
        ours = "worker_process_setup_hook" in settings.get("runtime_env", ())
        # A fork cannot go on with a GPU.
        if settings.get("address") != "local" or not ours or cpu.has_cuda():
            return started(**settings)
        kept = _cluster(tuple(settings.pop(name, None) for name in SIZES))
        runtime = dict(settings.pop("runtime_env"))
        changed = {name: value for name, value in os.environ.items() if kept.environment.get(name) != value}
        # Of a cluster of their own, workers would have this process's environment and folder.
        runtime = {
            "py_executable": f"env -C {shlex.quote(os.getcwd())} {forking_python()}",
            "env_vars": {**changed, **runtime.pop("env_vars", {})},
            **runtime,
        }
        return started(**settings | {"address": kept.cluster.address, "runtime_env": runtime})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray, "init", joined)
        yield


def _cluster(size: tuple[Any, ...]) -> Kept:
    """Return a cluster of this size; it is started, where there is none."""
    kept = _kept.pop(size, None)
    if kept is None:
        while len(_kept) >= KEPT:
            _kept.pop(next(iter(_kept))).cluster.shutdown()
        arguments = {name: value for name, value in zip(SIZES, size, strict=True) if value is not None}
        cluster = patiently(lambda: Cluster(initialize_head=True, head_node_args=arguments))
        kept = Kept(cluster, dict(os.environ))
    _kept[size] = kept
    return kept


@atexit.register
def _end() -> None:
    while _kept:
        _kept.popitem()[1].cluster.shutdown()
