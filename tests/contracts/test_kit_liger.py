"""Liger's kernels, run by Triton's interpreter, against the modules they replace: every kit's log-probs and gradients."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lmm_r1.lmm_kits import KITS

pytestmark = [pytest.mark.contract, pytest.mark.slow]

TESTS = Path(__file__).resolve().parents[1]
NORMS, LAYERS, ROTATIONS = "norms", "feed-forward layers", "rotary embeddings"
# Of two layers of text: two norms each and the last one, a feed-forward layer and a rotation each.
TEXT = {NORMS: 5, LAYERS: 2, ROTATIONS: 2}
MORE = {
    # Norms of queries and keys, and norms after each part of a layer.
    "gemma3": {NORMS: 14},
    # Four layers of text and two of the tower; no kernel computes its norms, some without a weight, and its rotations.
    "gemma4": {NORMS: 0, LAYERS: 6, ROTATIONS: 0},
    # Towers with norms, gated layers and rotations of their own; the text of GLM-4.1V rotates pairs, not halves.
    "glm4v": {NORMS: 15, LAYERS: 4},
    "glm4v_moe": {NORMS: 11, LAYERS: 4, ROTATIONS: 4},
    "qwen2_5_vl": {NORMS: 10, LAYERS: 4, ROTATIONS: 4},
    "qwen2_vl": {ROTATIONS: 4},
    # One of its layers has linear attention.
    "qwen3_5": {NORMS: 7, ROTATIONS: 4},
    "qwen3_5_moe": {NORMS: 7, ROTATIONS: 4},
    "qwen3_vl": {NORMS: 9, ROTATIONS: 5},
    # Experts are no modules.
    "qwen3_vl_moe": {NORMS: 9, ROTATIONS: 5, LAYERS: 0},
}


@pytest.mark.parametrize("name", KITS)
def test_log_probs_and_gradients_are_those_without_the_kernels(name, tiny_checkpoint):
    """Of groups with a shared prefix, in fp32: all weights, then adapters with gradient checkpointing."""
    # A process of its own: Triton reads the variable when it is imported.
    command = [sys.executable, "-m", "helpers.interpreted_liger", name, str(tiny_checkpoint(name))]
    paths = os.pathsep.join([str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": paths}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    expected = {kind: count for kind, count in {**TEXT, **MORE.get(name, {})}.items() if count}
    assert json.loads(ended.stdout.splitlines()[-1]) == expected
