"""What the gate runs of the tests marked full."""

import runpy
from pathlib import Path

import pytest

asked_for = runpy.run_path(str(Path(__file__).parents[2] / ".ci/full_tests.py"))["asked_for"]


@pytest.mark.parametrize(
    ("changed", "tests"),
    [
        (["README.md", "lmm_r1/cpu.py", "tests/helpers/runs.py", "tests/data/answers.jsonl"], []),
        (["lmm_r1/rl/step.py", "lmm_r1/rl/losses.py", "remote_rm/answers/units.py"], ["tests/unit/remote_rm", "tests/unit/rl"]),
        (["lmm_r1/models/actor.py", "tests/contracts/test_kits.py"], ["tests/contracts/test_kit_packing.py", "tests/contracts/test_kits.py", "tests/unit/models"]),
        (["tests/integration/test_kd.py", "tests/unit/rl/test_advantages.py", "lmm_r1/rl/step.py"], ["tests/integration/test_kd.py", "tests/unit/rl"]),
    ],
)  # fmt: skip
def test_rooms_and_test_files_that_changed_each_once(changed, tests):
    assert asked_for(changed) == tests
