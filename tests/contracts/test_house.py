"""The house's rules on names: one class of each name, and architectures named in their kits only."""

import ast
import re
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

import pytest
import tomllib

import lmm_r1
from lmm_r1.lmm_kits import KITS, get_kit

ROOT = Path(__file__).resolve().parents[2]
SVG = "{http://www.w3.org/2000/svg}"


NOT_YET_RENAMED = {
    "Checkpoint",
    "Generation",
    "Phi3VForCausalLM",
    "Plan",
}
"""Names that still have several classes. Remove a name when its classes are renamed; never add one."""


def classes() -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for package in ("lmm_r1", "remote_rm"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef):
                    found[node.name].append(str(path.relative_to(ROOT)))
    return found


def test_a_class_name_means_one_class():
    shared = {name: paths for name, paths in classes().items() if len(paths) > 1}
    assert {name: paths for name, paths in shared.items() if name not in NOT_YET_RENAMED} == {}
    assert NOT_YET_RENAMED - shared.keys() == set(), "these names are unique now: remove them from the list"


PACKAGE = Path(lmm_r1.__file__).parent
# Short names are looked for as words: "variables" holds one of them, and "graphics" another.
AS_WORDS = ("phi", "aria")
KIT_NAMES = set(KITS) - {"llm", *AS_WORDS}
ANYWHERE = ("qwen", "gemma", "llama", "janus", "internvl", *KIT_NAMES)
NAMES = re.compile(
    "|".join([*map(re.escape, ANYWHERE), *(f"(?<![a-z]){name}(?![a-z])" for name in AS_WORDS)]), re.IGNORECASE
)
# A project, whose name has that of an architecture in it.
PROJECT = re.compile(r"llama[-_]?factory", re.IGNORECASE)
MODULES = [path for path in PACKAGE.rglob("*.py") if PACKAGE / "lmm_kits" not in path.parents]


def test_no_module_outside_the_kits_names_an_architecture():
    named = [
        f"lmm_r1/{path.relative_to(PACKAGE)}:{number}: {line.strip()}"
        for path in MODULES
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if NAMES.search(PROJECT.sub("", line))
    ]
    assert named == []


@pytest.mark.parametrize("name", KITS)
def test_every_kit_lies_among_the_kits_under_the_name_of_its_checkpoints(name):
    assert KITS[name].startswith("lmm_r1.lmm_kits.")
    assert get_kit(name).model_type == name


def test_the_picture_of_the_architecture_shows_the_layers_of_the_import_contracts():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = {contract["name"]: contract["layers"] for contract in contracts if contract["type"] == "layers"}
    shown = {}
    for group in ElementTree.parse(ROOT / "docs/architecture.svg").getroot().iter(f"{SVG}g"):
        if "id" in group.attrib:
            shown[group.attrib["id"]] = [
                " | ".join(str(text.text) for text in layer.iter(f"{SVG}text"))
                for layer in group.iter(f"{SVG}g")
                if layer is not group
            ]
    place = layers["rooms"].index("tools")
    assert shown == {"entries": layers["rooms"][:place], "core": layers["rooms"][place + 1 :], "ring": layers["tools"]}
