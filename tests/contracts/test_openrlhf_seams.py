"""Every OpenRLHF name that is subclassed or used is there as expected, and none is used beside the list."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml

import lmm_r1


@dataclass(frozen=True, kw_only=True)
class Seam:
    upstream: str
    """`module:name`, or `module:class.method`."""
    how: Literal["subclassed", "used"]
    ours: str
    """What builds on it."""
    reason: str
    signature: str
    """Parameter names of the callable or of the class's constructor, in order."""


_FILE = Path(__file__).resolve().parents[1] / "data" / "openrlhf_names.yaml"
SEAMS = tuple(Seam(**row) for rows in yaml.safe_load(_FILE.read_text(encoding="utf-8")).values() for row in rows)


PACKAGE = Path(lmm_r1.__file__).parent
SOURCES = {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
SUBCLASSED = [seam for seam in SEAMS if seam.how == "subclassed"]
# Other libraries' names that are replaced, and what does it; its docstring says why.
PATCHES = {
    "torch.cuda:synchronize": "lmm_r1.cpu:prepare_worker",
    "vllm.v1.worker.cpu_model_runner:CPUModelRunner._bookkeeping_sync": "lmm_r1.cpu:_take_seeds",
    "vllm._custom_ops:create_onednn_mm": "lmm_r1.cpu:_pack_alike",
    "vllm._custom_ops:create_onednn_scaled_mm": "lmm_r1.cpu:_pack_alike",
    "vllm.utils.cpu_triton_utils:expand_kernel": "lmm_r1.cpu:_mend_guesses",
    "ray._private.ray_constants:ENABLE_RAY_CLUSTER": "lmm_r1.cluster.nodes:on_loopback",
    "deepspeed.runtime.zero:Init": "lmm_r1.host.models:weights_alone_cast",
    "deepspeed.comm.torch:build_shm_op": "lmm_r1.host.strategy:prepare_training",
    "deepspeed.runtime.engine:DeepSpeedEngine._do_optimizer_sanity_check": "lmm_r1.host.optimizer:passes_added_up",
    "deepspeed.runtime.engine:DeepSpeedEngine._configure_basic_optimizer": "lmm_r1.host.optimizer:eight_bit_adam",
}


def title(seam: Seam) -> str:
    return f"{seam.how} {seam.upstream.removeprefix('openrlhf.')}"


def resolve(path: str) -> Any:
    """The object at `module:name` or `module:class.method`; a Ray actor class gives the class inside it."""
    module, _, names = path.partition(":")
    target: Any = importlib.import_module(module)
    for name in names.split("."):
        target = getattr(target, name)
        if hasattr(target, "__ray_metadata__"):
            target = target.__ray_metadata__.modified_class
    return target


def parameters(target: object) -> list[str]:
    """Parameter names of a callable; of a class, those of its constructor with self. Ray adds one to its actors'."""
    signature = inspect.signature(target.__init__ if inspect.isclass(target) else target)
    return [name for name in signature.parameters if name != "_ray_trace_ctx"]


@pytest.mark.parametrize("seam", SEAMS, ids=title)
def test_the_upstream_name_is_there_with_the_signature_relied_on(seam):
    assert seam.upstream.startswith("openrlhf.")
    assert parameters(resolve(seam.upstream)) == seam.signature.split()


@pytest.mark.parametrize("seam", SUBCLASSED, ids=title)
def test_a_subclassed_name_is_subclassed(seam):
    upstream, ours = resolve(seam.upstream), resolve(seam.ours)
    if inspect.isclass(upstream):
        assert issubclass(ours, upstream)
        assert ours is not upstream
        return
    (their_class, name), (our_class, our_name) = (path.rsplit(".", 1) for path in (seam.upstream, seam.ours))
    assert issubclass(resolve(our_class), resolve(their_class))
    assert our_name == name
    # In the class itself or in one of ours that it is mixed with.
    assert any(name in vars(base) for base in resolve(our_class).__mro__ if base.__module__.startswith("lmm_r1."))
    # Further parameters, which upstream does not know, come behind its own and have defaults.
    theirs, further = parameters(upstream), parameters(ours)[len(parameters(upstream)) :]
    assert parameters(ours)[: len(theirs)] == theirs
    signature = inspect.signature(ours).parameters
    assert all(signature[name].default is not inspect.Parameter.empty for name in further)


def openrlhf_imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield (`module:name`, local name) of every import from OpenRLHF, wherever it stands; a module alone has no name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "openrlhf":
            for alias in node.names:
                yield f"{node.module}:{alias.name}", alias.asname or alias.name
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "openrlhf":
                    yield f"{alias.name}:", alias.asname or "openrlhf"


def is_listed(path: str) -> bool:
    return any(seam.upstream == path or seam.upstream.startswith(f"{path}.") for seam in SEAMS)


@pytest.mark.parametrize("source", [name for name, tree in SOURCES.items() if any(openrlhf_imports(tree))])
def test_every_name_taken_from_openrlhf_is_listed(source):
    for path, _ in openrlhf_imports(SOURCES[source]):
        assert is_listed(path), f"lmm_r1/{source} takes {path}, which tests/data/openrlhf_names.yaml does not list"


def writes(tree: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    """Yield (object, attribute) of every assignment to an attribute, deletion of one, and call of setattr."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            yield node.value, node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setattr", "delattr"):
            yield node.args[0], ast.unparse(node.args[1])


def root_name(expression: ast.expr) -> str:
    while isinstance(expression, ast.Attribute):
        expression = expression.value
    return expression.id if isinstance(expression, ast.Name) else ast.unparse(expression)


def test_nothing_of_openrlhf_is_replaced():
    found = {}
    for source, tree in SOURCES.items():
        local_names = {name for _, name in openrlhf_imports(tree)}
        for target, attribute in writes(tree):
            if root_name(target) in local_names or "openrlhf" in ast.unparse(target):
                found.setdefault(source, []).append(attribute)
            elif root_name(target).startswith("importlib."):
                found.setdefault(source, []).append(attribute)
    assert found == {"host/strategy.py": ["build_shm_op"]}


@pytest.mark.parametrize(("upstream", "ours"), PATCHES.items())
def test_a_patched_name_of_another_library_is_there(upstream, ours):
    found = resolve(upstream)
    # A kernel is launched as `kernel[grid](...)`, and a constant decides what Ray does.
    assert isinstance(found, bool) or callable(found) or callable(found[1,])
    assert callable(resolve(ours))
