"""Whether a cluster's GPUs are real, told from what `ray.nodes()` says; which one is joined; what paths a node lacks."""

import os
from typing import Any

import pytest
import ray
from ray._private import node as ray_node
from ray._private.services import canonicalize_bootstrap_address

from lmm_r1.cluster import nodes as cluster_nodes
from lmm_r1.cluster.nodes import Node, SharedPath, has_gpus, unseen
from lmm_r1.errors import UserError


def node(name: str, *, gpus: float = 0, kind: str | None = None) -> Node:
    return Node(id=name, address=f"10.0.0.{name}", gpus=gpus, names_gpus=kind is not None)


HEAD = node("1")
PRETENDED = node("2", gpus=8)
REAL = node("3", gpus=8, kind="H100")
# `ray start --num-gpus 0` on a machine with a card.
WITHHELD = node("4", kind="A100")


@pytest.mark.parametrize(
    ("nodes", "here", "own_cuda", "found"),
    [
        ([HEAD, REAL], "1", False, True),
        ([HEAD, PRETENDED, REAL], "1", False, True),
        ([HEAD, PRETENDED], "1", False, False),
        ([HEAD], "1", False, False),
        ([HEAD, WITHHELD], "1", False, False),
        # A driver with a card of its own, on a cluster without.
        ([HEAD, PRETENDED], "1", True, False),
        ([WITHHELD, PRETENDED], "4", True, False),
        # Its card has no name that Ray knows, but it is a node itself.
        ([PRETENDED, HEAD], "2", True, True),
        ([PRETENDED, HEAD], "2", False, False),
    ],
)
def test_gpus_are_there_where_ray_knows_their_kind(nodes, here, own_cuda, found):
    assert has_gpus(nodes, here=here, own_cuda=own_cuda) is found


@pytest.mark.parametrize(("environment", "joined"), [(None, "local"), ("", "local"), ("10.0.0.1:6379", None)])
def test_a_cluster_left_by_ray_start_is_told_of_and_joined_by_its_address_alone(
    environment, joined, monkeypatch, tmp_path, caplog
):
    # Where Ray finds what was started last on this machine: `ray.init()` without an address joins it.
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("10.0.0.9:6379")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if environment is not None:
        monkeypatch.setenv("RAY_ADDRESS", environment)
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(ray, "init", lambda **settings: asked.append(settings))
    assert canonicalize_bootstrap_address(None) == (environment or "10.0.0.9:6379")
    cluster_nodes.connect()
    assert asked[0].get("address") == joined
    assert ("set RAY_ADDRESS=10.0.0.9:6379 to join" in caplog.text) is (joined == "local")


class SlowNode(ray_node.Node):
    """A node of Ray's that does not come up so many times."""

    def __init__(self, *, fails: int) -> None:
        self.fails = fails
        self.ended = 0

    def start(self) -> str:
        if self.ended < self.fails:
            raise Exception("The current node timed out during startup. This could happen because ...")
        return "up"

    def kill_all_processes(self, check_alive: bool = True, **how: object) -> None:
        assert not check_alive, "some have ended by themselves"
        self.ended += 1

    def get_logs_dir_path(self) -> str:
        return "/tmp/ray/logs"


def test_a_node_that_comes_up_too_slowly_is_ended_and_started_again(caplog):
    node = SlowNode(fails=2)
    assert cluster_nodes.patiently(node.start) == "up"
    assert node.ended == 2
    assert [record.message.split(" (")[0] for record in caplog.records] == ["Ray did not start within 30 s"] * 2


def test_a_node_that_never_comes_up_is_told_with_the_load_and_what_to_do(monkeypatch):
    monkeypatch.setattr(os, "getloadavg", lambda: (23.4, 9.0, 2.0))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    node = SlowNode(fails=9)
    with pytest.raises(UserError) as raised:
        cluster_nodes.patiently(node.start)
    assert node.ended == 4
    assert str(raised.value) == (
        "Ray did not start in 4 tries of 30 s each (load 23 on 2 cores): other processes may leave it too little of the "
        "machine; wait until they end, or look into /tmp/ray/logs for another reason"
    )


@pytest.mark.parametrize(
    ("address", "mode", "warned"),
    [("10.0.0.1:6379", None, True), ("10.0.0.1:6379", "token", False), ("127.0.0.1:6379", None, False)],
)
def test_a_cluster_without_tokens_on_the_network_is_named(address, mode, warned, monkeypatch, caplog):
    monkeypatch.setattr(ray, "init", lambda **settings: None)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    cluster_nodes._warn_of_open_cluster.cache_clear()
    environment |= {"RAY_ADDRESS": address} | ({} if mode is None else {"RAY_AUTH_MODE": mode})
    monkeypatch.setattr(os, "environ", environment)
    cluster_nodes.connect()
    assert ("without tokens" in caplog.text) is warned


TOKEN = ".shared-1"


def test_a_node_names_the_paths_that_it_does_not_have_as_the_driver_has_them(tmp_path):
    for name in ("model", "run", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "run" / TOKEN).touch()
    paths = [
        SharedPath(flag="--a", path=str(tmp_path / "model")),
        SharedPath(flag="--b", path=str(tmp_path / "model" / "nowhere.png")),
        SharedPath(flag="--c", path=str(tmp_path / "run"), written=True),
        SharedPath(flag="--d", path=str(tmp_path / "other"), written=True),
        SharedPath(flag="--e", path=str(tmp_path / "gone"), written=True),
    ]
    assert [shared.flag for shared in unseen(paths, TOKEN)] == ["--b", "--d", "--e"]
