"""What must be quick to import loads none of the training stack; measured in fresh interpreters."""

import ast
import json
import os
import re
import subprocess
import sys
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from lmm_r1.cli import COMMANDS, EXTRA_PACKAGES

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HEAVY = ("ray", "vllm", "deepspeed", "openrlhf", "torch", "transformers")
SHOW_LOADED = f"import json, sys; print(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))"


def heavy_modules_after(statements: str) -> list[str]:
    """Return which of HEAVY a fresh interpreter has loaded after running the statements."""
    done = subprocess.run(
        [sys.executable, "-c", f"{statements}\n{SHOW_LOADED}"], capture_output=True, text=True, timeout=60, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "module", ["lmm_r1", "lmm_r1.agents", "lmm_r1.config", "lmm_r1.data", "lmm_r1.tools.tasks", "remote_rm"]
)
def test_a_light_package_and_all_its_modules_load_none_of_the_training_stack(module):
    walk = (
        f"import importlib, pkgutil, {module} as package\n"
        "for found in pkgutil.walk_packages(package.__path__, package.__name__ + '.'):\n"
        "    importlib.import_module(found.name)\n"
    )
    assert heavy_modules_after(f"import {module}" if module == "lmm_r1" else walk) == []


@pytest.mark.parametrize(
    ("arguments", "commands"),
    [
        (["--help"], [*COMMANDS]),
        (["--zzz"], ["train_ppo_ray", "train_sft", "train_kd", "train_dpo", "train_rm"]),
    ],
    ids=["help", "a refused flag"],
)
def test_help_and_a_refused_flag_of_commands_load_none_of_the_training_stack(arguments, commands):
    run = (
        "import sys\n"
        "from lmm_r1.cli import main\n"
        f"for command in {commands!r}:\n"
        "    try:\n"
        f"        main([command, *{arguments!r}])\n"
        "    except SystemExit as stopped:\n"
        f"        assert stopped.code == {0 if arguments == ['--help'] else 2}, (command, stopped.code)\n"
        f"    assert not [name for name in {HEAVY!r} if name in sys.modules], command\n"
    )
    assert heavy_modules_after(run) == []


ROOT = Path(__file__).resolve().parents[2]
ONLY_SOME = """
import sys


class OnlySome:
    def find_spec(self, name, path=None, target=None):
        package = name.partition(".")[0]
        # Python generates a module whose name begins with _sysconfigdata.
        if package not in {allowed!r} | sys.stdlib_module_names and not package.startswith("_sysconfigdata"):
            raise ModuleNotFoundError(name + " is not declared")


sys.meta_path.insert(0, OnlySome())
"""
USE_REMOTE_RM = """
import importlib, pkgutil, remote_rm
for found in pkgutil.walk_packages(remote_rm.__path__, "remote_rm."):
    # It needs the extra `judge`.
    if found.name != "remote_rm.llm_judge":
        importlib.import_module(found.name)
from remote_rm.registry import get_verifier
from remote_rm.service.app import create_app
from remote_rm.verifier import Item
item = Item(prompt="", response=r"<answer>\\sin^2 x+\\cos^2 x</answer>", label="1")
assert get_verifier("math").score(item).score == 1.0
assert create_app(get_verifier("math"), workers=1, item_timeout_seconds=1.0).openapi()["paths"]
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""


WITHOUT_EXTRAS = """
import json, sys


class WithoutExtras:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {missing!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)


sys.meta_path.insert(0, WithoutExtras())
from lmm_r1 import cli
for arguments in {commands!r}:
    try:
        cli.main(arguments)
        code = 0
    except SystemExit as ended:
        code = ended.code
    print("ended", json.dumps([arguments[0], code]), flush=True)
    print(file=sys.stderr, flush=True)
