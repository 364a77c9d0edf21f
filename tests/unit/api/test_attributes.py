"""The attributes of `lmm_r1`: all there, each loaded only when it is asked for."""

import importlib
import json
import subprocess
import sys

import pytest

import lmm_r1


def test_every_name_is_that_of_its_module_and_is_listed():
    named = [name for names in lmm_r1._HOMES.values() for name in names]
    assert sorted(named) == sorted(lmm_r1.__all__)
    assert set(lmm_r1.__all__) <= set(dir(lmm_r1))
    for module, names in lmm_r1._HOMES.items():
        for name in names:
            assert getattr(lmm_r1, name) is getattr(importlib.import_module(module), name)
    with pytest.raises(AttributeError, match="module 'lmm_r1' has no attribute 'train_ppo'"):
        _ = lmm_r1.train_ppo


def test_functions_load_neither_torch_nor_the_training_stack_and_the_package_alone_loads_nothing():
    code = """
import json, sys
before = set(sys.modules)
import lmm_r1
alone = sorted(name for name in set(sys.modules) - before if name.startswith(("lmm_r1", "remote_rm", "importlib.")))
lmm_r1.train_rl, lmm_r1.train_sft, lmm_r1.generate, lmm_r1.evaluate, lmm_r1.VERIFIERS
heavy = [name for name in ("torch", "ray", "vllm", "deepspeed", "transformers", "openrlhf") if name in sys.modules]
print(json.dumps([alone, heavy]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [["lmm_r1"], []]
