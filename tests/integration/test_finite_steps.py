"""A loss or a gradient that is no number, on one rank of two: no rank makes the step, all say so, and no weight is changed.

What follows the weights of good steps is seen in the same processes: a moving average, and a reference.
"""

import json
from collections.abc import Callable

import pytest
from helpers.finite_ranks import CASES, FOLLOWED, Outcome
from helpers.launched_ranks import launch

RANKS = 2
SAID = {
    "nan advantage": "the actor's loss is nan",
    "inf loss": "the actor's loss is inf",
    "nan gradient": "the actor's gradients are not finite",
    "large gradient": "the actor's gradients are not finite, or too large",
}


def _id(case: tuple[object, ...]) -> str:
    return "-".join(map(str, case))


def cases(wanted: Callable[[tuple[int, str, str]], bool]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", [case for case in CASES if wanted(case)], ids=_id)


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[Outcome]]:
    """A function from a case to what became of it on each rank; all that are asked for are made at once."""
    folder = tmp_path_factory.mktemp("finite")
    names = [item.name for item in request.session.items if item.path == request.path]
    asked = [case for case in CASES if any(name.endswith(f"[{_id(case)}]") for name in names)]
    (folder / "cases.json").write_text(json.dumps(asked))
    launch("helpers.finite_ranks", str(folder), count=RANKS, folder=folder / "logs").wait(seconds=240)
    found = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(RANKS)]
    return lambda case: [rank[asked.index(case)] for rank in found]


@cases(lambda case: not {"fp16", FOLLOWED} & set(case))
def test_a_step_that_is_not_finite_is_not_made(case, outcomes):
    for rank in outcomes(case):
        if "nothing" in case:
            assert (rank["error"], rank["same"]) == (None, False)
        else:
            assert rank["error"].startswith(SAID[case[2]])
            assert rank["same"], "no weight is changed, bit by bit"


@cases(lambda case: "fp16" in case)
def test_with_fp16_an_overflow_of_gradients_lowers_the_loss_scale(case, outcomes):
    planted = case[2]
    for rank in outcomes(case):
        if planted == "nan advantage":
            assert rank["error"].startswith(SAID[planted])
            assert rank["same"]
        else:
            assert rank["error"] is None
            assert rank["same"] == (planted != "nothing")
            assert rank["loss_scale"] == (16 if planted == "nothing" else 8)
            # It is no update that was made, and the metrics say so.
            assert rank["skipped_updates"] == (planted != "nothing")


@cases(lambda case: FOLLOWED in case)
def test_an_average_and_a_reference_are_those_of_whole_weights_and_the_model_goes_on(case, outcomes):
    for rank in outcomes(case):
        assert {name for name, right in rank.items() if not right} == set()
        assert rank.keys() == {"moved", "averaged", "saved", "put back", "goes on"}
