"""Packed sequences and shared prefixes against the samples one by one, for every kit: log-probs, entropies and gradients."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.conversations import clip, message, picture
from helpers.packed_batches import (
    DOUBLE,
    SINGLE,
    Actors,
    Batch,
    Results,
    Sample,
    ShapeLog,
    check,
    groups,
    log_probs_of,
    make_actors,
    one_by_one,
    shuffled,
    together,
    zeros,
)
from helpers.tables import by_turns, kits_with, table
from helpers.tiny_models import LONGROPE, with_longrope

from lmm_r1.data.sample import PlacedMedia
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits import KITS, EncodedPrompt, LmmKit, Media, get_kit
from lmm_r1.lmm_kits.delta_rule import linear_layers
from lmm_r1.models.packed import attention
from lmm_r1.models.packed.layout import PackedLayout
from lmm_r1.models.packed.self_check import check_packing

IMAGE_KITS = kits_with("images")
CAUSAL = LmmKit.bidirectional_token_ids
# The tiny model of the kit whose full attention is causal has none; tests/unit/lmm_kits/test_gemma4.py makes one that has.
BIDIRECTIONAL_KITS = [
    name
    for name in KITS
    if type(get_kit(name)).bidirectional_token_ids is not CAUSAL and not get_kit(name).bidirectional_within_window
]

TEXT = [message("user", "What is 12 + 34?")]
OTHER_TEXT = [message("system", "Think first."), message("user", "And 46 + 1?")]
ONE_IMAGE = [message("user", picture(84, 56), "Which digit is this?")]
TWO_IMAGES = [message("user", picture(56, 56), "or", picture(112, 56), "?")]
THREE_IMAGES = [
    message("user", picture(56, 84), "Which digit?"),
    message("assistant", "<answer>4</answer>"),
    message("user", "And these?", picture(84, 56), picture(56, 56)),
]
# For an architecture whose smallest image has hundreds of tokens, which the cost grows with the square of.
TWO_IMAGES_OF_TURNS = [*THREE_IMAGES[:2], message("user", "And this?", picture(84, 56))]
LARGE_IMAGES = frozenset({"phi4_multimodal"})
VIDEO = [message("user", clip(4, 84, 56), "Which digit?")]
VIDEO_AND_IMAGE = [message("user", clip(2, 56, 84), "or", picture(84, 56), "?")]

# What trains: all weights, all but the vision tower's, adapters.
VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "frozen": {"freeze_visual_encoder": True},
    "lora": {"lora_rank": 4, "lora_alpha": 8},
}
WAYS = ("padded", "packed", "shared")
TOGETHER = [(name, "packed") for name in kits_with("packed")] + [
    (name, "shared") for name in kits_with("shared prefix")
]
PASSES = [
    ("padded", "left", "eval"),
    ("padded", "right", "train"),
    ("packed", "right", "eval"),
    ("packed", "left", "train"),
    ("shared", "left", "eval"),
    ("shared", "right", "train"),
]
# Every variant with and without the two kinds of gradient checkpointing, packed or shared.
TRAINED = table("contracts/kit_packing", "trained")


@pytest.fixture(scope="module")
def load(tiny_checkpoint: Callable[[str], Path]) -> Callable[[str, str], Actors]:
    return cache(lambda name, variant: make_actors(tiny_checkpoint(name), **VARIANTS[variant]))


@pytest.fixture(scope="module")
def batch_of(prompts_of: Callable[..., list[EncodedPrompt]]) -> Callable[[str], Batch]:
    """A function from a kit's name to its batch of groups, whose samples do not stand beside one another."""

    @cache
    def batch(name: str) -> Batch:
        # A prompt comes again: texts become one group, images that were encoded twice do not.
        conversations, lengths = [TEXT, OTHER_TEXT, TEXT], [(5, 1, 9), (4, 7), (3, 0)]
        if name in IMAGE_KITS:
            conversations = [TEXT, ONE_IMAGE, TWO_IMAGES, THREE_IMAGES, TEXT, ONE_IMAGE]
            lengths = [(5, 1, 9), (4, 1, 7), (6,), (2, 3), (3, 0), (8,)]
        if name in LARGE_IMAGES:
            conversations[2:4], lengths[2:4] = [TWO_IMAGES_OF_TURNS], [(2, 3)]
        samples = groups(prompts_of(name, *conversations), lengths, gap=True)
        # The loss takes nothing of one that only fills up a batch.
        samples.append(replace(samples[0], loss_mask=(False,) * len(samples[0].response)))
        return shuffled(samples)

    return batch


