"""Features of images that are kept, for every kit: what the model computes with them is what it computes without."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.conversations import clip, message, picture
from helpers.packed_batches import Batch, Results, groups, together
from helpers.tables import kits_with
from helpers.tiny_models import make_actor

from lmm_r1.lmm_kits import EncodedPrompt, get_kit
from lmm_r1.models.actor import KitActor

IMAGE_KITS = kits_with("images")
# Those whose tower and projector are two calls.
SEPARATE = [name for name in IMAGE_KITS if not get_kit(name).feature_points[-1].projects]
GIB = 0.125
# Of sums in another order in single precision, of log-probs of 4 and of gradients.
ROUNDING = 2e-5


def conversations(name: str) -> list[Any]:
    """Return prompts with a text, a picture, two others, and a video where the kit takes one; then others with some of them."""
    first = [[message("user", "What is 12 + 34?")], [message("user", picture(84, 56), "Which digit?")]]
    second = [[message("user", picture(56, 56), "or", picture(84, 56), "?")]]
    if get_kit(name).takes_videos:
        first.append([message("user", clip(2, 84, 56), "Which digit?")])
        second.append([message("user", clip(4, 56, 84), picture(112, 56), "Which digit?")])
    return [first, second]


@pytest.fixture
def batches_of(prompts_of: Callable[..., list[EncodedPrompt]]) -> Callable[[str], list[Batch]]:
    """A function from a kit's name to two batches of groups: of the second's images, the first has one."""

    def batches(name: str) -> list[Batch]:
        prompts = [prompts_of(name, *part) for part in conversations(name)]
        return [Batch(tuple(groups(part, [(4, 2)] * len(part)))) for part in prompts]

    return batches


def tower_runs(actor: KitActor) -> list[str]:
    """Return a list that grows whenever a linear layer of the vision tower runs."""
    runs: list[str] = []
    for name, module in actor.model.named_modules():
        if isinstance(module, torch.nn.Linear) and f"{name}.weight".startswith(actor.kit.vision_prefixes):
            module.register_forward_hook(lambda module, inputs, output, name=name: runs.append(name))
    return runs


def assert_equal(found: Results, expected: Results) -> None:
    """Assert that two passes gave the same bits."""
    for one, other in zip(found.log_probs, expected.log_probs, strict=True):
        assert torch.equal(one, other)
    assert found.gradients.keys() == expected.gradients.keys()
    assert expected.gradients
    for name, value in expected.gradients.items():
        assert torch.equal(found.gradients[name], value), name


def assert_close(found: Results, expected: Results) -> None:
    for one, other in zip(found.log_probs, expected.log_probs, strict=True):
        torch.testing.assert_close(one, other, atol=ROUNDING, rtol=0)
    assert found.gradients.keys() == expected.gradients.keys()
    largest = max(float(value.abs().max()) for value in expected.gradients.values())
    for name, value in expected.gradients.items():
        torch.testing.assert_close(found.gradients[name], value, atol=ROUNDING * largest, rtol=0, msg=name)


def check(folder: Path, batches: list[Batch], settings: dict[str, Any]) -> None:
    """Compare a model that keeps features with one that does not, on batches that are all new, partly known and known."""
    plain, keeping = make_actor(folder, **settings), make_actor(folder, **settings, image_cache_gib=GIB)
    runs, first, second = tower_runs(keeping), *batches
    expected = [together(plain, batch) for batch in (first, second)]
    new = together(keeping, first)
    # An image that comes twice goes through the tower once, and sums may be rounded in another order.
    assert_close(new, expected[0])
    assert runs
    counts = keeping.take_feature_counts()
    # A small image is the same as the one tile that it is cut into.
    assert 0 < counts.computed <= counts.needed
    # What is new goes through the tower without what is known.
    assert_close(together(keeping, second), expected[1])
    counts = keeping.take_feature_counts()
    assert 0 < counts.computed < counts.needed
    runs.clear()
    assert_equal(together(keeping, first), new)
    assert_close(together(keeping, second), expected[1])
    assert not runs
    assert keeping.take_feature_counts().computed == 0


@pytest.mark.parametrize("name", IMAGE_KITS)
def test_kept_features_change_no_log_prob_and_no_gradient(tiny_checkpoint, batches_of, name):
    settings = {"freeze_visual_encoder": True, "packing_samples": True, "share_prefix": True}
    check(tiny_checkpoint(name), batches_of(name), settings)


@pytest.mark.parametrize("name", SEPARATE)
def test_a_projector_learns_from_kept_features_of_its_tower(tiny_checkpoint, batches_of, name):
    kit = get_kit(name)
    check(tiny_checkpoint(name), batches_of(name), {"freeze_prefix": kit.vision_prefixes})


@pytest.mark.parametrize("name", IMAGE_KITS)
def test_features_come_of_no_weights_but_those_of_tower_and_projector(tiny_checkpoint, batches_of, name):
    """Others may be trained: what is kept would be of theirs before."""
    actor = make_actor(tiny_checkpoint(name), freeze_visual_encoder=True, image_cache_gib=GIB)
    plain = make_actor(tiny_checkpoint(name), freeze_visual_encoder=True)
    batch = batches_of(name)[0]
    together(actor, batch)
    with torch.no_grad():
        for model in (actor.model, plain.model):
            for weight in model.parameters():
                if weight.requires_grad:
                    weight.add_(0.01)
    computed = actor.take_feature_counts().computed
    # Both samples of a prompt have its images, which go through the tower once where they are kept.
    assert_close(together(actor, batch), together(plain, batch))
    assert computed
    assert actor.take_feature_counts().computed == 0
