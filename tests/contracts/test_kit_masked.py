"""Samples of which an update takes the prompt alone, in every way of computing a pass."""

import pytest
import torch
from helpers.conversations import message, picture
from helpers.packed_batches import Batch, Sample, groups, together
from helpers.tables import SOME
from helpers.tiny_models import encode, make_actor

from lmm_r1.lmm_kits import get_kit

WAYS = {"padded": {}, "packed": {"packing_samples": True}, "shared": {"packing_samples": True, "share_prefix": True}}
TOLERANCE = 1e-5


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", sorted(SOME))
def test_a_pass_takes_samples_without_loss_tokens(name, way, tiny_checkpoint):
    kit, folder = get_kit(name), tiny_checkpoint(name)
    processor = kit.load_processor(str(folder), trust_remote_code=False)
    parts = [picture(56, 56), "Which digit?"] if kit.takes_images else ["Which digit?"]
    prompt = encode(kit, processor, [message("user", *parts)])
    actor = make_actor(folder, **WAYS[way])
    learnt, other = groups([prompt], [(5, 3)])
    masked = Sample(prompt=learnt.prompt, response=(), loss_mask=(), media=learnt.media)
    alone = together(actor, Batch((learnt, other)), side="right")
    beside = together(actor, Batch((learnt, masked, other)), side="right")
    assert beside.log_probs[1].shape == (0,)
    for index, place in ((0, 0), (1, 2)):
        torch.testing.assert_close(beside.log_probs[place], alone.log_probs[index], rtol=0, atol=TOLERANCE)
    nothing = together(actor, Batch((masked, masked)), side="right")
    assert nothing.gradients.keys() == beside.gradients.keys(), "every weight has its gradient, or ranks wait for one"
    assert all(gradient.abs().max() == 0 for gradient in nothing.gradients.values())
