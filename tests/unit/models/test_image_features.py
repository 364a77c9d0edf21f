from pathlib import Path

import pytest
import torch
from helpers.conversations import message, picture
from helpers.packed_batches import Batch, groups, log_probs_of
from helpers.tiny_models import encode, make_actor

from lmm_r1.lmm_kits import get_kit
from lmm_r1.models.image_features import LINE, FeatureCounts, FeatureStore, _numbers, fingerprints

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
    # Each of a prompt's two samples has its images; a token of 64 numbers is kept for 4 patches.
    assert actor.take_feature_counts() == FeatureCounts(needed=8, computed=2, kept_bytes=(4 + 6) * 64 * 4)
    again = [results(actor, batch) for batch in batches]
    assert patches == [16 + 24]
    assert actor.take_feature_counts().metrics("policy")["image_cache/policy_found"] == 1.0
    for one, other in zip(first, again, strict=True):
        assert torch.equal(one, other)


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


def test_the_oldest_features_go_first_and_what_is_larger_than_the_limit_is_not_kept():
    store = FeatureStore(limit=5 * 64)

    def kept(*keys: int) -> list[int]:
        found = {key: store.find((key,), device=torch.device("cpu")) for key in keys}
        assert all(parts is None or (parts[0] == key).all() for key, parts in found.items())
        return [key for key, parts in found.items() if parts is not None]

    for key, lines in ((1, 2), (2, 1), (3, 2), (4, 6)):
        store.keep((key,), (torch.full((lines, 16), float(key)),))
    assert (kept(1, 2, 3, 4), store.nbytes) == ([1, 2, 3], 5 * 64)
    store.keep((5,), (torch.full((3, 16), 5.0),))
    assert (kept(1, 2, 3, 5), store.nbytes) == ([3, 5], 5 * 64)
    store.clear()
    assert (kept(3, 5), store.nbytes) == ([], 0)


def wrapped(value: int) -> int:
    """Return a whole number as one of 64 bits with a sign."""
    return (value + 2**63) % 2**64 - 2**63


def sums(words: list[int], round_of: int) -> list[int]:
    """Return both hashes of one line, by whole numbers of Python."""
    rows = _numbers("cpu")[round_of].tolist()
    return [wrapped(sum(number * word for number, word in zip(row, words, strict=False))) for row in rows]


def test_a_fingerprint_is_a_sum_of_products_of_words_and_then_of_sums():
    short = [3, -7, 32767, -32768]
    assert fingerprints([torch.tensor(short, dtype=torch.int16)]) == [tuple(sums(short, 0))]
    words = torch.arange(LINE + 2, dtype=torch.int16)
    first, second = sums(words[:LINE].tolist(), 0), sums(words[LINE:].tolist(), 0)
    pieces = torch.tensor([first, second]).view(torch.int16).flatten().tolist()
    assert fingerprints([words]) == [tuple(sums(pieces, 1))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.bool, torch.int64])
def test_equal_contents_have_one_fingerprint_and_any_other_number_another(dtype):
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(0, 2, (3, 50, 70), generator=generator).to(dtype)
    found = fingerprints([values])
    assert fingerprints([values.transpose(1, 2).contiguous().transpose(1, 2)]) == found
    for place in torch.randperm(values.numel(), generator=generator)[:40].tolist():
        other = values.clone()
        other.view(-1)[place] = 1 - values.view(-1)[place].long()
        found += fingerprints([other])
    assert len(set(found)) == 41
    assert fingerprints([]) == []
    assert len(fingerprints([torch.empty(0, 4)])) == 1
