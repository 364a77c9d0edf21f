"""What a kit says of 4-bit weights: adapters over them train on text and images, or they are refused."""

import pytest
import torch
from helpers.conversations import message, picture
from helpers.packed_batches import Batch, groups, log_probs_of, together
from helpers.tables import kits_with
from helpers.tiny_models import encode, make_actor

from lmm_r1.errors import UserError
from lmm_r1.lmm_kits import KITS, get_kit
from lmm_r1.models.adapters import merged_state_dict, quantized_layers

# Of log-probs near -5, in fp32.
TOLERANCE = 1e-4


@pytest.mark.parametrize("name", kits_with("QLoRA"))
def test_adapters_over_4_bits_get_gradients_and_log_probs_are_those_of_the_rounded_weights(name, tiny_checkpoint):
    kit, folder = get_kit(name), tiny_checkpoint(name)
    processor = kit.load_processor(str(folder), trust_remote_code=False)
    shown = [picture(84, 56)] if kit.takes_images else []
    batch = Batch(tuple(groups([encode(kit, processor, [message("user", *shown, "What is 12 + 34?")])], [(4, 6)])))
    in_4bit, rounded, plain = (
        make_actor(folder, lora_rank=4, load_in_4bit=True),
        make_actor(folder),
        make_actor(folder),
    )
    assert quantized_layers(in_4bit.model)
    rounded.model.load_state_dict(merged_state_dict(in_4bit.model))
    expected, unrounded = (log_probs_of(actor, batch) for actor in (rounded, plain))
    found = together(in_4bit.train(), batch)
    for given, wanted, other in zip(found.log_probs, expected, unrounded, strict=True):
        torch.testing.assert_close(given, wanted, atol=TOLERANCE, rtol=0)
        assert (wanted - other).abs().max() > 100 * TOLERANCE, "4 bits would not have shown"
    # The first of an adapter's two matrices has no gradient while the second is zero.
    assert found.gradients
    assert all(".lora_" in name for name in found.gradients)
    assert all(gradient.isfinite().all() for gradient in found.gradients.values())
    assert any(gradient.abs().max() > 0 for gradient in found.gradients.values())


@pytest.mark.parametrize("name", sorted(set(KITS) - set(kits_with("QLoRA"))))
def test_experts_of_one_tensor_a_layer_are_refused(name, tiny_checkpoint):
    with pytest.raises(UserError, match="--ds.load_in_4bit: the experts of this model are one tensor a layer"):
        make_actor(tiny_checkpoint(name), lora_rank=4, load_in_4bit=True)
