"""The precision that `--ds.param_dtype` takes by itself, on processors and with GPUs that need not be this machine's."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.tables import table

from lmm_r1 import dotted
from lmm_r1.cli.arguments import parse
from lmm_r1.config import PPOConfig, SFTConfig, hardware, resolve, to_yaml
from lmm_r1.config.hardware import has_bf16_instructions, has_gpu

HASWELL = "flags\t\t: fpu vme sse2 fma avx f16c avx2 bmi2\nbugs\t\t: spectre_v1"
SKYLAKE = "flags\t\t: fpu avx2 avx512f avx512dq avx512bw avx512vl"
GENOA = f"processor\t: 0\n{SKYLAKE} avx512_bf16 avx512_vnni\n\nprocessor\t: 1\n{HASWELL}"
SAPPHIRE_RAPIDS = "flags\t\t: fpu avx2 avx512f amx_bf16 amx_tile"
GRAVITON_2 = "Features\t: fp asimd evtstrm aes asimddp"
GRAVITON_3 = "Features\t: fp asimd evtstrm aes sve bf16 i8mm"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """A function that makes this a machine with the given /proc/cpuinfo and device files, and nothing else."""
    for name in ("CUDA_VISIBLE_DEVICES", "RAY_ADDRESS", "RANK"):
        monkeypatch.delenv(name, raising=False)

    def make(cpuinfo: str, *, gpu: bool = False) -> None:
        (tmp_path / "cpuinfo").write_text(cpuinfo)
        monkeypatch.setattr(hardware, "CPUINFO", tmp_path / "cpuinfo")
        monkeypatch.setattr(hardware, "has_gpu", lambda environment: gpu)

    return make


def sft(**changes: object) -> SFTConfig:
    return dotted.replace(SFTConfig(), {"model.model_name_or_path": "model", "data.dataset": "rows.jsonl", **changes})


def ppo() -> PPOConfig:
    one_gpu = {
        "actor.num_gpus_per_node": 1,
        "ref.num_gpus_per_node": 1,
        "vllm.num_engines": 1,
        "reward.remote_url": "http://127.0.0.1:1/r",
    }
    model_and_data = {"actor.model_name_or_path": "model", "data.prompt_dataset": "rows.jsonl"}
    group = {"rollout.n_samples_per_prompt": 8}
    return dotted.replace(PPOConfig(), one_gpu | model_and_data | group)


@pytest.mark.parametrize(
    ("cpuinfo", "found"),
    [
        (HASWELL, False),
        (SKYLAKE, False),
        (GENOA, True),
        (SAPPHIRE_RAPIDS, True),
        (GRAVITON_2, False),
        (GRAVITON_3, True),
        ("", False),
        ("model name\t: bf16 processor", False),
    ],
)
def test_bf16_instructions_are_read_from_the_processors_flags(cpuinfo, found):
    assert has_bf16_instructions(cpuinfo) is found


@pytest.mark.parametrize(
    ("torch", "device", "visible", "found"),
    table("config/precision", "a_gpu_is_one_that_the_installed_pytorch_can_use"),
)
def test_a_gpu_is_one_that_the_installed_pytorch_can_use(monkeypatch, torch, device, visible, found):
    monkeypatch.setattr(hardware, "version", {"torch": torch}.get)
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert has_gpu(environment, exists=lambda path: path == device) is found


def test_this_machine_is_read_as_pytorch_reads_it():
    torch = pytest.importorskip("torch")
    assert has_gpu(os.environ) == torch.cuda.is_available()


@pytest.mark.parametrize("config", [sft, ppo])
@pytest.mark.parametrize(
    ("cpuinfo", "gpu", "rank", "found", "lines"),
    [
        (HASWELL, False, "0", "fp32", 1),
        # Of several ranks one says it.
        (HASWELL, False, "1", "fp32", 0),
        (HASWELL, True, "0", "bf16", 0),
        (GENOA, False, "0", "bf16", 0),
    ],
)
def test_it_is_bf16_on_gpus_and_with_instructions_for_it(
    config, cpuinfo, gpu, rank, found, lines, machine, monkeypatch, caplog
):
    machine(cpuinfo, gpu=gpu)
    monkeypatch.setenv("RANK", rank)
    resolved = resolve(config())
    assert resolved.ds.param_dtype == found
    assert len(caplog.messages) == lines
    assert all(line.startswith("--ds.param_dtype fp32: this machine has no GPU") for line in caplog.messages)
    assert resolve(resolved) == resolved


def test_a_run_on_a_cluster_does_not_ask_the_processor_of_the_node_that_starts_it(machine, monkeypatch):
    machine(HASWELL)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert resolve(ppo()).ds.param_dtype == "bf16"
    # It has no part in supervised training, which runs here.
    assert resolve(sft()).ds.param_dtype == "fp32"


def test_what_is_given_stays_and_so_do_a_run_folders_settings_on_another_processor(machine, tmp_path):
    machine(GENOA)
    assert resolve(sft(**{"ds.param_dtype": "fp16"})).ds.param_dtype == "fp16"
    (tmp_path / "run_config.yaml").write_text(to_yaml(resolve(sft())))
    machine(HASWELL)
    again = parse(SFTConfig, ["--config", str(tmp_path / "run_config.yaml")], prog="p", description="d")
    assert resolve(again).ds.param_dtype == "bf16"
