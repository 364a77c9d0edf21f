"""Media between two nodes: what an engine puts on one, a model's worker on another fetches, and none keeps."""

import time
from collections.abc import Iterator

import pytest
import ray
from helpers.conversations import message, row
from helpers.media_steps import Engine, Worker, name_of, pickle_helpers, settings_of
from ray._private.internal_api import get_memory_info_reply, get_state_from_address
from ray.cluster_utils import Cluster

pytestmark = pytest.mark.slow


@pytest.fixture
def nodes() -> Iterator[Cluster]:
    """Two nodes with object stores of their own, the driver on the first."""
    pickle_helpers()
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 2, "resources": {"first": 1}, "include_dashboard": False}
    )
    cluster.add_node(num_cpus=2, resources={"second": 1})
    ray.init(address=cluster.address, logging_level="warning", log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def objects_of(cluster: Cluster) -> list[int]:
    """How many objects the store of each node holds."""
    found = []
    for node in cluster.list_all_nodes():
        state = get_state_from_address(cluster.address)
        reply = get_memory_info_reply(state, node.node_ip_address, node.node_manager_port)
        found.append(reply.store_stats.num_local_objects)
    return found


def test_a_worker_fetches_from_the_engines_node_and_both_nodes_are_free_again(nodes):
    engine = Engine.options(resources={"second": 1}).remote()
    worker = Worker.options(resources={"first": 1}).remote(1, 0, None, None)
    (expected,) = ray.get(engine.prepare.remote(patches=256, images=1))
    asked = row(message("user", "?"), answer=name_of(256, 0))
    group = ray.get(engine.generate_group.remote(asked, settings_of(samples=2)))
    ray.get(worker.look_at.remote([sample.media for sample in group.samples]))
    assert ray.get(worker.take_seen.remote()) == [[expected, expected]]
    assert max(objects_of(nodes)) >= 1
    del group
    deadline = time.monotonic() + 20
    while any(objects_of(nodes)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert objects_of(nodes) == [0, 0]
