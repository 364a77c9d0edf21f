"""Check the house against its budgets, the numbers under [tool.house] in pyproject.toml; part of `make check`.

python .ci/budgets.py prints what exceeds its budget and ends with code 1; --show prints all figures. A budget never rises:
it may not exceed the lowest value it has had since the commit RATCHET, and --lower writes smaller figures as new budgets.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

RATCHET = "ec66a42851f2"
SETTINGS = "pyproject.toml"

PRODUCT = ("lmm_r1", "remote_rm")
SMALL = 40
"""A module with fewer lines is small."""


def main() -> None:
    root = Path.cwd()
    settings = root / SETTINGS
    figures = measured(root)
    if "--lower" in sys.argv:
        settings.write_text(lowered(settings.read_text(encoding="utf-8"), figures), encoding="utf-8")
    house = house_of(settings.read_text(encoding="utf-8"))
    if "--show" in sys.argv:
        for name, figure in figures.items():
            print(f"{name:<40} {figure:>7}  of {budget_of(name, house)}")
    wrong = []
    for name, figure in figures.items():
        budget = budget_of(name, house)
        if budget is not None and figure > budget:
            wrong.append(f"{name}: {figure}, budget {budget}; remove something")
        elif budget is not None and figure < budget:
            wrong.append(f"{name}: {figure}, budget {budget}; lower it: make format")
    wrong += list(raised(root, figures, house))
    wrong += list(long_functions(root, longest=house["function_lines"]))
    wrong += list(long_modules(root, longest=house["module_lines"]))
    if wrong:
        raise SystemExit("\n".join(wrong))


def house_of(settings: str) -> dict[str, Any]:
    """Return the budgets in the text of a pyproject.toml."""
    return tomllib.loads(settings)["tool"]["house"]


def lowered(settings: str, figures: Mapping[str, int]) -> str:
    """Return the text of a pyproject.toml in which every budget above its figure is the figure."""
    before, table, rest = settings.partition("[tool.house]")
    for name, figure in figures.items():
        key = re.escape(f'"{name.removesuffix(" lines")}"' if name.endswith(" lines") else name)
        rest = re.sub(
            rf"(?m)^({key} = )(\d+)", lambda found, most=figure: f"{found[1]}{min(int(found[2]), most)}", rest
        )
    return before + table + rest


def raised(root: Path, figures: Iterable[str], house: Mapping[str, object], *, since: str = RATCHET) -> Iterator[str]:
    """Yield a line for every budget above the lowest since a commit; none if the history does not reach back to it."""
    if git(root, "cat-file", "-e", since).returncode:
        return
    history = git(root, "log", "--format=%h", f"{since}..HEAD", "--", SETTINGS).stdout.split()
    for commit in history:
        then = house_of(git(root, "show", f"{commit}:{SETTINGS}").stdout)
        for name in figures:
            budget, lower = budget_of(name, house), budget_of(name, then)
            if lower is not None and (budget is None or budget > lower):
                yield f"{name}: the budget {budget} is above {lower}, that of {commit}; budgets only fall"


def git(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)


def budget_of(name: str, house: Mapping[str, Any]) -> int | None:
    """Return a figure's budget; rooms have theirs in a table. None if there is none."""
    room, _, kind = name.partition(" ")
    return house["room_lines"].get(room) if kind == "lines" else house.get(name)


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
        "closure_of_rl_step": closure_lines(root, "lmm_r1.rl.step"),
        "closure_of_rl_run": closure_lines(root, "lmm_r1.rl.run"),
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


def closure_lines(root: Path, module: str) -> int:
    """Return the lines of a module and of all product modules that its import loads, packages included."""
    paths = {}
    for path in (path for package in PRODUCT for path in modules(root / package)):
        parts = path.relative_to(root).with_suffix("").parts
        paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    found: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name in paths and name not in found:
            found.add(name)
            tree = ast.parse(paths[name].read_text(encoding="utf-8"))
            waiting += [name.rpartition(".")[0], *imported_names(tree.body)]
    return sum(line_count(paths[name]) for name in found)


def imported_names(body: Iterable[ast.stmt]) -> Iterator[str]:
    """Yield what the import of a module imports: neither imports in functions nor those for type checkers."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None, "the product has no relative imports"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from imported_names(node.orelse)
        elif isinstance(node, ast.If | ast.Try | ast.With | ast.ClassDef):
            inner = [getattr(node, part, []) for part in ("body", "orelse", "finalbody")]
            inner += [handler.body for handler in getattr(node, "handlers", [])]
            yield from (name for part in inner for name in imported_names(part))


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
