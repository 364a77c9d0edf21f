"""A Ray cluster of a head without GPUs and two nodes with pretended ones of a known kind, and a driver without CUDA."""

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray import cloudpickle
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group, remove_placement_group

from lmm_r1 import cpu
from lmm_r1.cluster import nodes
from lmm_r1.cluster.nodes import SharedPath, check_shared, reserve
from lmm_r1.config import PPOConfig
from lmm_r1.errors import UserError
from lmm_r1.host.workers import WorkerGroup
from lmm_r1.rl import run
from lmm_r1.train.stopping import StopRequests

pytestmark = pytest.mark.slow

GPUS = 2
"""Of each of the two nodes."""


@ray.remote(num_gpus=1)
class Model:
    def __init__(self, ranks: int, rank: int, address: str | None, port: int | None) -> None:
        self.told = (ranks, rank, address, port)

    def get_master_addr_port(self) -> tuple[str, int]:
        return "10.0.0.1", 29500

    def state(self) -> tuple[tuple, str, tuple[str | None, ...]]:
        """What it was started with, where it is, and what it takes itself for."""
        environment = tuple(os.environ.get(name) for name in (cpu.BACKEND, "DS_ACCELERATOR", "CUDA_VISIBLE_DEVICES"))
        return self.told, ray.get_runtime_context().get_node_id(), environment


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """The cluster, joined as a run does it."""
    # Workers can't import a test module.
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with pytest.MonkeyPatch.context() as patch:
        # Nodes hand on to workers what they are started with, and tests before have made this process one for CPUs.
        patch.delenv("DS_ACCELERATOR", raising=False)
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 0, "include_dashboard": False})
        for _ in range(2):
            made.add_node(num_cpus=2 * GPUS, num_gpus=GPUS, resources={"accelerator_type:H100": 1})
        patch.setenv(nodes.ADDRESS, made.address)
        patch.delenv(cpu.BACKEND, raising=False)
        patch.setattr(cpu, "own_cuda", lambda: False)
        # Of `pytest`, for what Ray's workers import before the hook.
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (os.getcwd(), os.environ.get("PYTHONPATH")))))
        try:
            nodes.follow_cluster()
            assert not ray.is_initialized(), "only asked"
            run._start_ray(PPOConfig())
            yield made
        finally:
            ray.shutdown()
            made.shutdown()
            cpu.follow_workers(None)


def test_a_driver_without_gpus_starts_gpu_workers_whose_neighbours_share_a_node(cluster, monkeypatch):
    assert cpu.has_cuda()
    spread = nodes.placement_group
    # As on a busy cluster: one bundle here, one there.
    monkeypatch.setattr(nodes, "placement_group", lambda bundles, strategy: spread(bundles, strategy="SPREAD"))
    reservation = reserve(2 * GPUS)
    group = WorkerGroup(2, GPUS, Model, pg=reservation, num_gpus_per_actor=0.2, duplicate_actors=GPUS)
    try:
        told, places, environments = zip(
            *ray.get(group.start(Model.__ray_metadata__.modified_class.state)), strict=True
        )
    finally:
        for worker in group._actor_handlers:
            ray.kill(worker)
        remove_placement_group(reservation.group)
    others = [(2 * GPUS, rank, "10.0.0.1", 29500) for rank in range(1, 2 * GPUS)]
    assert told == ((2 * GPUS, 0, None, None), *others)
    assert (len(set(places[:GPUS])), len(set(places[GPUS:])), len(set(places))) == (1, 1, 2)
    assert {environment[:2] for environment in environments} == {("cuda", None)}
    assert all(environment[2] in ("0", "1") for environment in environments)


def test_gpus_are_waited_for_and_the_waiting_is_told(cluster, monkeypatch, caplog):
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(nodes, "_FREE_S", 0.5)
    held = placement_group([{"GPU": 1}] * (2 * GPUS))
    ray.get(held.ready())
    threading.Timer(2, remove_placement_group, [held]).start()
    reservation = reserve(2 * GPUS)
    remove_placement_group(reservation.group)
    [waiting] = [record.getMessage() for record in caplog.records]
    assert waiting.startswith(
        f"waiting for {2 * GPUS} GPUs, each with a CPU core: Ray has {2 * GPUS}, of which 0 are free"
    )


def test_a_path_that_a_node_does_not_see_is_named_with_the_node(cluster, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    paths = [
        SharedPath(flag="--actor.model_name_or_path", path=str(tmp_path / "model")),
        SharedPath(flag="--ckpt.output_dir", path=str(tmp_path / "run"), written=True),
    ]
    check_shared(paths)
    assert list((tmp_path / "run").iterdir()) == []
    # Workers are where Ray was started.
    here = SharedPath(flag="--critic.model_name_or_path", path="model")
    address = cluster.head_node.node_ip_address
    with pytest.raises(
        UserError, match=f"^--critic.model_name_or_path model: node {address} does not see it, .*absolute"
    ):
        check_shared([*paths, here])


def test_sigterm_ends_the_waiting_for_a_generation(cluster):
    waited = ray.remote(num_cpus=0)(lambda: time.sleep(60)).remote()
    with StopRequests() as stops:
        threading.Timer(1, os.kill, [os.getpid(), signal.SIGTERM]).start()
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            ray.get(waited)
        assert time.monotonic() - began < 10
        assert (stops.reason, stops.exit_code) == ("SIGTERM", 143)
    ray.cancel(waited, force=True)
