"""Files that every node of a run must see under one path: looked for on each node before anything is loaded."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from lmm_r1.cluster.nodes import Node, living_nodes
from lmm_r1.errors import UserError

# A node's first worker imports PyTorch, from a network drive perhaps.
_PATIENCE_S = 300.0


@dataclass(frozen=True, kw_only=True)
class SharedPath:
    """A path that workers of a run open."""

    flag: str
    """The flag that gave it, with its dashes."""
    path: str
    """As workers will open it."""
    written: bool = False
    """Whether it is a folder that they write into, too."""


def check_shared(paths: Sequence[SharedPath]) -> None:
    """Raise UserError where a node that has GPUs does not see a path, or cannot write into it; one node alone sees all.

    Into folders that are written to, the driver puts a file that the nodes look for: a folder of the same name on a
    disk of their own is another one.
    """
    nodes = living_nodes()
    if len(nodes) < 2:
        return
    nodes = [node for node in nodes if node.gpus > 0]
    token = f".shared-{uuid.uuid4().hex}"
    with _tokens(paths, token):
        looking = ray.remote(num_cpus=0, max_retries=0)(lacks)
        refs = [
            looking.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False)).remote(
                paths, token
            )
            for node in nodes
        ]
        found, _ = ray.wait(refs, num_returns=len(refs), timeout=_PATIENCE_S)
        for node, ref in zip(nodes, refs, strict=True):
            if ref not in found:
                raise UserError(
                    f"node {node.address} started no worker within {_PATIENCE_S:.0f} s; look at it with `ray status`"
                )
            for place, lack in ray.get(ref):
                raise UserError(_sentence(node, paths[place], lack))


def lacks(paths: Sequence[SharedPath], token: str) -> list[tuple[int, str]]:
    """Return the places of the paths that this node does not have as the driver has them, and what is wrong."""
    found = []
    for place, shared in enumerate(paths):
        lack = _lack(shared, token)
        if lack is not None:
            found.append((place, lack))
    return found


def _lack(shared: SharedPath, token: str) -> str | None:
    path = Path(shared.path)
    if not shared.written:
        return None if path.exists() else "does not see it"
    if not (path / token).is_file():
        return "sees another folder there" if path.is_dir() else "does not see it"
    try:
        own = path / f"{token}-{uuid.uuid4().hex}"
        own.touch()
        own.unlink()
    except OSError as error:
        return f"cannot write into it ({error.strerror})"
    return None


def _sentence(node: Node, shared: SharedPath, lack: str) -> str:
    here = "" if os.path.isabs(shared.path) else "; workers there start in another folder: give an absolute path"
    return f"{shared.flag} {shared.path}: node {node.address} {lack}; all machines of a run must share it{here}"


@contextlib.contextmanager
def _tokens(paths: Sequence[SharedPath], name: str) -> Iterator[None]:
    files = [Path(shared.path) / name for shared in paths if shared.written]
    try:
        for file in files:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
        yield
    finally:
        for file in files:
            file.unlink(missing_ok=True)
