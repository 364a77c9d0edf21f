"""The nodes of a Ray cluster, whether their GPUs are real, which of them a run gets, and whether all see its files."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import traceback
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import ray
from ray._private import node as ray_node
from ray._private import ray_constants
from ray._private.accelerators import get_accelerator_manager_for_resource
from ray._private.services import find_bootstrap_address
from ray.exceptions import AuthenticationError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from lmm_r1 import cpu
from lmm_r1.errors import UserError
from remote_rm.service.access import is_local

logger = logging.getLogger(__name__)

ADDRESS = "RAY_ADDRESS"
AUTH_MODE = "RAY_AUTH_MODE"
# vLLM and gloo would listen on the address by which other machines reach this one.
LOOPBACK_ENVIRONMENT = {"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
"""The environment variables of workers whose run has this machine to itself."""
# Ray names the kind of the GPUs that it finds; for `ray start --num-gpus` it knows only the number.
_KIND = "accelerator_type:"
STARTS = 4
"""How often at most a node is started on a machine that is too busy."""
# Ray's words for a node that did not start.
_NOT_UP = "timed out during startup"
Started = TypeVar("Started")


@dataclass(frozen=True, kw_only=True)
class Node:
    """A living node of the cluster."""

    id: str
    address: str
    gpus: float
    names_gpus: bool
    """Whether Ray knows its kind of GPU."""


def joins() -> bool:
    """Say whether a run joins a cluster; otherwise it starts one of its own on this machine."""
    return bool(os.environ.get(ADDRESS))


def living_nodes() -> list[Node]:
    """Return the nodes of the cluster that this process has joined."""
    return [
        Node(
            id=entry["NodeID"],
            address=entry["NodeManagerAddress"],
            gpus=entry["Resources"].get("GPU", 0.0),
            names_gpus=any(name.startswith(_KIND) for name in entry["Resources"]),
        )
        for entry in ray.nodes()
        if entry["Alive"]
    ]


def gpus_by_node() -> list[int]:
    """Return the number of GPUs of each node of the cluster of RAY_ADDRESS that has any.

    Raises UserError if no cluster answers.
    """
    with _joined():
        return [int(node.gpus) for node in living_nodes() if node.gpus >= 1]


def gpus_here() -> int:
    """Return how many GPUs a Ray that is started on this machine finds, limited by CUDA_VISIBLE_DEVICES."""
    manager = get_accelerator_manager_for_resource("GPU")
    found = manager.get_current_node_num_accelerators()
    visible = manager.get_current_process_visible_accelerator_ids()
    return found if visible is None else min(found, len(visible))


def has_gpus(nodes: Sequence[Node], *, here: str, own_cuda: bool) -> bool:
    """Say whether a cluster's GPUs are real, and not pretended for machines without.

    They are if Ray names their kind on any node, or if this machine is a node and has CUDA.

    Args:
        here: id of the node that the driver is on.
        own_cuda: whether the driver has CUDA.
    """
    offering = [node for node in nodes if node.gpus > 0]
    return any(node.names_gpus or (own_cuda and node.id == here) for node in offering)


def follow_cluster() -> None:
    """Let `cpu.has_cuda` say what the cluster of RAY_ADDRESS has, instead of what this machine has.

    Call it before the run joins the cluster, which fixes the environment of its workers. It changes nothing if the user has
    set LMM_R1_BACKEND, or if the run has a cluster of its own. Raises UserError if no cluster answers.
    """
    if not joins() or cpu.BACKEND in os.environ:
        return
    own = cpu.own_cuda()
    with _joined():
        nodes, here = living_nodes(), ray.get_runtime_context().get_node_id()
    found = has_gpus(nodes, here=here, own_cuda=own)
    cpu.follow_workers(found)
    offered = sum(node.gpus for node in nodes)
    if offered and not found:
        logger.warning(
            "%s: Ray knows no kind of GPU on any of its %d nodes, so that their %g GPUs are taken for pretended and models "
            "run on CPUs; if they are real, set %s=cuda",
            ADDRESS,
            len(nodes),
            offered,
            cpu.BACKEND,
        )


def connect(**settings: Any) -> None:
    """Join the cluster of RAY_ADDRESS, or start one here, as `ray.init` does with these settings.

    Raises UserError if no cluster answers at the address, or none can be started.
    """
    if not joins():
        # Ray would join what `ray start`, or a test of another project, has left on this machine.
        settings["address"] = "local"
        if started := find_bootstrap_address(None):
            logger.warning(
                "a Ray cluster was started on this machine, at %s; this run starts its own: set %s=%s to join that one",
                *(started, ADDRESS, started),
            )
    # Otherwise Ray warns that it will not change this variable in future.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Read by a Ray that is started here: an engine's own process would outlive its worker, and keep the GPU's memory.
    os.environ.setdefault("RAY_process_group_cleanup_enabled", "true")
    # One process a core, none of which a run's workers take over: they have an environment of their own.
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    # Ray starts workers at nice 15: on a shared machine they would get what others leave.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # Seconds: on a slow machine workers answer once their libraries are loaded.
    os.environ.setdefault("RAY_worker_register_timeout_seconds", "600")
    if settings.get("log_to_driver") is False:
        # If several workers fail alike, the run reports one of them. Ray would print the others, each with its traceback,
        # after the run's last line.
        os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    if not joins():
        with on_loopback():
            patiently(lambda: ray.init(**settings, logging_level=logging.WARNING))
        return
    address = os.environ[ADDRESS]
    if os.environ.get(AUTH_MODE) != "token":
        _warn_of_open_cluster(address)
    try:
        patiently(lambda: ray.init(**settings, logging_level=logging.WARNING))
    except (ConnectionError, AuthenticationError) as error:
        raise UserError(
            f"{ADDRESS}={address}: no Ray cluster answers there ({error}); start one with `ray start --head`, give this "
            f"process the cluster's {AUTH_MODE} and RAY_AUTH_TOKEN if it has tokens, or unset {ADDRESS} for a cluster on this "
            "machine alone"
        ) from error


@functools.cache
def _warn_of_open_cluster(address: str) -> None:
    """Warn once, because a run connects several times."""
    if not is_local(urlsplit(f"//{address.rpartition('//')[2]}").hostname or ""):
        logger.warning(
            "%s=%s: the cluster runs without tokens, so that everyone who reaches its ports can run code on it; set "
            "%s=token before `ray start` and here (docs/security.md)",
            *(ADDRESS, address, AUTH_MODE),
        )


@contextlib.contextmanager
def on_loopback() -> Iterator[None]:
    """Let a Ray node that is started in the block, and its processes, listen on 127.0.0.1 only.

    Ray replaces that address by the machine's, except on systems on which it does not support clusters by default.
    """
    switch = ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR
    before, supported = os.environ.get(switch), ray_constants.ENABLE_RAY_CLUSTER
    os.environ[switch], ray_constants.ENABLE_RAY_CLUSTER = "0", False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = supported
        if before is None:
            del os.environ[switch]
        else:
            os.environ[switch] = before


def patiently(start: Callable[[], Started]) -> Started:
    """Return what `start` returns, which starts a Ray node here; a node that starts too slowly is started again.

    Ray's node gives its two agents 15 seconds to load their libraries, and its starter gives up after 30, which no setting
    changes. On a busy machine a later start is quicker: the libraries' files are in memory then.

    Raises UserError if no start succeeds.
    """
    for number in range(1, STARTS + 1):
        try:
            return start()
        except Exception as error:  # Ray has no narrower one for it
            # Ray does not return the node that failed to start, and its processes would keep running.
            found = (frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__))
            node = next((node for node in found if isinstance(node, ray_node.Node)), None)
            if node is None or _NOT_UP not in str(error):
                raise
            node.kill_all_processes(check_alive=False)
            logs, load = node.get_logs_dir_path(), os.getloadavg()[0]
        if number < STARTS:
            logger.warning("Ray did not start within 30 s (load %.0f on %d cores); trying again", load, os.cpu_count())
    raise UserError(
        f"Ray did not start in {STARTS} tries of 30 s each (load {load:.0f} on {os.cpu_count()} cores): other processes may "
        f"leave it too little of the machine; wait until they end, or look into {logs} for another reason"
    )


@contextlib.contextmanager
def _joined() -> Iterator[None]:
    """Join the cluster for a question, unless this process has joined it."""
    if ray.is_initialized():
        yield
        return
    connect(log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()


# A node's first worker imports PyTorch, perhaps from a network drive.
_PATIENCE_S = 300.0


@dataclass(frozen=True, kw_only=True)
class SharedPath:
    """A path that workers of a run open."""

    flag: str
    """The flag that gave it, with its dashes."""
    path: str
    """As workers will open it."""
    written: bool = False
    """Whether it is a folder that they also write into."""


def check_shared(paths: Sequence[SharedPath]) -> None:
    """Raise UserError if a node that has GPUs does not see a path; a single node sees all.

    The driver writes a file into folders that are written to, and the nodes look for it: a folder of the same name on
    their own disk is another one.
    """
    nodes = living_nodes()
    if len(nodes) < 2:
        return
    nodes = [node for node in nodes if node.gpus > 0]
    token = f".shared-{uuid.uuid4().hex}"
    files = [Path(shared.path) / token for shared in paths if shared.written]
    looking = ray.remote(num_cpus=0, max_retries=0)(unseen)
    try:
        for file in files:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
        placed = [NodeAffinitySchedulingStrategy(node.id, soft=False) for node in nodes]
        refs = [looking.options(scheduling_strategy=place).remote(paths, token) for place in placed]
        for node, ref in zip(nodes, refs, strict=True):
            for shared in ray.get(ref, timeout=_PATIENCE_S):
                here = (
                    ""
                    if os.path.isabs(shared.path)
                    else "; workers there start in another folder: give an absolute path"
                )
                raise UserError(
                    f"{shared.flag} {shared.path}: node {node.address} does not see it, or sees another folder there; all "
                    f"machines of a run must share it{here}"
                )
    finally:
        for file in files:
            file.unlink(missing_ok=True)


def unseen(paths: Sequence[SharedPath], token: str) -> list[SharedPath]:
    """Return the paths that this node does not have as the driver has them."""
    return [shared for shared in paths if not (Path(shared.path) / (token if shared.written else "")).exists()]


# Longer than Ray takes to find free GPUs; others may hold them.
_FREE_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Reservation:
    """GPUs that are reserved, one a bundle."""

    group: PlacementGroup
    bundles: tuple[int, ...]
    """By rank: the bundle that it gets."""

    def place(self, rank: int, **settings: Any) -> PlacementGroupSchedulingStrategy:
        """Return the scheduling strategy that starts a rank's worker on its GPU."""
        return PlacementGroupSchedulingStrategy(
            placement_group=self.group, placement_group_bundle_index=self.bundles[rank], **settings
        )


def reserve(gpus: int) -> Reservation:
    """Wait for GPUs and return them in the order of the ranks: node by node, those with most of them first."""
    group = placement_group([{"GPU": 1, "CPU": 1} for _ in range(gpus)], strategy="PACK")
    ready = group.ready()
    if not ray.wait([ready], timeout=_FREE_S)[0]:
        offered, free = (resources.get("GPU", 0) for resources in (ray.cluster_resources(), ray.available_resources()))
        logger.warning(
            "waiting for %d GPUs, each with a CPU core: Ray has %g, of which %g are free; more must come free or join",
            *(gpus, offered, free),
        )
    ray.get(ready)
    return Reservation(group=group, bundles=by_node(placement_group_table(group)["bundles_to_node_id"]))


def by_node(nodes: Mapping[int, str]) -> tuple[int, ...]:
    """Return the bundles of a placement group node by node, those with most bundles first.

    Args:
        nodes: the node of each bundle.
    """
    sizes = Counter(nodes.values())
    return tuple(sorted(nodes, key=lambda bundle: (-sizes[nodes[bundle]], nodes[bundle], bundle)))
