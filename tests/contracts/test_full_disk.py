"""Commands on a disk that takes no more: one sentence that names what cannot be written, and nothing half-written."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.commands import ANSWERED, QUESTION, REWARD, SMALL_RUN, flags, supervised, tree, write_rows
from helpers.processes import warm_python
from helpers.run_folders import rollout, write_lines, write_stage
from helpers.tiny_models import make_actor

from lmm_r1.models.adapters import save_adapter

ROOT = Path(__file__).parents[2]
# PyTorch tells no reason.
REASONS = ("cannot be written (File too large); ", "cannot be written (only a part was written); free space ")
# Nothing can be written at all; what Python tries temporary folders with; less than a model's weights.
NOTHING, PROBES, LITTLE = 0, 100, 50_000
# Files of a run that are whole, and stay.
RECORDS = ("out/run_config.yaml", "out/metrics.jsonl", "out/session.json", "out/checkpoints/fingerprint.json")
# Each command with the bytes that a file may have, and what the sentence names. Inputs are links in the folder.
CASES = {
    "train_ppo_ray": ("train_ppo_ray", PROBES, "out/checkpoints/fingerprint.json"),
    "train_sft": ("train_sft", NOTHING, "--ckpt.output_dir out"),
    "train_sft at its end": ("train_sft", LITTLE, "out"),
    "train_sft in a save": ("train_sft --ckpt.save_steps 1", LITTLE, "out/checkpoints"),
    "batch_inference": (
        "batch_inference --model read/model --data read/rows.jsonl --output out.jsonl --eval_task generate",
        NOTHING,
        "out.jsonl",
    ),
    "evaluate": (
        "evaluate --checkpoints m=read/model --files f=read/rows.jsonl --output evaluation.json --backend transformers "
        "--max_new_tokens 2",
        NOTHING,
        "evaluation",
    ),
    "report": ("report read/run --output report.html", NOTHING, "report.html"),
    "make_task": ("make_task digits --modality image --rows 2 --output out", NOTHING, "out"),
    "merge": ("merge --adapter read/adapter --output out", LITTLE, "out"),
}


@pytest.fixture(scope="module")
def inputs(tiny_checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the commands read."""
    folder, model = tmp_path_factory.mktemp("inputs"), tiny_checkpoint("llm")
    (folder / "model").symlink_to(model)
    write_rows(folder, QUESTION, QUESTION)
    write_lines(folder / "answered.jsonl", [ANSWERED] * 4)
    (folder / "reward.py").write_text(REWARD)
    write_stage(folder / "run", name="rl", steps=1, seconds=1.0, hour=1)
    write_lines(folder / "run" / "rollouts.jsonl", [rollout(step=1)])
    save_adapter(make_actor(model, lora_rank=4, lora_alpha=8).model, folder / "adapter")
    return folder


@pytest.fixture
def work(inputs: Path, tmp_path: Path) -> Path:
    (tmp_path / "read").symlink_to(inputs)
    return tmp_path


SETTINGS = {
    "train_sft": supervised("read/model", data__dataset="read/answered.jsonl"),
    "train_ppo_ray": flags(
        SMALL_RUN
        | {"actor.model_name_or_path": "read/model", "data.prompt_dataset": "read/rows.jsonl"}
        | {"reward.remote_url": "read/reward.py"}
    ),
}


def ended(*command: str, work: Path, stdout: int = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    return subprocess.run(
        command,
        cwd=work,
        env=kept | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize("case", CASES)
def test_a_command_that_cannot_write_ends_with_a_sentence_and_leaves_nothing_half_written(case, work):
    argv, room, named = CASES[case]
    command, *more = argv.split()
    given = [*SETTINGS.get(command, []), *more]
    said = ended(warm_python(), "-m", "helpers.interrupted_writes", str(room), command, *given, work=work)
    assert said.returncode == 1, said.stderr
    assert "Traceback" not in said.stderr
    (told,) = [line for line in said.stderr.splitlines() if "cannot be written" in line]
    assert named in told
    assert any(reason in told for reason in REASONS), told
    left = RECORDS if room == LITTLE and command == "train_sft" else ()
    assert all(file in left or not content for file, content in tree(work).items() if not file.startswith("read"))


def test_a_command_that_finds_no_room_for_temporary_files_says_so(work):
    argv = ("-m", "helpers.interrupted_writes", str(NOTHING), "train_sft", *SETTINGS["train_sft"])
    said = ended(sys.executable, *argv, work=work)
    assert said.returncode == 1
    assert said.stderr.startswith("lmm-r1 train_sft: error: temporary files: cannot be written in ")
    assert said.stderr.endswith("; free space there, or set TMPDIR to another folder\n")
    assert said.stderr.count("\n") == 1


@pytest.mark.parametrize("argv", [["help"], ["train_ppo_ray", "--help"]])
def test_what_a_command_prints_into_a_file_on_a_full_disk_ends_it_with_a_sentence(argv, tmp_path):
    with open("/dev/full", "w") as full:
        said = ended(sys.executable, "-m", "lmm_r1.cli", *argv, work=tmp_path, stdout=full.fileno())
    assert said.returncode == 1
    assert said.stderr == (
        "lmm-r1: error: standard output or a file: cannot be written (No space left on device); free space on its disk, or "
        "choose another place\n"
    )
