"""Updates of runs on judged responses on two ranks are those of one process that runs each conversation padded, by itself."""

from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.dpo_steps import KIT, RANKS, STEPS, Case, Updates, by_hand
from helpers.kd_steps import build_teacher
from helpers.launched_ranks import launch_cases, results_of
from helpers.tables import table
from helpers.value_models import save_reward_model

from lmm_r1.lmm_kits import get_kit

APART = {"train.shared_prefix_enable": False}
RSLORA = {"ds.lora.use_rslora": True}
IN_4BIT = {"ds.load_in_4bit": True}
CASES = table("integration/dpo_steps", "cases")
# Sums of up to some thousand terms in fp32, in some ten layers after one another.
SINGLE = 1e-5


@pytest.fixture(scope="module")
def updates_of(
    request: pytest.FixtureRequest, tiny_checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Updates, Updates]]:
    """A function from a case to its updates by hand and on two ranks, which make those of all cases that are asked for."""
    folder = tmp_path_factory.mktemp("dpo") / "ranks"
    scored = save_reward_model(tiny_checkpoint(KIT), folder.with_name("scored"))
    teacher = folder.with_name("teacher")
    build_teacher(get_kit(KIT), teacher)
    asked = [name for name in CASES if any(item.name.endswith(f"[{name}]") for item in request.session.items)]
    cases = {}
    for name in asked:
        kind = next((kind for kind in ("rewards", "distilled") if name.startswith(kind)), "pairs")
        cases[name] = Case(
            folder=scored if kind == "rewards" else tiny_checkpoint(KIT),
            flags=CASES[name],
            lora="adapters" in name,
            kind=kind,
            teacher=teacher if kind == "distilled" else None,
        )
    ranks = launch_cases("helpers.dpo_steps", list(cases.values()), folder, count=RANKS)
    kinds = {_kind(case): _alone(case) for case in cases.values()}
    alone = {kind: by_hand(case) for kind, case in kinds.items()}
    together = dict(zip(cases, results_of(ranks, folder), strict=True))
    return lambda name: (alone[_kind(cases[name])], together[name])


def _alone(case: Case) -> Case:
    """What one process does by hand, which is the same for many settings of ranks."""
    flags = {name: value for name, value in case.flags.items() if name in {*RSLORA, *IN_4BIT}}
    return Case(folder=case.folder, kind=case.kind, lora=case.lora, teacher=case.teacher, flags=flags)


def _kind(case: Case) -> tuple[object, ...]:
    return (case.kind, case.lora, *sorted(case.flags.keys() & {*RSLORA, *IN_4BIT}))


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_make_the_updates_of_a_padded_process(name, updates_of):
    alone, together = updates_of(name)
    assert len(together.losses) == STEPS
    assert together.losses == pytest.approx(alone.losses, rel=SINGLE)
    assert together.norms == pytest.approx(alone.norms, rel=SINGLE)
    for ours, theirs in zip(together.means, alone.means, strict=True):
        assert {key: ours[key] for key in theirs} == pytest.approx(theirs, rel=SINGLE, abs=SINGLE)
    assert together.weights.keys() == alone.weights.keys()
    off = max(float((together.weights[key] - weight).abs().max()) for key, weight in alone.weights.items())
    assert off < SINGLE
    # The second update starts from another model than the first, and than the reference.
    moved = "kd_loss" if name.startswith("distilled") else "reward_margin"
    first = 0.0 if moved == "reward_margin" else alone.means[0][moved]
    # A mean over tokens moves less; far beyond what is taken to be equal all the same.
    assert abs(alone.means[1][moved] - first) > (20 * SINGLE if moved == "kd_loss" else 0.01)