@pytest.fixture(scope="module")
def alone(load: Callable[..., Actors], batch_of: Callable[[str], Batch]) -> Callable[[str, str], Results]:
    """A function from a kit's name and a variant to what the samples of its batch give one by one."""
    return cache(lambda name, variant: one_by_one(load(name, variant).stock, batch_of(name)))


@pytest.fixture(scope="module")
def doubles(load: Callable[..., Actors], batch_of: Callable[[str], Batch]) -> Callable[[str], dict[str, Results]]:
    """A function from a kit's name to its results in double precision: alone, packed and shared."""

    @cache
    def results(name: str) -> dict[str, Results]:
        actors, batch = load(name, "full"), batch_of(name)
        with actors.in_double_precision():
            ways = {"alone": one_by_one(actors.stock, batch)}
            for way in ("packed", "shared"):
                with actors.running(way) as actor:
                    ways[way] = together(actor, batch)
        return ways

    return results


@pytest.fixture(scope="module")
def zero(doubles: Callable[[str], dict[str, Results]]) -> Callable[[str], set[str]]:
    """A function from a kit's name to the parameters whose gradient is zero but for rounding."""

    return lambda name: zeros(doubles(name)["alone"].gradients)


@pytest.mark.parametrize(("name", "way", "side", "mode"), by_turns(KITS, PASSES, turns=2))
def test_log_probs_entropies_and_gradients_are_those_of_the_samples_one_by_one(
    load, batch_of, alone, zero, name, way, side, mode
):
    theirs = alone(name, "full")
    with load(name, "full").running(way, mode=mode) as actor:
        mine = together(actor, batch_of(name))
    assert mine.gradients.keys() == theirs.gradients.keys()
    check(mine, theirs, tolerance=SINGLE, zero=zero(name))


@pytest.mark.parametrize(
    ("name", "variant", "way", "checkpointing"),
    [case for case in by_turns(KITS, TRAINED, turns=len(TRAINED)) if case[0] in IMAGE_KITS or case[1] != "frozen"],
)
def test_so_they_are_with_gradient_checkpointing_a_frozen_vision_tower_and_adapters(
    load, batch_of, alone, zero, monkeypatch, name, variant, way, checkpointing
):
    layouts = layouts_seen(monkeypatch)
    with load(name, variant).running(way, mode="train") as actor:
        if checkpointing is not None:
            actor.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
        mine = together(actor, batch_of(name))
        if checkpointing is not None:
            actor.gradient_checkpointing_disable()
    text = actor.model_config.get_text_config()
    layers = text.num_hidden_layers - linear_layers(text)
    assert len(layouts) == (layers if checkpointing is None else 2 * layers)

    # What a frozen tower lacks are its own gradients; nothing else is different.
    theirs = alone(name, "lora" if variant == "lora" else "full")
    towers = (*actor.kit.vision_prefixes, *actor.kit.projector_prefixes)
    trained = {key for key in theirs.gradients if variant != "frozen" or not key.startswith(towers)}
    assert mine.gradients.keys() == trained
    check(mine, theirs, tolerance=SINGLE, zero=zero(name))


def layouts_seen(monkeypatch: pytest.MonkeyPatch) -> list[PackedLayout]:
    """Return a list to which every run of an attention layer over a packed sequence adds its layout."""
    layouts, by_segment = [], attention._by_segment

    def noting(query: Any, key: Any, value: Any, layout: PackedLayout, **settings: Any) -> torch.Tensor:
        layouts.append(layout)
        return by_segment(query, key, value, layout, **settings)

    monkeypatch.setattr(attention, "_by_segment", noting)
    return layouts


@pytest.mark.parametrize(("name", "way"), TOGETHER)
def test_in_double_precision_they_are_equal_to_the_last_digits(doubles, zero, name, way):
    """Also what models compute in single precision whatever they get, norms above all, is computed in double here.

    Else the gradient of a shared prefix would be rounded to single precision after it is summed over the samples, that
    of its copies before: they differ by 1e-7.
    """
    results = doubles(name)
    assert results[way].gradients.keys() == results["alone"].gradients.keys()
    check(results[way], results["alone"], tolerance=DOUBLE, zero=zero(name))


