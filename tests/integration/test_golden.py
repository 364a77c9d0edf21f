"""The golden record of rows is as the code has it."""

import subprocess
from pathlib import Path

import pytest
from helpers.processes import warm_python

pytestmark = pytest.mark.slow


def test_rows_are_as_recorded():
    golden = Path(__file__).resolve().parents[2] / "benchmarks" / "golden.py"
    command = [warm_python(), str(golden), "compare", "rows"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert ended.stdout.splitlines()[-1] == "0 differences"
