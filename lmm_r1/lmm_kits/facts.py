"""What a kit says of itself in a table, read from the source of its class: to import a kit loads transformers, for seconds."""

from __future__ import annotations

import ast
import functools
import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Any

from lmm_r1.lmm_kits.kit import LmmKit
from lmm_r1.lmm_kits.registry import KITS

_ROOT = Path(__file__).resolve().parent
_PACKAGE = __name__.rpartition(".")[0]


@dataclass(frozen=True, kw_only=True)
class KitFacts:
    """Attributes of `LmmKit`, by their names there; a kit's class states them as plain values."""

    model_type: str
    checkpoints: str
    takes_images: bool
    takes_videos: bool
    engine_refusal: str | None
    engine_disagreement: str | None


_NAMES = tuple(fact.name for fact in fields(KitFacts))


def read_facts(name: str) -> KitFacts:
    """Return the facts of the kit called `name` in the registry, without importing it."""
    module = _parsed(KITS[name])
    (kit,) = (node for node in module.body if isinstance(node, ast.Assign) and _target(node) == "KIT")
    assert isinstance(kit.value, ast.Call), f"{name}: KIT = NameOfTheKit()"
    assert isinstance(kit.value.func, ast.Name), f"{name}: KIT = NameOfTheKit()"
    stated: dict[str, Any] = {}
    for body in _bodies(module, kit.value.func.id):
        for node in body:
            if isinstance(node, ast.Assign) and (fact := _target(node)) in _NAMES:
                stated.setdefault(fact, ast.literal_eval(node.value))
    # Of those that no class states, the base has a default.
    return KitFacts(**{fact: stated[fact] if fact in stated else getattr(LmmKit, fact) for fact in _NAMES})


def _bodies(module: ast.Module, class_name: str) -> Iterator[list[ast.stmt]]:
    """Yield what stands in a class, then in the class that it builds on, and so on, up to `LmmKit`."""
    while class_name != LmmKit.__name__:
        found = [node for node in module.body if isinstance(node, ast.ClassDef) and node.name == class_name]
        if not found:
            module = _parsed(_origin(module, class_name))
            continue
        yield found[0].body
        (base,) = found[0].bases
        assert isinstance(base, ast.Name), f"{class_name} builds on a class by its name"
        class_name = base.id


def _origin(module: ast.Module, name: str) -> str:
    imports = [node for node in module.body if isinstance(node, ast.ImportFrom)]
    (origin,) = (node.module for node in imports if any(alias.name == name for alias in node.names))
    assert origin is not None, "kits are imported by their whole names"
    return origin


def _parsed(module: str) -> ast.Module:
    place = _ROOT.joinpath(*module.removeprefix(f"{_PACKAGE}.").split("."))
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8"))


def _target(node: ast.Assign) -> str:
    return node.targets[0].id if isinstance(node.targets[0], ast.Name) else ""


FILE = "released.json"


@functools.cache
def released_configs() -> Mapping[str, Mapping[str, Any]]:
    """Return by name what a checkpoint's config.json says of its size (`config`), and how many `parameters` it has."""
    return json.loads((resources.files("lmm_r1.lmm_kits") / FILE).read_text(encoding="utf-8"))


@functools.cache
def released_folder(name: str) -> Path:
    """Return a folder with the config of a released checkpoint, enough to plan with; it is deleted when the process ends."""
    folder = Path(_folders().name) / name
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(released_configs()[name]["config"]), encoding="utf-8")
    return folder


@functools.cache
def _folders() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="released_")
