"""The gradients of an optimizer step's passes are added up in fp32, under every ZeRO stage, on one rank and on two."""

from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.accumulated_gradients import (
    LENGTHS,
    AccumulationCase,
    Computed,
    computed_by,
    policy_gradients_of,
    run_accumulation,
    sum_of,
)

CASES = [
    AccumulationCase(stage=stage, param_dtype=precision, offload=offload)
    for precision, offload in (("bf16", False), ("bf16", True), ("fp16", False))
    for stage in (1, 2, 3)
]
CASES += [AccumulationCase(stage=stage, param_dtype="bf16", accum_dtype="bf16") for stage in (1, 2, 3)]
CASES += [AccumulationCase(stage=stage, param_dtype="bf16", zero_first=True) for stage in (1, 2, 3)]
RANKS = (1, 2)
OURS = AccumulationCase(stage=1, param_dtype="bf16")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("accumulation")


@pytest.fixture(scope="module")
def computed(request: pytest.FixtureRequest, folder: Path) -> Callable[[int, AccumulationCase], Computed]:
    """A function from a number of ranks and a case to what its steps computed; all that are asked for are made at once."""
    names = {item.name for item in request.session.items if item.path == request.path}
    cases = {
        ranks: [case for case in CASES if any(name.endswith(f"[{case}-{ranks}]") for name in names)] for ranks in RANKS
    }
    if test_policy_losses_are_those_of_the_whole_step_on_two_ranks.__name__ in names:
        for made in cases.values():
            made += [] if made else [OURS]
    asked = {ranks: made for ranks, made in cases.items() if made}
    started = [run_accumulation(made, folder / str(ranks), ranks=ranks) for ranks, made in asked.items()]
    for processes in started:
        processes.wait(seconds=300)
    results = {ranks: dict(zip(made, computed_by(folder / str(ranks)), strict=True)) for ranks, made in asked.items()}
    return lambda ranks, case: results[ranks][case]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_small_computed_by_many_passes_count(case, ranks, computed):
    # 1/16 and then 8 times 2 ** -9 of it: in bf16, whose numbers from 1 on are 2 ** -7 apart, each of them vanishes.
    kept = case.accum_dtype is None
    expected = sum_of(case, ranks=ranks, kept=kept)
    if case.param_dtype == "bf16":
        assert expected == (1.015625 if kept else 1.0) / 16 * (ranks + 1) / 2
    made = computed(ranks, case)
    if case.param_dtype == "bf16" and case.stage == 1:
        # Upstream's optimizer at ZeRO-1 with bf16 is another.
        assert made.optimizer == "DeepSpeedZeroOptimizer"
    steps = made.gradients
    if case.zero_first:
        # Where all rewards of a group are equal, for example; ZeRO-1's other optimizer ends there.
        assert steps.pop(0) == [0.0, 0.0]
    assert steps == [pytest.approx([expected, expected], rel=1e-5)] * 2


def test_policy_losses_are_those_of_the_whole_step_on_two_ranks(computed, folder):
    alone, shared = (policy_gradients_of(folder / str(ranks)) for ranks in RANKS)
    assert len(alone) == 15
    for name, values in alone.items():
        assert any(values[1:]), name
        # All but the gradients of the tokens that the loss is not about.
        assert sum(value != 0 for value in values[1:]) <= sum(LENGTHS)
        assert shared[name][0] == pytest.approx(values[0], rel=1e-6), f"{name}: losses are logged in single precision"
        assert shared[name][1:] == pytest.approx(values[1:], rel=1e-9, abs=1e-12), name
