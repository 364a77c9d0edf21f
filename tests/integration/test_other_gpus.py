"""A supervised run goes on with another number of processes, another ZeRO stage and flags that save memory, with equal losses."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.commands import ANSWERED, flags, write_rows
from helpers.commands_here import run_in_ranks

STEPS = 6
SETTINGS: dict[str, object] = {
    "train.max_epochs": STEPS,
    "train.batch_size": 4,
    "adam.lr": 1e-3,
    "adam.weight_decay": 0.5,
    "lr_scheduler": "linear",
    "ds.param_dtype": "fp32",
    "ckpt.save_steps": 2,
    "ckpt.max_num": 9,
}
KINDS: dict[str, dict[str, object]] = {"all weights": {}, "LoRA": {"ds.lora.rank": 4}}
# One after another, each from a checkpoint of the one before: processes, flags, and the step that it goes on from.
SESSIONS: list[tuple[int, str, int]] = [
    (1, "--ds.zero_stage 2 --train.micro_batch_size 4", 0),
    (2, "--ds.zero_stage 3 --train.micro_batch_size 1 --model.gradient_checkpointing_enable", 2),
    (1, "--ds.zero_stage 1 --train.micro_batch_size 2 --ds.adam_offload", 4),
    (2, "--ds.zero_stage 2 --train.micro_batch_size 2", 4),
]


def losses(folder: Path) -> dict[int, float]:
    """Return the loss of each step that a run has made."""
    return {line["step"]: line["loss"] for line in map(json.loads, (folder / "metrics.jsonl").open())}


@pytest.fixture(scope="module")
def sessions(
    tiny_checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Path]]:
    """The run folders of each session by kind."""
    asked = [
        {**ANSWERED, "messages": [{"role": "user", "content": text}, ANSWERED["messages"][-1]]} for text in "abcd"
    ]
    rows = write_rows(tmp_path_factory.mktemp("rows"), *asked)
    given = SETTINGS | {"model.model_name_or_path": tiny_checkpoint("llm"), "data.dataset": rows}
    found: list[dict[str, Path]] = []
    for number, (count, own, start) in enumerate(SESSIONS):
        folder = tmp_path_factory.mktemp("sessions") / f"session{number}"
        places = {kind: folder / kind for kind in KINDS}
        commands = [
            [*flags(given | KINDS[kind] | {"ckpt.output_dir": place, "ckpt.path": f"{folder}_{kind}"}), *own.split()]
            for kind, place in places.items()
        ]
        for kind in KINDS if start else ():
            saved = Path(f"{found[-1][kind].parent}_{kind}")
            later = shutil.ignore_patterns("latest", *(f"global_step{step}" for step in range(start + 1, STEPS + 1)))
            shutil.copytree(saved, f"{folder}_{kind}", ignore=later)
        for ended in run_in_ranks(commands, count=count, folder=folder):
            assert [rank.code for rank in ended] == [0] * count, ended[0].stderr
        found.append(places)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_losses_stay_those_of_a_run_that_never_stopped(kind, sessions):
    whole = losses(sessions[0][kind])
    assert len(whole) == STEPS
    assert whole[STEPS] < 0.99 * whole[1]
    for (_, _, start), places in zip(SESSIONS[1:], sessions[1:], strict=True):
        expected = {step: pytest.approx(loss, rel=1e-5) for step, loss in whole.items() if step > start}
        assert losses(places[kind]) == expected
