"""Runs without flags of memory start on the GPUs that there are: what they choose is what fits, on machines that are named."""

import json
import shlex
from contextlib import nullcontext

import pytest
from huggingface_hub import constants
from PIL import Image

from lmm_r1 import cpu, dotted
from lmm_r1.cli import main
from lmm_r1.cli.arguments import parse
from lmm_r1.cli.plan import PLANNED, MachineFlags, fitting_flags, largest_pixels
from lmm_r1.config import PPOConfig, resolve_ppo, sized_ppo
from lmm_r1.config.hardware import Offer, shared_counts
from lmm_r1.lmm_kits import Checkpoint
from lmm_r1.lmm_kits.registry import released_folder
from lmm_r1.tools.planning.choices import Remedy, choices_line, chosen, filled, fitting_pixels
from lmm_r1.tools.planning.plan import GIB, Machine, Plan
from lmm_r1.tools.planning.run_plan import plan_ppo


def planned(config: PPOConfig, *, gpu: int, gpus: int = 1) -> tuple[PPOConfig, Plan, str | None]:
    """What an RL run chooses on a machine with so many GPUs of so many GiB."""
    offer, machine = Offer(per_node=(gpus,), joined=False), Machine(gpu_bytes=gpu * GIB, host_bytes=256 * GIB)
    config, _ = sized_ppo(resolve_ppo(config, ask=lambda: offer), rows=1000)
    found, plan = chosen(
        config,
        replan=lambda changed: plan_ppo(changed, machine),
        share_gpus=lambda changed: shared_counts(changed, ask=lambda: offer),
    )
    complete = filled(found, plan)
    return complete, plan, choices_line(config, complete)


def rl_config(*files: object, **flags: object) -> PPOConfig:
    arguments = [part for file in files for part in ("--config", str(file))]
    config = parse(PPOConfig, arguments, prog="train_ppo_ray", description="")
    return dotted.replace(config, {"data.prompt_dataset": "rows", **flags})


@pytest.mark.parametrize("gpu", [24, 80])
@pytest.mark.parametrize(("gpus", "together"), [(1, True), (2, True), (4, False), (8, False)])
def test_a_run_without_flags_starts_on_one_to_eight_gpus(gpu, gpus, together, tiny_checkpoint):
    flags = {"actor.model_name_or_path": str(tiny_checkpoint("llm")), "ds.param_dtype": "fp32"}
    config, plan, line = planned(rl_config(**flags), gpu=gpu, gpus=gpus)
    assert plan.excesses() == []
    assert config.train.colocate_all is together
    assert line.startswith("chosen to fit: --")
    if together:
        assert config.actor.gpus == config.ref.gpus == config.vllm.gpus == gpus


@pytest.mark.slow
@pytest.mark.usefixtures("own_environment")
@pytest.mark.parametrize(
    ("size", "gpu", "gpus", "needed"),
    [
        ("3B", 80, 1, ""),
        ("3B", 40, 1, ""),
        ("3B", 24, 1, "--ds.adam_offload --algo.kl.init_coef 0"),
        pytest.param("3B", 16, 1, "--ds.lora.rank 64 --ds.load_in_4bit", marks=pytest.mark.full),
        pytest.param("7B", 80, 8, "", marks=pytest.mark.full),
    ],
)
def test_a_plan_ends_with_a_command_that_fits(size, gpu, gpus, needed, capsys, monkeypatch):
    monkeypatch.setattr(cpu, "prepare_process", lambda: None)
    # Nothing is downloaded.
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    name = f"Qwen/Qwen2.5-VL-{size}-Instruct"
    with pytest.raises(SystemExit) if needed else nullcontext():
        main(["plan", "--num_gpus", str(gpus), "--actor.model_name_or_path", name, f"--gpu_memory_gib={gpu}"])
    said = capsys.readouterr()
    # In the precision of the named GPU, not in that of this machine.
    assert size != "3B" or "weights (3.75 B parameters)                          6.99" in said.out
    command = (said.err if needed else said.out).splitlines()[-1].strip()
    base = f"lmm-r1 train_ppo_ray --actor.model_name_or_path {name} --data.prompt_dataset rows.jsonl"
    assert command.startswith(base)
    assert command.endswith(needed)
    taken = command.removeprefix(base).strip()
    listed = [line.strip().partition(": ")[0] for line in said.err.splitlines() if line.startswith("  --")]
    assert " ".join(listed) == taken
    found = fitting_flags(name, machine=MachineFlags(num_gpus=gpus, gpu_memory_gib=gpu))
    assert str(Remedy(settings=found, cost="")) == taken
    config = parse(PPOConfig, shlex.split(command)[2:], prog="train_ppo_ray", description="")
    released = {"actor.model_name_or_path": str(released_folder(name)), "ds.param_dtype": "bf16"}
    assert planned(dotted.replace(config, released), gpu=gpu, gpus=gpus)[1].excesses() == []


@pytest.mark.parametrize(
    ("flags", "pixels"),
    [
        # Half of 2,048 tokens, or what 1,500 of a response leave of them.
        ({}, 12_000_000 * 1024 // 15_306),
        ({"rollout.max_new_tokens": 1500}, 12_000_000 * 548 // 15_306),
        ({"data.max_pixels": 401_408}, 401_408),
        ({"data.max_len": 16_384}, 12_000_000),
    ],
)
def test_a_photo_is_planned_as_it_is_scaled(flags, pixels):
    checkpoint = Checkpoint(str(released_folder("Qwen/Qwen2.5-VL-3B-Instruct")))
    assert fitting_pixels(checkpoint, dotted.replace(PPOConfig(), flags), pixels=12_000_000) == pixels


@pytest.mark.parametrize("command", ["train_ppo_ray", "train_sft", "train_dpo"])
def test_a_plan_reads_how_large_the_images_of_the_rows_are(command, tmp_path):
    rows = tmp_path / "rows.jsonl"
    with rows.open("w") as file:
        for side in (280, 1400):
            Image.new("RGB", (2 * side, side)).save(tmp_path / f"{side}.png")
            content = [{"type": "image", "image": f"{side}.png"}]
            sides = {"chosen": "1", "rejected": "2"} if command == "train_dpo" else {}
            print(json.dumps({"messages": [{"role": "user", "content": content}], **sides}), file=file)
    dataset = "data.prompt_dataset" if command == "train_ppo_ray" else "data.dataset"
    assert largest_pixels(dotted.replace(PLANNED[command](), {dataset: str(rows)})) == 2 * 1400 * 1400


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize(("gpu", "gpus"), [(24, 8), (80, 1), (80, 2), (80, 4), (80, 8)])
def test_a_model_of_3_billion_parameters_is_trained_whole_without_flags(gpu, gpus):
    flags = {"actor.model_name_or_path": str(released_folder("Qwen/Qwen2.5-VL-3B-Instruct")), "ds.param_dtype": "bf16"}
    config, plan, line = planned(rl_config(**flags), gpu=gpu, gpus=gpus)
    assert plan.excesses() == []
    assert plan.fitting_tokens >= config.data.max_len
    assert ("--ds.zero_stage 3" in line) <= (gpus > 1)
