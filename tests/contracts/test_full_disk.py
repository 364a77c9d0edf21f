"""Every command on a disk that takes no more: one sentence that names what cannot be written, and nothing half-written."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers.commands import ANSWERED, QUESTION, SMALL_RUN, flags, tree, write_rows
from helpers.processes import warm_python
from helpers.recipe_samples import SAMPLES, png
from helpers.run_folders import rollout, write_lines, write_stage

from lmm_r1.cli import COMMANDS

ROOT = Path(__file__).parents[2]
# PyTorch tells no reason.
REASONS = ("cannot be written (File too large); ", "cannot be written (only a part was written); free space ")
# Nothing can be written at all; what Python tries temporary folders with; less than a model's weights.
NOTHING, PROBES, LITTLE = 0, 100, 50_000
SHORT_RUN = ("train_ppo_ray", "train_sft", "evaluate", "batch_inference", "report", "make_task", "merge")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A command that writes."""

    argv: tuple[str, ...]
    named: str
    """What the sentence names; empty where nothing is written, and the command ends well."""
    room: int = NOTHING
    """Bytes that a file may have."""
    left: tuple[str, ...] = ()
    """Files that are whole, and stay."""


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What the commands read."""

    folder: Path
    model: Path
    adapter: Path
    reward_model: Path


def supervised(inputs: Inputs, rows: str, **changes: object) -> tuple[str, ...]:
    values: dict[str, object] = {
        "model.model_name_or_path": inputs.model,
        "data.dataset": inputs.folder / rows,
        "train.batch_size": 2,
        "train.micro_batch_size": 1,
        "ckpt.output_dir": "out",
        "ds.param_dtype": "fp32",
    }
    return tuple(flags(values | {name.replace("__", "."): value for name, value in changes.items()}))


def cases(inputs: Inputs) -> dict[str, list[Case]]:
    """Return for each command what it writes, if anything but its standard output."""
    folder, model = inputs.folder, str(inputs.model)
    out, rows, sft = "--ckpt.output_dir out", str(folder / "rows.jsonl"), supervised(inputs, "answered.jsonl")
    asked = flags({"backend": "transformers", "max_new_tokens": 2})
    records = ("out/run_config.yaml", "out/metrics.jsonl", "out/session.json", "out/checkpoints/fingerprint.json")
    policy = SMALL_RUN | {
        "actor.model_name_or_path": model,
        "data.prompt_dataset": rows,
        "reward.remote_url": folder / "reward.py",
    }
    port = ("--port", "0", "--port-file", "port")
    return {
        "init": [Case(argv=("project",), named="project/rows/train")],
        "train_ppo_ray": [Case(argv=tuple(flags(policy)), named="out/checkpoints/fingerprint.json", room=PROBES)],
        "train_sft": [
            Case(argv=sft, named=out),
            Case(argv=sft, named="out", room=LITTLE, left=records),
            Case(argv=(*sft, "--ckpt.save_steps", "1"), named="out/checkpoints", room=LITTLE, left=records),
        ],
        "train_dpo": [Case(argv=supervised(inputs, "pairs.jsonl"), named=out)],
        "train_rm": [Case(argv=supervised(inputs, "pairs.jsonl"), named=out)],
        "train_kd": [
            Case(argv=supervised(inputs, "answered.jsonl", teacher__model_name_or_path=inputs.model), named=out)
        ],
        "plan": [Case(argv=("train_sft", "--model.model_name_or_path", model), named="")],
        "serve_verifier": [Case(argv=("math", *port), named="--port-file port")],
        "serve_rm": [Case(argv=("--model", str(inputs.reward_model), *port), named="--port-file port")],
        "serve_chat": [Case(argv=("--help",), named="")],
        "interactive_chat": [Case(argv=("--help",), named="")],
        "batch_inference": [
            Case(
                argv=("--model", model, "--data", rows, "--output", "out.jsonl", "--eval_task", "generate"),
                named="out.jsonl",
            )
        ],
        "evaluate": [
            Case(
                argv=("--checkpoints", f"m={model}", "--files", f"f={rows}", "--output", "evaluation.json", *asked),
                named="evaluation",
            )
        ],
        "report": [Case(argv=(str(folder / "run"), "--output", "report.html"), named="report.html")],
        "check_data": [Case(argv=(rows, "--output", "found.json"), named="found.json")],
        "prepare_data": [
            Case(argv=("mathv360k", "--source", str(folder / "mathv360k"), "--output", "out"), named="out")
        ],
        "make_task": [Case(argv=("digits", "--modality", "image", "--rows", "2", "--output", "out"), named="out")],
        "kits": [Case(argv=(), named="")],
        "convert_config": [Case(argv=(str(folder / "easyr1.yaml"), "--output", "rl.yaml"), named="rl.yaml")],
        "merge": [
            Case(argv=("--adapter", str(inputs.adapter), "--output", "out"), named="out"),
            Case(argv=("--adapter", str(inputs.adapter), "--output", "out"), named="out", room=LITTLE),
        ],
        "completion": [Case(argv=("bash",), named="")],
        "make_tiny_model": [Case(argv=("--arch", "llm", "--output", "out"), named="out", room=LITTLE)],
    }


@pytest.fixture(scope="module")
def inputs(tiny_checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    from helpers.tiny_models import make_actor
    from helpers.value_models import save_reward_model

    from lmm_r1.models.adapters import save_adapter

    folder, model = tmp_path_factory.mktemp("read"), tiny_checkpoint("llm")
    write_rows(folder, QUESTION, QUESTION)
    asked, answers = QUESTION["messages"][0]["content"], ANSWERED["messages"][-1]["content"]
    for name, row in {"answered": ANSWERED, "pairs": {"prompt": asked, "chosen": answers, "rejected": "no"}}.items():
        write_lines(folder / f"{name}.jsonl", [row] * 4)
    (folder / "reward.py").write_text(
        "def reward_func(queries, prompts, labels):\n    return {'rewards': [1.0] * len(queries)}\n"
    )
    write_stage(folder / "run", name="rl", steps=1, seconds=1.0, hour=1)
    write_lines(folder / "run" / "rollouts.jsonl", [rollout(step=1)])
    (folder / "mathv360k").mkdir()
    (folder / "mathv360k" / "train_samples_all_tuning.json").write_text(json.dumps([SAMPLES["mathv360k"].record]))
    with zipfile.ZipFile(folder / "mathv360k" / "data_images.zip", "w") as archive:
        archive.writestr("data_images/FigureQA/1.png", png())
    shutil.copy(ROOT / "tests" / "data" / "conversion" / "easyr1.yaml", folder)
    save_adapter(make_actor(model, lora_rank=4, lora_alpha=8).model, folder / "adapter")
    return Inputs(
        folder=folder,
        model=model,
        adapter=folder / "adapter",
        reward_model=save_reward_model(model, folder / "reward_model"),
    )


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


@pytest.mark.parametrize(
    "command", [name if name in SHORT_RUN else pytest.param(name, marks=pytest.mark.full) for name in COMMANDS]
)
def test_a_command_that_cannot_write_ends_with_a_sentence_and_leaves_nothing_half_written(command, inputs, tmp_path):
    for number, case in enumerate(cases(inputs)[command]):
        work = tmp_path / str(number)
        work.mkdir()
        said = ended(
            *(warm_python(), "-m", "helpers.interrupted_writes", str(case.room), command, *case.argv),
            work=work,
        )
        assert said.returncode == bool(case.named), said.stderr
        assert "Traceback" not in said.stderr
        if not case.named:
            assert tree(work) == {}
            continue
        (told,) = [line for line in said.stderr.splitlines() if "cannot be written" in line]
        assert case.named in told
        assert any(reason in told for reason in REASONS), told
        assert all(file in case.left or not content for file, content in tree(work).items())


def test_a_command_that_finds_no_room_for_temporary_files_says_so(inputs, tmp_path):
    argv = supervised(inputs, "answered.jsonl")
    said = ended(sys.executable, "-m", "helpers.interrupted_writes", str(NOTHING), "train_sft", *argv, work=tmp_path)
    assert said.returncode == 1
    assert said.stderr.startswith("lmm-r1 train_sft: error: temporary files: cannot be written in ")
    assert said.stderr.endswith("; free space there, or set TMPDIR to another folder\n")
    assert said.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "argv", [["help"], ["--version"], ["kits"], ["completion", "bash"], ["train_ppo_ray", "--help"]]
)
def test_what_a_command_prints_into_a_file_on_a_full_disk_ends_it_with_a_sentence(argv, tmp_path):
    with open("/dev/full", "w") as full:
        said = ended(sys.executable, "-m", "lmm_r1.cli", *argv, work=tmp_path, stdout=full.fileno())
    assert said.returncode == 1
    assert said.stderr == (
        "lmm-r1: error: standard output or a file: cannot be written (No space left on device); free space on its disk, or "
        "choose another place\n"
    )
