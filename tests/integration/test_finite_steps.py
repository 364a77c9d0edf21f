"""A loss or a gradient that is no number, on one rank: no rank makes the step, all say so, and no weight is changed.

What follows the weights of good steps is seen in the same processes: a moving average, and a reference.
"""

import json
from collections.abc import Callable

import pytest
from helpers.finite_ranks import CASES, FOLLOWED, Outcome
from helpers.launched_ranks import launch

NAMES = [(ranks, *case) for ranks, cases in CASES.items() for case in cases]
SAID = {
    "nan advantage": "the actor's loss is nan",
    "inf loss": "the actor's loss is inf",
    "nan gradient": "the actor's gradients are not finite",
    "large gradient": "the actor's gradients are not finite, or too large",
}


def _id(name: tuple[object, ...]) -> str:
    return "-".join(map(str, name))


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[Outcome]]:
    """A function from a case to what became of it on each rank; all that are asked for are made at once."""
    folder = tmp_path_factory.mktemp("finite")
    names = [item.name for item in request.session.items if item.path == request.path]
    asked = {
        ranks: [case for case in cases if any(name.endswith(f"[{_id((ranks, *case))}]") for name in names)]
        for ranks, cases in CASES.items()
    }
    launched = []
    for ranks, cases in asked.items():
        if cases:
            own = folder / str(ranks)
            own.mkdir()
            (own / "cases.json").write_text(json.dumps(cases))
            launched.append(launch("helpers.finite_ranks", str(own), count=ranks, folder=own / "logs"))
    for processes in launched:
        processes.wait(seconds=240)

    def read(ranks: int, *case: object) -> list[Outcome]:
        index = asked[ranks].index(case)
        return [json.loads((folder / f"{ranks}" / f"rank{rank}.json").read_text())[index] for rank in range(ranks)]

    return read


@pytest.mark.parametrize(
    ("ranks", "stage", "dtype", "planted"),
    [pytest.param(*name, id=_id(name)) for name in NAMES if not {"fp16", FOLLOWED} & set(name)],
)
def test_a_step_that_is_not_finite_is_not_made(ranks, stage, dtype, planted, outcomes):
    for rank in outcomes(ranks, stage, dtype, planted):
        if planted == "nothing":
            assert (rank["error"], rank["same"]) == (None, False)
        else:
            assert rank["error"].startswith(SAID[planted])
            assert rank["same"], "no weight is changed, bit by bit"


@pytest.mark.parametrize(
    ("ranks", "stage", "dtype", "planted"), [pytest.param(*name, id=_id(name)) for name in NAMES if "fp16" in name]
)
def test_with_fp16_an_overflow_of_gradients_lowers_the_loss_scale(ranks, stage, dtype, planted, outcomes):
    for rank in outcomes(ranks, stage, dtype, planted):
        if planted == "nan advantage":
            assert rank["error"].startswith(SAID[planted])
            assert rank["same"]
        else:
            assert rank["error"] is None
            assert rank["same"] == (planted != "nothing")
            assert rank["loss_scale"] == (16 if planted == "nothing" else 8)
            # It is no update that was made, and the metrics say so.
            assert rank["skipped_updates"] == (planted != "nothing")


@pytest.mark.parametrize(
    ("ranks", "stage", "dtype", "planted"), [pytest.param(*name, id=_id(name)) for name in NAMES if FOLLOWED in name]
)
def test_an_average_and_a_reference_are_those_of_whole_weights_and_the_model_goes_on(
    ranks, stage, dtype, planted, outcomes
):
    for rank in outcomes(ranks, stage, dtype, planted):
        assert {name for name, right in rank.items() if not right} == set()
        assert rank.keys() == {"moved", "averaged", "saved", "put back", "goes on"}
