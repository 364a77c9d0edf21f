"""Kits of mixtures of experts: the load-balancing loss, ZeRO-3, and shapes other than the tiny models'."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from helpers.conversations import message, picture
from helpers.engines import largest_difference, running_engine, sampled
from helpers.packed_batches import Batch, groups
from helpers.tables import table
from helpers.tiny_models import BALANCED_KITS, logits, make_actor, reshaped

from lmm_r1.lmm_kits import EncodedPrompt, get_kit
from lmm_r1.models.load_balancing import check_balanced, routers_of

CONVERSATIONS = ([message("user", picture(84, 56), "Which digit is this?")], [message("user", "What is 12 + 34?")])
SHAPES: dict[str, dict[str, dict[str, object]]] = table("contracts/kit_mixtures", "shapes")
CASES = [(name, shape) for name, shapes in SHAPES.items() for shape in shapes]


@pytest.mark.parametrize("name", BALANCED_KITS)
def test_the_routers_learn_and_are_balanced_padded_and_packed(name, tiny_checkpoint, prompts_of):
    kit, tiny = get_kit(name), tiny_checkpoint(name)
    config = kit.load_config(str(tiny), trust_remote_code=False)
    check_balanced(config, kit=kit, coef=0.01, flag="actor.aux_loss_coef", model="model")
    assert routers_of(config, kit=kit).top_k == 2
    batch = Batch(tuple(groups(prompts_of(name, *CONVERSATIONS), [(4, 7), (5,)])))
    found = []
    for packing in (False, True):
        actor = make_actor(tiny, packing_samples=packing)
        actor.balance_experts()
        actor.train()
        _, output = actor([replace(sample, group=None) for sample in batch.for_model], return_output=True)
        output.aux_loss.backward()
        found.append((output.aux_loss.item(), actor.model.model.language_model.layers[1].mlp.gate.weight.grad))
    (padded, gradient), (packed, packed_gradient) = found
    # Balanced experts give the number of choices.
    assert 1.5 < padded < 4
    assert packed == pytest.approx(padded, rel=1e-5)
    torch.testing.assert_close(packed_gradient, gradient, atol=1e-7, rtol=1e-4)
    assert gradient.abs().max() > 1e-6


@pytest.mark.parametrize("name", BALANCED_KITS)
def test_a_layer_of_experts_is_gathered_as_one_by_zero_3(name, tiny_checkpoint):
    from deepspeed.utils import z3_leaf_module

    layers = make_actor(tiny_checkpoint(name)).model.model.language_model.layers
    with_experts = [layer.mlp for layer in layers if hasattr(layer.mlp, "experts")]
    assert with_experts
    assert all(z3_leaf_module(layer) for layer in with_experts)


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_other_shapes_are_computed_and_sampled_alike(
    name, shape, tiny_checkpoint, prompts_of: Callable[..., list[EncodedPrompt]], tmp_path
):
    kit, prompts = get_kit(name), prompts_of(name, *CONVERSATIONS)
    folder = reshaped(kit, tiny_checkpoint(name), tmp_path / "model", SHAPES[name][shape])
    for implementation in ("eager", "batched_mm"):
        torch.testing.assert_close(
            logits(folder, prompts[0], experts_implementation=implementation),
            logits(folder, prompts[0]),
            atol=1e-5,
            rtol=0,
        )
    actor = make_actor(folder, ban_media_tokens=True)
    with running_engine(kit, folder, max_images=1) as llm:
        samples = sampled(llm, kit, prompts, banned=actor.banned_token_ids.tolist(), n=2, max_tokens=12)
    assert largest_difference(actor, prompts, samples) <= 1e-4
