"""A class name means one class in the whole package."""

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
NOT_YET_RENAMED = {
    "Checkpoint",
    "ConvertConfig",
    "Generation",
    "Grid",
    "Phi3VForCausalLM",
    "Phi3VImageEmbedding",
    "Plan",
    "_Lines",
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