@pytest.mark.parametrize(("name", "way"), by_turns(KITS, [("padded",), ("shared",)], turns=2))
def test_without_logits_they_are_those_of_the_logits(load, batch_of, zero, monkeypatch, name, way):
    actors, batch = load(name, "full"), batch_of(name)
    with actors.in_double_precision(), actors.running(way) as actor:
        mine = together(actor, batch)
        assert not actor.changes_logits
        monkeypatch.setattr(actor, "changes_logits", True)
        theirs = together(actor, batch)
    assert mine.gradients.keys() == theirs.gradients.keys()
    check(mine, theirs, tolerance=DOUBLE, zero=zero(name))


@pytest.mark.parametrize(("name", "way"), by_turns(IMAGE_KITS, [(way,) for way in WAYS], turns=len(WAYS)))
def test_pixels_change_the_log_probs_of_their_own_group_and_no_others(load, batch_of, name, way):
    batch = batch_of(name)
    images = next(sample.media for sample in batch.samples if sample.media is not None)
    changed = [sample.media is images for sample in batch.samples]
    other = with_other_pixels(images)
    pairs = zip(batch.samples, changed, strict=True)
    after = Batch(tuple(replace(sample, media=other) if change else sample for sample, change in pairs))
    with load(name, "full").running(way) as actor:
        check_changes(log_probs_of(actor, batch), log_probs_of(actor, after), changed=changed)


def with_other_pixels(media: Media) -> Media:
    generator = torch.Generator().manual_seed(5)
    pixels = {key: value for key, value in media.items() if "pixel_values" in key}
    assert pixels
    return {**media, **{key: value + torch.randn(value.shape, generator=generator) for key, value in pixels.items()}}


def check_changes(before: list[torch.Tensor], after: list[torch.Tensor], *, changed: list[bool]) -> None:
    for old, new, change in zip(before, after, changed, strict=True):
        if change:
            assert (new - old).abs().max() > 1e-3
        else:
            torch.testing.assert_close(new, old, atol=1e-6, rtol=0)


@pytest.mark.parametrize(("name", "way"), by_turns(KITS, [("packed",), ("shared",)], turns=2))
def test_no_mask_and_no_other_tensor_is_as_wide_and_as_high_as_the_sequence(load, batch_of, monkeypatch, name, way):
    layouts = layouts_seen(monkeypatch)
    with load(name, "full").running(way, mode="train") as actor, ShapeLog() as log:
        log_probs_of(actor, batch_of(name), grad=True)
    (layout,) = set(layouts)
    assert layout.length > max(layout.lengths) + 10
    assert not [shape for shape in log.shapes if shape.count(layout.length) > 1]
    sizes = {(segment.length, layout.prefix_length(segment) + segment.length) for segment in layout.segments}
    masks = [made for (kind, *_), made in layout._made.items() if kind == "mask"]
    assert {tuple(mask.shape) for mask in masks} <= sizes


@pytest.mark.parametrize("name", IMAGE_KITS)
def test_the_filler_segment_changes_nothing_but_gives_the_vision_tower_gradients_of_zero(
    load, prompts_of, monkeypatch, name
):
    batch = shuffled(groups(prompts_of(name, TEXT, OTHER_TEXT), [(5, 1, 9), (4,)]))
    actors = load(name, "full")
    with actors.in_double_precision():
        theirs = one_by_one(actors.stock, batch)
        # As on two ranks, where the other one may hold images.
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_world_size", lambda *group: 2)
        with actors.running("shared", mode="train") as actor:
            mine = together(actor, batch)
    towers = (*actor.kit.vision_prefixes, *actor.kit.projector_prefixes)
    filled = {key: value for key, value in mine.gradients.items() if key.startswith(towers)}
    assert not [key for key in theirs.gradients if key.startswith(towers)]
    weights = actor.model.named_parameters()
    assert filled.keys() == {key for key, weight in weights if weight.requires_grad and key.startswith(towers)}
    assert not [key for key, value in filled.items() if torch.count_nonzero(value)]
    rest = {key: value for key, value in mine.gradients.items() if key not in filled}
    assert rest.keys() == theirs.gradients.keys()
    check(replace(mine, gradients=rest), theirs, tolerance=DOUBLE, zero=zeros(theirs.gradients))


