"""The gradients of an optimizer step's passes are added up in fp32, under every ZeRO stage, on one rank and on two."""

from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.accumulated_gradients import AccumulationCase, gradients_of, run_accumulation, sum_of

pytestmark = pytest.mark.integration

CASES = [
    AccumulationCase(stage=stage, param_dtype=precision, offload=offload)
    for precision in ("bf16", "fp16")
    for stage in (1, 2, 3)
    for offload in (False, True)
]
CASES += [AccumulationCase(stage=stage, param_dtype="fp32") for stage in (1, 2, 3)]
CASES += [AccumulationCase(stage=stage, param_dtype="bf16", accum_dtype="bf16") for stage in (1, 2, 3)]
CASES += [AccumulationCase(stage=stage, param_dtype="bf16", zero_first=True) for stage in (1, 2, 3)]
RANKS = (1, 2)


@pytest.fixture(scope="module")
def computed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, AccumulationCase], list[list[float]]]:
    """A function from a number of ranks and a case to the gradients of its steps, which are all made at once."""
    folder: Path = tmp_path_factory.mktemp("accumulation")
    started = [run_accumulation(CASES, folder / str(ranks), ranks=ranks) for ranks in RANKS]
    for processes in started:
        processes.wait(seconds=300)
    gradients = {ranks: gradients_of(folder / str(ranks)) for ranks in RANKS}
    return lambda ranks, case: gradients[ranks][CASES.index(case)]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_small_gradients_of_many_passes_count(case, ranks, computed):
    # 1/16 and then 8 times 2 ** -9 of it: in bf16, whose numbers from 1 on are 2 ** -7 apart, each of them vanishes.
    kept = case.accum_dtype is None
    expected = sum_of(case, ranks=ranks, kept=kept)
    if case.param_dtype == "bf16":
        assert expected == (1.015625 if kept else 1.0) / 16 * (ranks + 1) / 2
    steps = computed(ranks, case)
    if case.zero_first:
        # Where all rewards of a group are equal, for example; ZeRO-1's other optimizer ends there.
        assert steps.pop(0) == [0.0, 0.0]
    assert steps == [pytest.approx([expected, expected], rel=1e-5)] * 2