"""
DATA, MODEL = ("--data.dataset", "rows.jsonl"), ("--model.model_name_or_path", "m")
NEED_AN_EXTRA = [
    ["train_sft", *MODEL, *DATA],
    ["train_ppo_ray", "--actor.model_name_or_path", "m", "--data.prompt_dataset", "rows.jsonl", "--reward", "math"],
    ["plan", "train_sft", *MODEL, *DATA],
    ["evaluate", "--checkpoints", "m", "--files", "rows.jsonl"],
    ["batch_inference", "--model", "m", "--data", "rows.jsonl", "--output", "out.jsonl"],
    ["serve_chat", "--model", "m"],
    ["interactive_chat", "--model", "m"],
    ["serve_rm", "--model", "m"],
    ["check_data", "rows.jsonl"],
    ["make_tiny_model", "--arch", "qwen2_5_vl", "--output", "tiny"],
    ["kits"],
]


def test_a_command_that_lacks_an_extra_says_which_to_install(tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m/config.json").write_text('{"model_type": "qwen2_5_vl", "architectures": ["A"]}')
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n' * 4)
    commands = [*NEED_AN_EXTRA, ["make_task", "digits", "--output", "t", "--rows", "4"]]
    script = WITHOUT_EXTRAS.format(missing=EXTRA_PACKAGES, commands=commands)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    ended = [json.loads(line.removeprefix("ended ")) for line in done.stdout.splitlines() if line.startswith("ended ")]
    assert ended == [[command[0], 0 if command[0] == "make_task" else 1] for command in commands]
    said = done.stderr.split("\n\n")[: len(NEED_AN_EXTRA)]
    for command, lines in zip(NEED_AN_EXTRA, said, strict=True):
        assert re.fullmatch(
            r"lmm-r1: error: this command needs \w+, which an extra installs: pip install 'lmm-r1\[gpu\]', or "
            r"'lmm-r1\[cpu\]' on a machine without GPUs; docs/installation.md shows it for a wheel",
            lines.strip().splitlines()[-1],
        ), (command, lines)


def declared(project: Path) -> list[Requirement]:
    """Return what a pyproject.toml requires without extras."""
    return [Requirement(text) for text in tomllib.loads(project.read_text())["project"]["dependencies"]]


def with_their_own(requirements: list[Requirement]) -> set[str]:
    """Return the names of these distributions and of all that they require here."""
    found, left = set[str](), list(requirements)
    while left:
        name = canonicalize_name(left.pop().name)
        if name not in found:
            found.add(name)
            own = [Requirement(text) for text in requires(name) or ()]
            left += [one for one in own if one.marker is None or one.marker.evaluate({"extra": ""})]
    return found


def test_remote_rm_judges_and_serves_where_only_what_its_own_project_requires_can_be_imported():
    allowed = with_their_own(declared(ROOT / "remote_rm/pyproject.toml"))
    assert "torch" not in allowed
    packages = {
        package
        for package, distributions in packages_distributions().items()
        if allowed & {canonicalize_name(name) for name in distributions}
    }
    script = "import json\n" + ONLY_SOME.format(allowed={"remote_rm", *packages}) + USE_REMOTE_RM
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    loaded = set(json.loads(done.stdout.splitlines()[-1]))
    assert {"remote_rm", "sympy", "fastapi"} <= loaded
    assert not loaded & {*HEAVY, "lmm_r1", "datasets", "numpy", "PIL"}


OPTIONAL = {"fla", "flash_attn", "flash_attn_2_cuda", "liger_kernel", "wandb"}
"""Packages that are used where a user has them; liger-kernel and wandb are of extras, too."""


def imported(tree: ast.Module) -> set[str]:
    """Return the packages that a module imports, except for type checkers."""
    found, left = set[str](), list[ast.AST](tree.body)
    while left:
        node = left.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [str(node.module)]
        found |= {name.partition(".")[0] for name in names}
        left += ast.iter_child_nodes(node)
    return found - sys.stdlib_module_names - {"lmm_r1", "remote_rm"}


def test_every_package_that_is_imported_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = (text for name, some in project["optional-dependencies"].items() if name != "dev" for text in some)
    known = {canonicalize_name(Requirement(text).name) for text in (*project["dependencies"], *extras)}
    files = [*(ROOT / "lmm_r1").rglob("*.py"), *(ROOT / "remote_rm").rglob("*.py")]
    packages = set[str]().union(
        *(imported(ast.parse(file.read_text())) for file in files if "project" not in file.parts)
    )
    assert {"torch", "fastapi", "yaml", "cv2"} <= packages
    providers = packages_distributions()
    assert [
        package
        for package in sorted(packages - OPTIONAL)
        if not known & {canonicalize_name(name) for name in providers.get(package, ())}
    ] == []


def test_remote_rm_requires_what_lmm_r1_requires_of_the_same_packages():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = (*project["dependencies"], *project["optional-dependencies"]["serve"])
    whole = {Requirement(text).name: str(Requirement(text)) for text in texts}
    own = declared(ROOT / "remote_rm/pyproject.toml")
    assert [whole.get(one.name) for one in own] == [str(one) for one in own]
