"""Moving averages of weights and references that follow the policy, on two ranks: the numbers of whole weights."""

import json
from pathlib import Path

import pytest
from helpers.launched_ranks import launch
from helpers.moving_weights import CASES, RANKS

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, bool]]]:
    """What became of all cases on each rank."""
    folder = tmp_path_factory.mktemp("moving")
    launch("helpers.moving_weights", str(folder), count=RANKS, folder=folder / "logs").wait(seconds=240)
    return [json.loads(Path(folder / f"rank{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize(("stage", "dtype"), CASES)
def test_the_average_is_that_of_whole_master_weights_and_the_model_is_put_back(stage, dtype, outcomes):
    for rank in outcomes:
        found = rank[f"{stage}-{dtype}"]
        assert {name for name, right in found.items() if not right} == set()
        assert found.keys() == {"moved", "averaged", "saved", "put back", "referred", "goes on"}
