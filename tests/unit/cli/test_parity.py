"""`lmm-r1 kits --parity`: the gaps of a run's two steps as a table, and what it refuses."""

import pytest

from lmm_r1 import dotted
from lmm_r1.cli import kits
from lmm_r1.config import PPOConfig, resolve
from lmm_r1.errors import UserError
from lmm_r1.records.metrics import MetricLog, MetricRow


def logged(*steps: dict[str, float | None], grad_norm: float = 1.0) -> MetricLog:
    rows = []
    for step, gaps in enumerate(steps, start=1):
        values = {f"mismatch/{name}": value for name, value in gaps.items()}
        rows.append(MetricRow(step=step, seconds=None, values=values | {"actor_grad_norm": grad_norm}))
    return MetricLog(rows=tuple(rows))


TEXT = {"text/mean_exp": 1.001, "text/mean": 0.001, "text/max": 0.5}
IMAGE = {"image/mean_exp": 1.3, "image/mean": 0.2, "image/max": 2.0}


def test_both_steps_and_both_kinds_of_rows_have_a_line_whose_verdict_is_that_of_the_mean():
    # The largest distance says little: rounding alone moves rare tokens by more.
    gaps = kits.gaps_of(logged(TEXT | IMAGE, TEXT), corrected=False, limit=0.1)
    assert [gap.cells for gap in gaps] == [
        ("text", "as loaded", "1.001000", "0.001", "0.5", "agree"),
        ("image", "as loaded", "1.300000", "0.2", "2", "apart"),
        ("text", "after an update", "1.001000", "0.001", "0.5", "agree"),
    ]
    assert kits.gaps_of(logged(IMAGE, IMAGE), corrected=True, limit=0.1)[0].verdict == "apart, corrected on CPUs"
    nothing = {"text/mean_exp": None, "text/mean": None, "text/max": None}
    assert kits.gaps_of(logged(nothing, nothing), corrected=False, limit=0.1)[0].verdict == "apart"


def test_a_first_step_that_changed_no_weight_certifies_nothing():
    with pytest.raises(UserError, match="had no gradient"):
        kits.gaps_of(logged(TEXT, TEXT, grad_norm=0.0), corrected=False, limit=0.1)


def test_the_run_that_measures_is_one_that_the_trainer_takes(tmp_path):
    given = kits.parity_flags("models/vlm", max_len=256, dtype="fp32", folder=tmp_path)
    config = resolve(dotted.replace(PPOConfig(), given))
    assert (config.data.max_len, config.ds.param_dtype, config.rollout.n_samples_per_prompt) == (256, "fp32", 2)
    rewards = kits.spread(["?"] * 2, ["?"] * 2, [""] * 2, ["a", "b"])["rewards"]
    assert 0 <= min(rewards) < max(rewards) < 1


def test_flags_of_parity_are_refused_without_it(capsys):
    for flags in (["--max_len", "5"], ["--dtype", "fp32"], ["--settings", "a.yaml"]):
        with pytest.raises(SystemExit):
            kits.main(flags)
        assert "is for --parity" in capsys.readouterr().err
