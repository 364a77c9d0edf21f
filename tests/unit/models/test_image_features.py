from pathlib import Path

import pytest
import torch
from helpers.conversations import message, picture
from helpers.packed_batches import Batch, groups, log_probs_of
from helpers.tiny_models import encode, make_actor

from lmm_r1.lmm_kits import get_kit
from lmm_r1.models.image_features import FeatureCounts, process_store

KIT = "qwen2_5_vl"
# Of log-probs of 4 in single precision.
ROUNDING = 1e-5
FROZEN = {"freeze_visual_encoder": True, "image_cache_gib": 0.25}
# Two prompts: a picture twice and another one, then one of the first again.
PROMPTS = (
    [message("user", picture(56, 56), "or", picture(84, 56), "or", picture(56, 56), "?")],
    [message("user", picture(84, 56), "Which digit?")],
)


@pytest.fixture(scope="module")
def folder(tiny_checkpoint) -> Path:
    return tiny_checkpoint(KIT)


@pytest.fixture(scope="module")
def batches(folder) -> list[Batch]:
    kit = get_kit(KIT)
    processor = kit.load_processor(str(folder), trust_remote_code=False)
    return [Batch(tuple(groups([encode(kit, processor, prompt)], [(4, 2)]))) for prompt in PROMPTS]


@pytest.fixture(autouse=True)
def fresh_store():
    process_store.cache_clear()


def results(actor, batch: Batch) -> torch.Tensor:
    return torch.cat(log_probs_of(actor, batch))


def test_each_image_goes_through_a_frozen_tower_once(folder, batches):
    actor = make_actor(folder, **FROZEN)
    patches = []
    actor.model.model.visual.patch_embed.register_forward_hook(
        lambda module, inputs, output: patches.append(len(output))
    )
    first = [results(actor, batch) for batch in batches]
    # 4 x 4 patches of one picture and 4 x 6 of the other.
    assert patches == [16 + 24]
    # Each of a prompt's two samples has its images.
    assert actor.take_feature_counts() == FeatureCounts(needed=8, computed=2, kept_bytes=process_store(2**28).nbytes)
    again = [results(actor, batch) for batch in batches]
    assert patches == [16 + 24]
    assert actor.take_feature_counts().metrics("policy")["image_cache/policy_found"] == 1.0
    for one, other in zip(first, again, strict=True):
        assert torch.equal(one, other)
    # One token of 64 numbers for 4 patches, and 64 bytes for each key.
    assert process_store(2**28).nbytes == (4 + 6) * 64 * 4 + 2 * 64


def test_models_with_the_same_tower_find_each_others_features_and_with_another_none(folder, batches):
    policy, reference = make_actor(folder, **FROZEN), make_actor(folder, trained=False, image_cache_gib=0.25)
    other = make_actor(folder, trained=False, image_cache_gib=0.25)
    with torch.no_grad():
        next(other.model.model.visual.blocks.parameters()).mul_(1.5)
    expected = results(policy, batches[0])
    assert torch.equal(results(reference, batches[0]), expected)
    assert not torch.equal(results(other, batches[0]), expected)
    assert [actor.take_feature_counts().computed for actor in (policy, reference, other)] == [2, 0, 2]


def test_new_weights_make_new_features_once_the_model_is_told(folder, batches):
    actor, plain = make_actor(folder, trained=False, image_cache_gib=0.25), make_actor(folder)
    before = results(actor, batches[0])
    with torch.no_grad():
        for model in (actor.model, plain.model):
            model.model.visual.merger.mlp[0].weight.mul_(1.5)
    actor.forget_features()
    after = results(actor, batches[0])
    assert (after - before).abs().max() > 100 * ROUNDING
    # The tower gets two pictures of three, of which two are equal: sums may be rounded in another order.
    torch.testing.assert_close(after, results(plain, batches[0]), atol=ROUNDING, rtol=0)


@pytest.mark.parametrize(
    "settings",
    [
        {"image_cache_gib": 0.25},
        {"freeze_visual_encoder": True, "image_cache_gib": 0.0},
        {"freeze_visual_encoder": True},
        {"freeze_prefix": ("model.visual.merger.",), "image_cache_gib": 0.25},
        # The projector is a part of this tower.
        {"freeze_prefix": ("model.visual.blocks.", "model.visual.patch_embed."), "image_cache_gib": 0.25},
    ],
)
def test_features_of_a_tower_that_is_trained_and_those_that_nobody_asks_for_are_not_kept(folder, settings):
    assert make_actor(folder, **settings).features is None
