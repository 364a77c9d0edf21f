"""Check the house against its budgets, the numbers under [tool.house] in pyproject.toml; part of `make check`.

python .ci/budgets.py prints what exceeds its budget and ends with code 1; with --show it prints all figures.
A figure that falls allows a lower budget: whoever removes code lowers the number in the same change.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import tomllib

PRODUCT = ("lmm_r1", "remote_rm")
SMALL = 40
"""A module with fewer lines is small."""


def main() -> None:
    root = Path.cwd()
    house = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["house"]
    figures = measured(root)
    if "--show" in sys.argv:
        for name, figure in figures.items():
            print(f"{name:<40} {figure:>7}  of {budget_of(name, house)}")
    exceeded = [
        f"{name}: {figure}, budget {budget}"
        for name, figure in figures.items()
        if (budget := budget_of(name, house)) is not None and figure > budget
    ]
    exceeded += list(long_functions(root, longest=house["function_lines"]))
    exceeded += list(long_modules(root, longest=house["module_lines"]))
    if exceeded:
        raise SystemExit(
            "over budget; remove something, or raise the number in pyproject.toml:\n" + "\n".join(exceeded)
        )


def budget_of(name: str, house: Mapping[str, object]) -> object:
    """Return a figure's budget; rooms have theirs in a table. None if there is none."""
    room, _, kind = name.partition(" ")
    rooms = house["room_lines"]
    assert isinstance(rooms, Mapping)
    return rooms.get(room) if kind == "lines" else house.get(name)


def measured(root: Path) -> dict[str, int]:
    """Return all figures of the checkout at `root`, by the names of their budgets."""
    product = [path for package in PRODUCT for path in modules(root / package)]
    lines = {path: line_count(path) for path in product}
    text = {path: path.read_text(encoding="utf-8") for path in product}
    pages = (root / "docs").glob("*.md")
    readme = root / "README.md"
    return {
        "modules": len(product),
        "small_modules": sum(count < SMALL for count in lines.values()),
        "product_lines": sum(lines.values()),
        "test_lines": sum(map(line_count, modules(root / "tests"))),
        "benchmark_lines": sum(map(line_count, modules(root / "benchmarks"))),
        "docs_words": sum(map(word_count, [*pages, readme])),
        "readme_words": word_count(readme),
        "readme_lines": line_count(readme),
        "loose_dicts": sum(source.count("dict[str, Any]") for source in text.values()),
        "train_ppo_ray_flags": flag_count(root),
        **{f"{room} lines": count for room, count in room_lines(root, lines).items()},
    }


def modules(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def line_count(path: Path) -> int:
    return path.read_text(encoding="utf-8").count("\n")


def word_count(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").split())


def room_lines(root: Path, lines: Mapping[Path, int]) -> dict[str, int]:
    """Return the lines of every package right below the product's packages."""
    counts: dict[str, int] = {}
    for path, count in lines.items():
        parts = path.relative_to(root).parts
        if len(parts) > 2:
            room = ".".join(parts[:2])
            counts[room] = counts.get(room, 0) + count
    return counts


def flag_count(root: Path) -> int:
    """Return how many flags `train_ppo_ray` has, counted in a process of its own."""
    code = "from lmm_r1 import dotted; from lmm_r1.config import PPOConfig; print(len(dotted.leaf_types(PPOConfig)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    return int(done.stdout)


def long_functions(root: Path, *, longest: int) -> Iterator[str]:
    """Yield a line for every function of the product that is too long, docstring and decorators left out."""
    for package in PRODUCT:
        for path in modules(root / package):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    length = body_lines(node)
                    if length > longest:
                        yield f"{path.relative_to(root)}:{node.lineno}: {node.name} has {length} lines, budget {longest}"


def body_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    end = node.end_lineno
    assert end is not None, "parsed from a file"
    return end - body[0].lineno + 1 if body else 0


def long_modules(root: Path, *, longest: int) -> Iterator[str]:
    for package in PRODUCT:
        for path in modules(root / package):
            if (count := line_count(path)) > longest:
                yield f"{path.relative_to(root)}: {count} lines, budget {longest}"


if __name__ == "__main__":
    main()
