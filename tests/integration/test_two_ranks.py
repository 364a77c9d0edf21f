"""Two processes, one with texts and one with images: a step of theirs is the step of one process that sees it all."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.launched_ranks import launch_cases, results_of
from helpers.tiny_models import BALANCED_KITS
from helpers.two_ranks import RANKS, WAYS, Case, Step, one_process

from lmm_r1.lmm_kits import KITS, get_kit

# Images per prompt, by rank and micro-batch: rank 0 has none at all.
TEXT_AND_IMAGES = (((0,), (0,)), ((1,), (3,)))
TEXTS = (((0,), (0,)), ((0,), (0,)))
# Both ranks have images in one micro-batch, and none in another; the first also has a text beside them.
UNEVEN = (((0, 1), (0,)), ((3,), (2,)))
# The same with fewer, for an architecture whose smallest image has hundreds of tokens.
LARGE_IMAGES = {
    "phi4_multimodal": {TEXT_AND_IMAGES: (((0,), (0,)), ((1,), (1,))), UNEVEN: (((0, 1), (0,)), ((2,), (1,)))}
}
# Rank 0 has images and videos in one pass, and rank 1 images alone; then videos alone, and texts alone.
MIXED = {"images": (((1, 2), (0,)), ((2,), (0,))), "videos": (((1, 2), (2,)), ((0,), (0,)))}
# In the second micro-batch rank 0 has features of all its images, and rank 1 of none; in ways to come, both have.
KEPT = {"images": (((1, 0), (1,)), ((0,), (2,))), "kept_features_gib": 0.1}
KIT = "qwen2_5_vl"
# One without images, one with bidirectional attention to them, one with M-RoPE, one with hundreds of tokens an image.
WHOLE = frozenset({"llm", "gemma3", KIT, "phi4_multimodal"})
VARIANTS: dict[str, dict[str, object]] = {
    "other numbers of images": {"images": UNEVEN},
    "a frozen vision tower": {"settings": {"freeze_visual_encoder": True}},
    "LoRA": {"settings": {"lora_rank": 4}},
    "checkpointing": {"checkpointing": {"use_reentrant": False}},
    "reentrant checkpointing": {"checkpointing": {"use_reentrant": True}, "images": UNEVEN},
    "LoRA with reentrant checkpointing": {"settings": {"lora_rank": 4}, "checkpointing": {"use_reentrant": True}},
    "small weights kept whole": {"keeps_small_weights": True},
    "not trained": {"trained": False},
    "kept features": {**KEPT, "settings": {"freeze_visual_encoder": True}},
    "kept features with LoRA and reentrant checkpointing": {
        **KEPT,
        "settings": {"lora_rank": 4},
        "checkpointing": {"use_reentrant": True},
    },
    "kept features, not trained": {**KEPT, "trained": False},
    "kept features of videos": {**MIXED, "settings": {"freeze_visual_encoder": True}, "kept_features_gib": 0.1},
    "videos": MIXED,
    "videos with a frozen vision tower": {**MIXED, "settings": {"freeze_visual_encoder": True}},
    "videos with reentrant checkpointing": {**MIXED, "checkpointing": {"use_reentrant": True}},
    "videos, not trained": {**MIXED, "trained": False},
}
# Of ZeRO-2, which shares out gradients alone: what has others, or fewer, or gets them from a second forward pass.
SHARED_GRADIENTS = (
    "other numbers of images",
    "a frozen vision tower",
    "LoRA with reentrant checkpointing",
    "small weights kept whole",
    "kept features",
)
# All is in fp64, whose eps is 1.1e-16: sums over 1,000 tokens and numbers, in some ten layers after one another, may be
# off by n x eps = 1e-12 of the largest term. One rounding to fp32 anywhere would show as 6e-8.
DOUBLE = 1e-12
# What ZeRO-2 shares out are gradients, whatever model they are of; in ZeRO-3 the ranks must call its parts alike.
NAMES = [f"{kit}, ZeRO-{stage}" for kit in KITS for stage in (2, 3) if stage == 3 or kit in WHOLE]
NAMES += [f"{variant}, ZeRO-3" for variant in VARIANTS] + [f"{variant}, ZeRO-2" for variant in SHARED_GRADIENTS]
NAMES += [f"{kit}, videos, ZeRO-3" for kit in KITS if get_kit(kit).takes_videos and kit != KIT]
NAMES += ["phi4_multimodal, other numbers of images, ZeRO-3"]


def case_of(name: str, *, folder_of: Callable[[str], Path]) -> Case:
    kind, _, stage = name.rpartition(", ZeRO-")
    kit, _, variant = kind.partition(", ")
    if kit not in KITS:
        kit, variant = KIT, kind
    images = TEXT_AND_IMAGES if get_kit(kit).takes_images else TEXTS
    changes = {"images": images} | (VARIANTS[variant] if variant else {})
    if kit in BALANCED_KITS:
        changes["settings"] = {"experts_implementation": "eager"}
    changes["images"] = LARGE_IMAGES.get(kit, {}).get(changes["images"], changes["images"])
    # The ways differ in what the model computes with whole weights, which it has at all times but in ZeRO-3. Packed by
    # themselves, samples go through what shared prefixes do.
    ways = ("shared",) if stage == "2" else WAYS if kit in WHOLE else ("padded", "shared")
    return Case(**{"kit": kit, "folder": folder_of(kit), "stage": int(stage), "ways": ways} | changes)


@pytest.fixture(scope="module")
def steps_of(
    tiny_checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[list[Step], list[Step]]]:
    """A function from a case to the steps of one process and of two, which make those of all cases one after another."""
    folder = tmp_path_factory.mktemp("two") / "ranks"
    cases = [case_of(name, folder_of=tiny_checkpoint) for name in NAMES]
    processes = launch_cases("helpers.two_ranks", cases, folder, count=RANKS)
    # One process knows of no ZeRO stage.
    apart = {str(replace(case, stage=0)): case for case in cases}
    alone = {key: one_process(case) for key, case in apart.items()}
    together = results_of(processes, folder)
    steps = [(alone[str(replace(case, stage=0))], there) for case, there in zip(cases, together, strict=True)]
    return lambda name: steps[NAMES.index(name)]


def largest_difference(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert set(got) == set(expected)
    return max((float((got[name] - value).abs().max()) for name, value in expected.items()), default=0.0)


@pytest.mark.parametrize("name", NAMES)
def test_a_step_of_two_processes_is_that_of_one(name, steps_of):
    for alone, together in zip(*steps_of(name), strict=True):
        largest = max((float(value.abs().max()) for value in alone.gradients.values()), default=0.0)
        assert {values.dtype for values in (together.log_probs, *together.gradients.values())} == {torch.float64}
        limit = DOUBLE * float(alone.log_probs.abs().max())
        torch.testing.assert_close(together.log_probs, alone.log_probs, atol=limit, rtol=0)
        assert largest_difference(together.gradients, alone.gradients) <= DOUBLE * largest
        assert largest_difference(together.weights, alone.weights) <= DOUBLE