@pytest.mark.parametrize("name", kits_with("video"))
def test_groups_with_videos_are_packed_like_those_with_images(load, prompts_of, zero, name):
    prompts = prompts_of(name, VIDEO_AND_IMAGE, TEXT, VIDEO, ONE_IMAGE)
    batch = shuffled(groups(prompts, [(4, 1), (3, 5), (2, 6), (1,)]))
    actors = load(name, "full")
    theirs = one_by_one(actors.stock, batch)
    for way, _side in (("padded", "left"), ("packed", "left"), ("shared", "right")):
        with actors.running(way, mode="train") as actor:
            mine = together(actor, batch)
        assert mine.gradients.keys() == theirs.gradients.keys()
        check(mine, theirs, tolerance=SINGLE, zero=zero(name))


@pytest.mark.parametrize(("name", "way"), by_turns(IMAGE_KITS, [(way,) for way in WAYS], turns=len(WAYS)))
def test_images_of_turns_encoded_one_by_one_are_those_of_the_conversation_in_one(load, prompts_of, name, way):
    """What the processor makes of all images at once, padded, is the truth here."""
    first, whole = prompts_of(name, THREE_IMAGES[:1], THREE_IMAGES)
    (second,) = prompts_of(name, THREE_IMAGES[2:])
    start = len(first.token_ids)
    assert whole.token_ids[:start] == first.token_ids
    response = (*whole.token_ids[start:], 30, 31, 32)
    # The loss takes the first token of the answer between the images, and what follows them.
    loss_mask = tuple(index == 0 or index >= len(response) - 3 for index in range(len(response)))
    at_once = Sample(prompt=tuple(first.token_ids), response=response, loss_mask=loss_mask, media=whole.media)
    by_turn = replace(at_once, media=(PlacedMedia(0, first.media), PlacedMedia(start + 1, second.media)))
    other = replace(at_once, response=(33, 34), loss_mask=(True, True), media=first.media)
    actors = load(name, "full")
    expected = [*log_probs_of(actors.stock, Batch((at_once,))), *log_probs_of(actors.stock, Batch((other,)))]
    with actors.running(way) as actor:
        log_probs = log_probs_of(actor, Batch((by_turn, other)))
    torch.testing.assert_close(log_probs, expected, atol=SINGLE, rtol=0)


@pytest.mark.parametrize("name", LONGROPE)
def test_a_sample_takes_the_factors_of_its_run_whatever_it_is_packed_with(tiny_checkpoint, prompts_of, tmp_path, name):
    """Transformers turns a whole batch by the long factors of `longrope` as soon as one of its samples is long."""
    prompts = prompts_of(name, TEXT, ONE_IMAGE if name in IMAGE_KITS else OTHER_TEXT)
    # The text with its shorter responses is within the limit; with its longer ones, and images, it is not.
    limit = len(prompts[0].token_ids) + 6
    batch = shuffled(groups(prompts, [(5, 6, 7, 30), (4, 40)]))
    folder = with_longrope(tiny_checkpoint(name), limit, copy=tmp_path / name)
    actors = make_actors(folder, max_len=limit + 1)
    with actors.in_double_precision():
        alone = one_by_one(actors.stock, batch)
        for way in WAYS:
            with actors.running(way) as actor:
                mine = together(actor, batch)
            assert mine.gradients.keys() == alone.gradients.keys()
            check(mine, alone, tolerance=DOUBLE, zero=zeros(alone.gradients))
    place = min(range(len(batch.samples)), key=lambda index: len(batch.samples[index].token_ids))
    of_short_run = log_probs_of(make_actors(folder, max_len=limit).stock, Batch(batch.samples[place : place + 1]))[0]
    assert (of_short_run - alone.log_probs[place]).abs().max() > 1e-2, "the factors make no difference"


@pytest.mark.parametrize("name", KITS)
def test_the_check_at_start_up_passes_and_catches_attention_that_knows_no_packing(load, name):
    with load(name, "full").running("shared") as actor:
        check_packing(actor)
        text = actor.model_config.get_text_config()
        text._attn_implementation = "sdpa"
        try:
            with pytest.raises(UserError, match=f"{actor.model_config.model_type} does not run on packed sequences"):
                check_packing(actor)
        finally:
            text._attn_implementation = attention.PACKED_ATTENTION


@pytest.mark.parametrize("name", BIDIRECTIONAL_KITS)
def test_it_catches_images_whose_tokens_look_back_alone(load, monkeypatch, name):
    monkeypatch.setattr("lmm_r1.models.packed.packing._Parts._block_ids", lambda parts, token_ids: None)
    with load(name, "full").running("shared") as actor, pytest.raises(UserError, match="does not run on packed"):
        check_packing(actor)
