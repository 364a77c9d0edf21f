"""Packed sequences and shared prefixes through linear layers, with prompts that end anywhere in a chunk and other shapes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.packed_batches import Batch, Sample, check, make_actors, one_by_one, shuffled, together, zeros
from helpers.tiny_models import build_experts, reshaped

from lmm_r1.data import sample
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits import KITS, get_kit
from lmm_r1.models.packed import attention
from lmm_r1.models.packed.sequence_parallel import check_heads

LINEAR, FULL = "linear_attention", "full_attention"
LINEAR_KITS = [name for name in KITS if name.startswith("qwen3_5")]
# Chunks end elsewhere in the samples one by one, which is the same up to rounding.
EXACT = 1e-10
# The default of transformers' chunks is 64 tokens.
PROMPTS = (63, 64, 65)
# Turns shorter than the convolution, and longer than a chunk.
TURNS = ((2, 1), (2, 70, 3), (2, 70, 1), (66, 2), (1,))
SHAPES: dict[str, dict[str, Any]] = {
    "as built": {},
    "three heads of values per key, width 2": {
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 3,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 24,
        "linear_conv_kernel_dim": 2,
    },
    "linear layers first and last, width 5": {
        "num_hidden_layers": 4,
        "layer_types": [LINEAR, LINEAR, FULL, LINEAR],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_conv_kernel_dim": 5,
    },
}
CASES = [("qwen3_5", shape) for shape in SHAPES] + [(name, "as built") for name in LINEAR_KITS if name != "qwen3_5"]


@pytest.fixture(autouse=True)
def nodes_of_single_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample, "LEAST_SHARED", 1)


def trees(prompt: int) -> Batch:
    """Return samples behind a prompt of so many tokens and one of a few, in trees of depth 3."""
    generator = torch.Generator().manual_seed(0)

    def draw(length: int) -> tuple[int, ...]:
        return tuple(torch.randint(20, 60, (length,), generator=generator).tolist())

    prompts, samples = (draw(prompt), draw(3)), []
    turns: dict[tuple[int, ...], tuple[int, ...]] = {(): ()}
    for lengths in TURNS:
        for end in range(1, len(lengths) + 1):
            turns.setdefault(lengths[:end], turns[lengths[: end - 1]] + draw(lengths[end - 1]))
        response = turns[lengths]
        for own in prompts if len(lengths) == 2 else prompts[:1]:
            mask = (True,) * len(response)
            samples.append(Sample(prompt=own, response=response, loss_mask=mask, media=None))
    return shuffled(samples)


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_trees_of_samples_are_the_samples_one_by_one_wherever_the_prompt_ends(
    name, shape, tiny_checkpoint: Callable[[str], Path], tmp_path, monkeypatch
):
    folder = reshaped(get_kit(name), tiny_checkpoint(name), tmp_path / "model", SHAPES[shape])
    check_exact(folder, monkeypatch, prompts=PROMPTS if shape == "as built" else PROMPTS[1:2])


def test_so_they_are_for_a_language_model_with_such_layers(tiny_checkpoint, tmp_path, monkeypatch):
    sizes = {"layer_types": [LINEAR, FULL], "linear_num_key_heads": 2, "linear_num_value_heads": 4}
    heads = {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "shared_expert_intermediate_size": 32}
    build_experts(tiny_checkpoint("llm"), tmp_path / "model", architecture="Qwen3Next", **sizes, **heads)
    check_exact(tmp_path / "model", monkeypatch, prompts=PROMPTS[1:2], experts_implementation="eager")


def check_exact(folder: Path, monkeypatch: pytest.MonkeyPatch, *, prompts: tuple[int, ...], **settings: Any) -> None:
    """Compare log-probs, entropies and gradients in double precision, and look that the trees are as deep as meant."""
    depths, rule = [], attention.gated_delta_rule
    monkeypatch.setattr(
        attention, "gated_delta_rule", lambda *inputs: (depths.append(max(inputs[-1].depths)), rule(*inputs))[1]
    )
    actors = make_actors(folder, **settings)
    for prompt in prompts:
        batch = trees(prompt)
        with actors.in_double_precision():
            exact = one_by_one(actors.stock, batch)
            for way, depth in (("packed", 0), ("shared", 3)):
                depths.clear()
                with actors.running(way, mode="train") as actor:
                    mine = together(actor, batch)
                # Turns may begin alike by chance.
                assert min(depths) >= depth, way
                assert mine.gradients.keys() == exact.gradients.keys()
                check(mine, exact, tolerance=EXACT, zero=zeros(exact.gradients))


@pytest.mark.parametrize("name", LINEAR_KITS)
def test_a_sequence_with_such_layers_is_not_split_over_gpus(name, tiny_checkpoint):
    config = get_kit(name).load_config(str(tiny_checkpoint(name)), trust_remote_code=False)
    check_heads(config, size=1, model="--actor.model_name_or_path model")
    with pytest.raises(UserError, match="linear attention layers, whose state passes from token to token"):
        check_heads(config, size=2, model="--actor.model_name_or_path model")
