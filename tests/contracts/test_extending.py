"""The examples of docs/extending.md work: those for the project in a copy of it, with its own tests, and a user's as files."""

import ast
import json
import math
import os
import re
import runpy
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from helpers.commands import flags, write_rows
from helpers.commands_here import start_anew

from lmm_r1.rl.advantages import RewardedPass, RewardedRollout, estimator_named
from lmm_r1.rl.losses import LossSettings, PolicyPass, loss_named

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
# The first line of an example: its file and, if it extends one, where.
HEADER = re.compile(r"# (?P<file>[\w/.]+\.py)(?:, (?P<how>in|before) (?P<name>\w+))?(?::.*)?")
# The project's own tests that run for an example, or over all names at once.
TESTS = {
    "contains": "tests/contracts/test_verifiers.py",
    "test_registry": "tests/unit/remote_rm/test_registry.py",
    "hotter": "tests/contracts/test_environments.py",
    "qwen2_vl": "tests/contracts/test_kits.py",
}


def examples(page: str) -> list[tuple[re.Match[str], str]]:
    """The blocks of Python of a page whose first line names a file, as that line and the code."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^ *```python\n(.*?)^ *```$", text, re.DOTALL | re.MULTILINE)
    codes = map(textwrap.dedent, blocks)
    return [(header, code) for code in codes if (header := HEADER.fullmatch(code.partition("\n")[0]))]


PAGES = ("environments.md", "tools.md", "extending.md")
USERS = {header["file"]: code for page in PAGES for header, code in examples(page) if not header["how"]}
ADDED = [(header, code.partition("\n")[2]) for header, code in examples("extending.md") if header["how"]]


def extend(file: Path, code: str, *, how: str, name: str) -> None:
    """Add code in front of the assignment to a name, or at the end of what is in its brackets."""
    text = file.read_text(encoding="utf-8")
    lines = text.splitlines(keepends=True)
    (assigned,) = (
        node
        for node in ast.parse(text).body
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and ast.unparse(node).startswith((f"{name} =", f"{name}:"))
    )
    if how == "before":
        place = sum(map(len, lines[: assigned.lineno - 1]))
        file.write_text(f"{text[:place]}{code}\n\n{text[place:]}", encoding="utf-8")
        return
    last = lines[assigned.end_lineno - 1].encode()[: assigned.end_col_offset - 1].decode()
    place = sum(map(len, lines[: assigned.end_lineno - 1])) + len(last)
    before = text[:place].rstrip()
    comma = "" if before.endswith(",") else ","
    file.write_text(f"{before}{comma}\n{code}{text[place:]}", encoding="utf-8")


def without_its_kit(project: Path) -> None:
    """Remove Qwen2-VL from the registry and the tables of tests, to which the page adds it."""
    for header, code in ADDED:
        if "qwen2_vl" in code:
            file = project / header["file"]
            lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
            kept = [line for line in lines if not line.startswith('    "qwen2_vl": ')]
            assert len(kept) == len(lines) - 1
            file.write_text("".join(kept), encoding="utf-8")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project, extended as the pages say."""
    folder = tmp_path_factory.mktemp("project")
    for package in ("lmm_r1", "remote_rm", "tests"):
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    without_its_kit(folder)
    places = {
        "contains_verifier.py": "remote_rm/contains_verifier.py",
        "hotter.py": "lmm_r1/agents/hotter.py",
        "lmm_r1/lmm_kits/qwen2_vl.py": "lmm_r1/lmm_kits/qwen2_vl.py",
    }
    for name, place in places.items():
        (folder / place).parent.mkdir(exist_ok=True)
        (folder / place).write_text(USERS[name], encoding="utf-8")
    for header, code in ADDED:
        extend(folder / header["file"], code, how=header["how"], name=header["name"])
    return folder


