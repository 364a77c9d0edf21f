"""DeepSpeed compiles nothing while a run trains: where its Adam for CPUs cannot be built, PyTorch's is used."""

import json
import os
import subprocess
import sys

import pytest
from helpers.tables import table

from lmm_r1 import cpu

pytestmark = [pytest.mark.slow, pytest.mark.full]

# What every Python process of the tests below runs first: PyTorch as on a machine with a GPU.
ON_A_GPU = """
import torch
torch.version.cuda = "13.0"
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1
compiled, torch.cuda._is_compiled = torch.cuda._is_compiled, lambda: True
# Which reads CUDA_HOME.
import torch.utils.cpp_extension
torch.cuda._is_compiled = compiled
"""
CHOOSE = """
import json, torch
import lmm_r1, deepspeed
# Other libraries would look for the GPU itself.
torch.version.cuda, torch.cuda.is_available = None, lambda: False
from lmm_r1 import cpu
cpu.prepare_process()
from lmm_r1.host import strategy
strategy.dist.get_rank = lambda: 0
print(json.dumps([strategy.torch_adam(offload=offload) for offload in (False, True)]))
"""


@pytest.mark.parametrize(
    ("nvcc", "arch", "reason"),
    table("integration/adam_builds", "what_deepspeed_cannot_compile_ends_no_run_and_is_said_in_one_sentence"),
    ids=["another architecture than DeepSpeed knows", "a broken nvcc", "no toolkit where CUDA_HOME points"],
)
def test_what_deepspeed_cannot_compile_ends_no_run_and_is_said_in_one_sentence(tmp_path, nvcc, arch, reason):
    (tmp_path / "sitecustomize.py").write_text(ON_A_GPU)
    home = tmp_path / "cuda"
    if nvcc is not None:
        (home / "bin").mkdir(parents=True)
        (home / "bin/nvcc").write_text(f"#!/bin/sh\n{nvcc}\n")
        (home / "bin/nvcc").chmod(0o755)
    given = {"CUDA_HOME": str(home), "TORCH_CUDA_ARCH_LIST": arch, "TORCH_EXTENSIONS_DIR": str(tmp_path / "built")}
    machine = {"DS_ACCELERATOR": "cuda", cpu.BACKEND: "cuda", "PYTHONWARNINGS": "ignore"}
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    chosen = subprocess.run(
        [sys.executable, "-c", CHOOSE],
        env={**os.environ, **given, **machine, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    # Of all that DeepSpeed asks when it is imported, nothing is printed.
    assert json.loads(chosen.stdout) == [{"torch_adam": True, "fused": True}, {"torch_adam": True}]
    (sentence,) = chosen.stderr.splitlines()
    assert sentence.startswith(f"--ds.adam_offload: DeepSpeed's Adam for CPUs cannot be built here ({reason}")
