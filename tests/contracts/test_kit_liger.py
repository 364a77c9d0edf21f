"""Liger's kernels, run by Triton's interpreter, against the modules they replace: every kit's log-probs and gradients."""

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest
from helpers.interpreted_liger import compare, interpreting_process

from lmm_r1.lmm_kits import KITS

pytestmark = pytest.mark.slow

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


@pytest.fixture(scope="module")
def interpreting() -> Iterator[ProcessPoolExecutor]:
    with interpreting_process() as process:
        yield process


@pytest.mark.full
@pytest.mark.parametrize("name", KITS)
def test_log_probs_and_gradients_are_those_without_the_kernels(name, tiny_checkpoint, interpreting):
    """Of groups with a shared prefix, in fp32: all weights, then adapters with gradient checkpointing."""
    counts = interpreting.submit(compare, name, tiny_checkpoint(name)).result()
    assert counts == {kind: count for kind, count in {**TEXT, **MORE.get(name, {})}.items() if count}