@pytest.mark.parametrize(
    "names", [("hotter",), ("contains", "test_registry"), ("qwen2_vl",)], ids=["environment", "verifier", "kit"]
)
def test_the_project_extended_as_the_page_says_passes_its_own_tests(project, names):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rA", "--no-header", "--tb=short"]
    environment = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
    # Hypothesis first makes a table of characters, and reads constants of all loaded modules: on a busy machine it then
    # calls a test's texts slow. So the table is made here, and the verifier's tests load nothing else.
    tables = project / ".hypothesis"
    environment |= {"PYTHONPATH": str(project), "HYPOTHESIS_STORAGE_DIRECTORY": str(tables)}
    warm = "from hypothesis import find, strategies; find(strategies.text(min_size=1), bool)"
    subprocess.run([sys.executable, "-c", warm], cwd=project, env=environment, check=True)
    done = subprocess.run(
        [*command, f"--basetemp={project}/tmp", "-k", " or ".join(names), *sorted({TESTS[name] for name in names})],
        cwd=project,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2_000:]
    passed = re.findall(r"^PASSED (\S+)", done.stdout, re.MULTILINE)
    for name in names:
        assert any(test.startswith(f"{TESTS[name]}::") and name in test for test in passed), (name, passed)


def test_the_trainer_takes_two_steps(tiny_checkpoint, tmp_path, own_environment, monkeypatch):
    rows = [
        {"messages": [{"role": "user", "content": f"Say {n}."}, {"role": "assistant", "content": n}]} for n in "1234"
    ]
    write_rows(tmp_path, *rows)
    for name in ("focal_run.py", "train_focal.py"):
        (tmp_path / name).write_text(USERS[name], encoding="utf-8")
    settings = {
        "model.model_name_or_path": tiny_checkpoint("llm"),
        "data.dataset": tmp_path / "rows.jsonl",
        "data.max_len": 128,
        "train.batch_size": 2,
        "train.micro_batch_size": 1,
        "train.max_epochs": 1,
        "ds.param_dtype": "fp32",
        "ckpt.output_dir": tmp_path / "run",
    }
    start_anew(monkeypatch)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train_focal.py", *flags(settings)])
    runpy.run_path(str(tmp_path / "train_focal.py"))["main"]()
    steps = list(map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()))
    assert [step["step"] for step in steps] == [1, 2]
    # A focal loss weighs -log p by 1 - p.
    assert all(0 < step["loss"] < step["nll_loss"] for step in steps)


def test_the_verifier_is_a_reward_of_its_own_file(tmp_path, monkeypatch):
    (tmp_path / "contains_verifier.py").write_text(USERS["contains_verifier.py"], encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    reward_func = runpy.run_path(str(tmp_path / "contains_verifier.py"))["reward_func"]
    queries = ["q<think>so</think><answer>the Cat</answer>", "q<think>so</think><answer>a dog</answer>"]
    reply = reward_func(queries, ["q", "q"], ["cat", "cat"])
    assert (reply["rewards"], reply["scores"]) == ([1.5, 0.5], [1.0, 0.0])


def test_the_estimator_and_the_loss_have_their_values_by_hand(tmp_path):
    for name in ("group_range.py", "weighted_loss.py"):
        (tmp_path / name).write_text(USERS[name], encoding="utf-8")
    mask = torch.tensor([[1, 0], [1, 1], [0, 1]])
    part = RewardedPass(places=(0, 1, 2), mask=mask, kl=torch.zeros(3, 2))
    rewards = torch.tensor([[1.0, 0.0, 0.5]], dtype=torch.double)
    rollout = RewardedRollout(rewards=rewards, passes=[part], kl_coef=0.0, gamma=1.0, lambd=1.0, divide=False)
    # Minus the mean of 0.5, divided by the range of 1 and the least of 1.
    (advantages,) = estimator_named(f"{tmp_path}/group_range.py?least=1")(rollout).advantages
    assert (advantages * mask).tolist() == [[0.25, 0.0], [-0.25, -0.25], [0.0, 0.0]]
    old = torch.tensor([[math.log(0.1), math.log(0.3), 0.0]])
    given = {"old_log_probs": old, "advantages": torch.tensor([[2.0, 2.0, 2.0]])}
    passed = PolicyPass(log_probs=torch.full((1, 3), math.log(0.6)), mask=torch.tensor([[1, 1, 0]]), **given)
    loss, costly = loss_named(f"{tmp_path}/weighted_loss.py:policy_loss?most=3")
    losses = loss(passed, LossSettings()).losses
    # The first ratio of 6 counts as 3, the second is 2.
    assert losses.tolist() == [pytest.approx([-6 * math.log(0.6), -4 * math.log(0.6), 0.0])]
    assert costly == frozenset()
