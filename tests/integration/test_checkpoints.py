"""DeepSpeed's checkpoints under our strategy: killed saves, torn files, and what of DeepSpeed and OpenRLHF is relied on."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from helpers.interrupted_writes import Interrupter
from helpers.launched_ranks import launch
from helpers.saved_checkpoints import complete_steps, make_run, prepared, train, weight
from openrlhf.utils.deepspeed import DeepspeedStrategy

from lmm_r1.errors import UserError
from lmm_r1.host.strategy import KitStrategy

RANK_0 = "zero_pp_rank_0_mp_rank_00_"
SHARDS = {
    1: [f"{RANK_0}optim_states.pt", "mp_rank_00_model_states.pt"],
    2: [f"{RANK_0}optim_states.pt", "mp_rank_00_model_states.pt"],
    3: [f"{RANK_0}optim_states.pt", f"{RANK_0}model_states.pt"],
}


@pytest.fixture(scope="module")
def interrupter() -> Interrupter:
    return Interrupter()


def saved_steps(folder: Path, strategy: KitStrategy, engine: Any, *, steps: int, **limits: float) -> list[float]:
    """Make and save so many steps; returns the weight after each."""
    weights = []
    for step in range(1, steps + 1):
        train(strategy, engine, steps=1)
        weights.append(weight(engine))
        strategy.save_ckpt(
            engine, str(folder), f"global_step{step}", client_state={"global_step": step}, **{"max_num": 99} | limits
        )
    return weights


def loaded(folder: Path, strategy: KitStrategy) -> tuple[int | None, float]:
    """Return the step that a new engine goes on from, and its weight."""
    engine = prepared(strategy)
    _, states = strategy.load_ckpt(engine, str(folder))
    return states.get("global_step"), weight(engine)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(("stage", "dtype", "every"), [(1, "fp32", 4), (2, "bf16", 1), (3, "bf16", 4)])
def test_a_save_killed_at_any_operation_on_files_can_be_gone_on_from(stage, dtype, every, tmp_path, interrupter):
    strategy = make_run(stage, dtype=dtype)
    engine = prepared(strategy)
    (first,) = saved_steps(tmp_path / "run", strategy, engine, steps=1)
    train(strategy, engine, steps=1)
    weights = {1: first, 2: weight(engine)}
    assert weights[1] != weights[2]
    seen = set()
    for at in range(0, 1000, every):
        copy = tmp_path / f"run{at}"
        shutil.copytree(tmp_path / "run", copy)

        def save(copy: Path = copy) -> None:
            states = {"global_step": 2}
            strategy.save_ckpt(engine, str(copy), "global_step2", max_num=1, client_state=states)

        killed = interrupter.run(save, at=at)
        step, value = loaded(copy, strategy)
        seen.add(step)
        assert value == weights[step]
        # The same save again, as the next session makes it.
        save()
        assert sorted(path.name for path in copy.iterdir() if path.is_dir()) == ["global_step2"]
        assert complete_steps(copy) == [2]
        shutil.rmtree(copy)
        if not killed:
            break
    assert seen == {1, 2}
    assert at > 15


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("damage", ["empty", "missing", "torn"])
def test_a_useless_latest_falls_back_to_the_newest_whole_checkpoint(damage, tmp_path, caplog):
    strategy = make_run(2)
    weights = saved_steps(tmp_path, strategy, prepared(strategy), steps=3)
    if damage == "empty":
        (tmp_path / "latest").write_text("")
    elif damage == "missing":
        (tmp_path / "latest").unlink()
    else:
        (tmp_path / "global_step3" / SHARDS[2][0]).write_bytes(b"")
    step = 2 if damage == "torn" else 3
    assert loaded(tmp_path, strategy) == (step, weights[step - 1])
    (warning,) = [record.getMessage() for record in caplog.records if record.name.startswith("lmm_r1")]
    assert f"goes on from global_step{step}" in warning
    assert (f"{SHARDS[2][0]} has 0 bytes" if damage == "torn" else f"latest is {damage}") in warning


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_openrlhfs_own_checkpoint_is_loaded_if_latest_names_it(stage, tmp_path):
    strategy = make_run(stage)
    engine = prepared(strategy)
    train(strategy, engine, steps=1)
    expected = weight(engine)
    for step in (1, 2):
        states = {"global_step": step}
        DeepspeedStrategy.save_ckpt(strategy, engine, str(tmp_path), f"global_step{step}", client_state=states)
    assert complete_steps(tmp_path) == [2]
    assert loaded(tmp_path, strategy) == (2, expected)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(("saved", "stage"), [(1, 2), (2, 1), (1, 3), (2, 3), (3, 1), (3, 2), (3, 3)])
def test_another_zero_stage_goes_on_with_the_same_updates(saved, stage, tmp_path):
    strategy = make_run(saved, dtype="bf16")
    weights = saved_steps(tmp_path, strategy, prepared(strategy), steps=3)
    for step in (2, 3):
        shutil.rmtree(tmp_path / f"global_step{step}")
    other = make_run(stage, dtype="bf16")
    other.use_ds_universal_ckpt = saved == stage
    engine = prepared(other)
    _, states = other.load_ckpt(engine, str(tmp_path))
    assert (states["global_step"], engine.global_steps, weight(engine)) == (1, 1, weights[0])
    for expected in weights[1:]:
        train(other, engine, steps=1)
        assert weight(engine) == expected


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(("saved", "stage"), [(0, 2), (2, 0)])
def test_another_zero_stage_is_refused_where_the_state_has_no_parts(saved, stage, tmp_path):
    strategy = make_run(saved)
    saved_steps(tmp_path, strategy, prepared(strategy), steps=1)
    with pytest.raises(
        UserError, match="global_step1: another number of GPUs or another --ds.zero_stage can load only AdamW"
    ):
        loaded(tmp_path, make_run(stage))


@pytest.mark.parametrize("stage", [2, 3])
def test_two_ranks_come_to_the_same_decision_and_save_all_shards(stage, tmp_path):
    launch("helpers.saved_checkpoints", str(stage), str(tmp_path / "run"), count=2, folder=tmp_path / "logs").wait()
    marker = json.loads((tmp_path / "run/global_step2/complete.json").read_text())
    ranks = [f"zero_pp_rank_{rank}_mp_rank_00_" for rank in (0, 1)]
    models = ["mp_rank_00_model_states.pt"] if stage == 2 else [f"{rank}model_states.pt" for rank in ranks]
    assert sorted(marker["files"]) == sorted([*models, *(f"{rank}optim_states.pt" for rank in ranks)])
    assert marker["step"] == 2
