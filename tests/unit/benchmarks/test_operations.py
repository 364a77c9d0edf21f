"""The operations of an update, counted by hand."""

from gpu_stages.operations import GroupWork, ModelSizes, useful_operations

# One number each, so that every part of a sum shows.
SIZES = ModelSizes(
    text_weights=100,
    head_weights=50,
    text_layers=2,
    text_width=8,
    patch_weights=10,
    merged_weights=40,
    patches_per_token=4,
    whole_layers=1,
    window_layers=3,
    vision_width=4,
    window_patches=2,
)


def test_a_group_of_text_counts_its_prompt_once():
    group = GroupWork(prompt=3, responses=(2, 1))
    # 6 tokens and 3 targets; the prompt sees 1 + 2 + 3, the responses (3 + 1) + (3 + 2) and 3 + 1.
    weights, pairs = 6 * 100 + 3 * 50, 6 + 9 + 4
    assert group.tokens == 6
    assert useful_operations(SIZES, [group]) == 6 * weights + 12 * 2 * 8 * pairs == 8148


def test_an_image_counts_per_patch_and_per_pair_of_patches_in_its_windows():
    group = GroupWork(prompt=1, responses=(1,), images=(8,))
    weights = 2 * 100 + 1 * 50 + 8 * 10 + 2 * 40
    # 8 patches see 8 in one layer, and 2 in three others.
    assert useful_operations(SIZES, [group]) == 6 * weights + 12 * (2 * 8 * (1 + 2) + 4 * 8 * (8 + 3 * 2)) == 8412


def test_an_image_smaller_than_a_window_sees_itself_alone():
    one, none = (GroupWork(prompt=1, responses=(1,), images=images) for images in ((1,), ()))
    assert useful_operations(SIZES, [one]) - useful_operations(SIZES, [none]) == 6 * (10 + 10) + 12 * 4 * 4 == 312
