"""Every script of benchmarks/ shows its help, at once: what it measures with is loaded behind its flags."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SCRIPTS = sorted(file.name for file in BENCHMARKS.glob("*.py") if "__main__" in file.read_text(encoding="utf-8"))
HEAVY = ("ray", "vllm", "deepspeed", "openrlhf", "torch", "transformers")
# Of all scripts one after the other, as Python runs a file, and in a process of their own, for they stand beside one another.
SHOW_HELP = """
import contextlib, io, json, runpy, sys, traceback

folder, heavy, *names = sys.argv[1:]
sys.path[0] = folder
pages = {}
for name in names:
    sys.argv = [name, "--help"]
    page, code = io.StringIO(), None
    try:
        with contextlib.redirect_stdout(page):
            runpy.run_path(f"{folder}/{name}", run_name="__main__")
    except SystemExit as ended:
        code = ended.code
    except Exception:
        code = traceback.format_exc()
    pages[name] = code, page.getvalue(), [module for module in heavy.split() if module in sys.modules]
print(json.dumps(pages))
"""


@pytest.fixture(scope="module")
def pages() -> dict[str, tuple[int | str | None, str, list[str]]]:
    """By script: the status or how it failed, the page, and what is loaded by then of what takes long to load."""
    command = [sys.executable, "-c", SHOW_HELP, str(BENCHMARKS), " ".join(HEAVY), *SCRIPTS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, cwd=BENCHMARKS.parent)
    return json.loads(done.stdout)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_benchmark_says_what_it_measures_and_how_it_is_started(script, pages):
    code, page, loaded = pages[script]
    assert code == 0
    assert page.startswith(f"usage: {script} ")
    assert f"\npython benchmarks/{script}" in page
    assert loaded == []
