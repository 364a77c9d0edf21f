"""Branches that have turns in common against the branches one by one, for every kit: log-probs, entropies, gradients."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from helpers.conversations import clip, message, picture
from helpers.packed_batches import (
    DOUBLE,
    SINGLE,
    Actors,
    Batch,
    check,
    fork,
    log_probs_of,
    make_actors,
    one_by_one,
    together,
    zeros,
)
from helpers.tables import SOME, kits_with

from lmm_r1.lmm_kits import KITS, EncodedPrompt, get_kit

IMAGE_KITS = kits_with("images")
TEXT = [message("user", "What is 12 + 34?")]
ONE_IMAGE = [message("user", picture(84, 56), "Which digit is this?")]
CROP, CROPS = [message("user", picture(56, 84))], [message("user", picture(56, 56), "and", picture(84, 56))]
# For an architecture whose smallest image has hundreds of tokens, which the cost grows with the square of.
LARGE_IMAGES = frozenset({"phi4_multimodal"})
WORDS, MORE_WORDS = [message("user", "Are you sure?")], [message("user", "Once more.")]
SMALL = [message("user", picture(56, 56), "?")]
VIDEO = [message("user", clip(2, 56, 84), "?")]


@pytest.fixture(autouse=True)
def nodes_of_single_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmm_r1.data.sample.LEAST_SHARED", 1)


@pytest.fixture(scope="module")
def load(tiny_checkpoint: Callable[[str], Path]) -> Callable[[str], Actors]:
    return cache(lambda name: make_actors(tiny_checkpoint(name)))


@pytest.fixture(scope="module")
def tree_of(prompts_of: Callable[..., list[EncodedPrompt]]) -> Callable[[str], Batch]:
    """A function from a kit's name to two trees, one behind a text, and a sample by itself, with pictures if it takes any."""

    @cache
    def batch(name: str) -> Batch:
        if name not in IMAGE_KITS:
            prompt, seen, other, alone = prompts_of(name, TEXT, WORDS, MORE_WORDS, [*TEXT, *WORDS])
            return Batch((*fork(prompt, seen, other).samples, *fork(alone, other, seen).samples))
        if name in LARGE_IMAGES:
            prompt, seen, other, text, words = prompts_of(name, TEXT, CROP, SMALL, ONE_IMAGE, WORDS)
            return Batch((*fork(prompt, seen, other).samples, *fork(text, words, words).samples))
        prompt, seen, other = prompts_of(name, ONE_IMAGE, CROP, VIDEO if get_kit(name).takes_videos else CROPS)
        text, words = prompts_of(name, TEXT, WORDS)
        return Batch((*fork(prompt, seen, other).samples, *fork(text, seen, words).samples))

    return batch


@pytest.mark.parametrize("name", KITS)
def test_branches_that_share_turns_are_the_branches_one_by_one(load, tree_of, name):
    batch, actors = tree_of(name), load(name)
    with actors.in_double_precision():
        exact = one_by_one(actors.stock, batch)
        with actors.running("shared", mode="train") as actor:
            actor.computed_tokens = 0
            mine = together(actor, batch)
            computed = actor.computed_tokens
    assert mine.gradients.keys() == exact.gradients.keys()
    check(mine, exact, tolerance=DOUBLE, zero=zeros(exact.gradients))
    unique = {
        (
            sample.prompt,
            tuple(sample.token_ids[: end + 1]),
            tuple(item.key for item in sample.media if item.start <= end),
        )
        for sample in batch.samples
        for end in range(len(sample.token_ids))
    }
    # Each token is there once behind what stands before it.
    assert len(unique) == computed < sum(len(sample.token_ids) for sample in batch.samples) / 2

    theirs = one_by_one(actors.stock, batch)
    with actors.running("shared", mode="eval") as actor:
        mine = together(actor, batch)
    assert mine.gradients.keys() == theirs.gradients.keys()
    check(mine, theirs, tolerance=SINGLE, zero=zeros(exact.gradients))


@pytest.mark.parametrize("name", sorted(SOME & set(IMAGE_KITS)))
def test_pixels_that_branches_share_change_what_is_behind_them_and_nothing_else(load, prompts_of, name):
    prompt, seen, other = prompts_of(name, ONE_IMAGE, CROP, CROPS)
    batch = fork(prompt, seen, other)
    noise = torch.Generator().manual_seed(5)
    changed = {
        key: value + torch.randn(value.shape, generator=noise) if "pixel_values" in key else value
        for key, value in seen.media.items()
    }
    after = Batch(
        tuple(
            replace(
                sample,
                media=tuple(
                    replace(item, tensors=changed) if item.tensors is seen.media else item for item in sample.media
                ),
            )
            for sample in batch.samples
        )
    )
    with load(name).running("shared") as actor:
        before, later = log_probs_of(actor, batch), log_probs_of(actor, after)
    for sample, old, new in zip(batch.samples, before, later, strict=True):
        starts = [item.start for item in sample.media if item.tensors is seen.media]
        first = sum(sample.loss_mask[: starts[0] - len(sample.prompt)]) if starts else len(old)
        torch.testing.assert_close(new[:first], old[:first], atol=1e-6, rtol=0)
        assert not starts or (new[first:] - old[first:]).abs().max() > 1e-3
