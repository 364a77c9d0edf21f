"""M-RoPE positions worked out by hand, of videos above all."""

from types import SimpleNamespace

import torch

from lmm_r1.lmm_kits.qwen_vl import IMAGE, TEXT, VIDEO, Grid, grids_of, mrope_positions


def positions(types, *, images=(), videos=(), mask=None):
    types = torch.tensor(types)
    mask = torch.ones_like(types) if mask is None else torch.tensor(mask)
    return mrope_positions(types, mask, {IMAGE: list(images), VIDEO: list(videos)}).tolist()


def grid(steps, rows, columns, interval=1.0):
    return Grid(steps=steps, rows=rows, columns=columns, interval=interval)


def test_an_image_counts_rows_and_columns_from_the_end_of_the_text():
    types = [[TEXT, TEXT, *[IMAGE] * 6, TEXT]]
    time, row, column = positions(types, images=[grid(1, 2, 3)])
    assert time == [[0, 1, 2, 2, 2, 2, 2, 2, 5]]
    assert row == [[0, 1, 2, 2, 2, 3, 3, 3, 5]]
    assert column == [[0, 1, 2, 3, 4, 2, 3, 4, 5]]


def test_text_goes_on_behind_the_time_of_a_video_where_that_reaches_furthest():
    types = [[TEXT, *[VIDEO] * 6, TEXT]]
    time, row, column = positions(types, videos=[grid(3, 1, 2, interval=4.0)])
    assert time == [[0, 1, 1, 5, 5, 9, 9, 10]]
    assert row == [[0, 1, 1, 1, 1, 1, 1, 10]]
    assert column == [[0, 1, 2, 1, 2, 1, 2, 10]]


def test_a_fraction_of_a_time_is_cut_only_after_the_steps_are_counted():
    types = [[*[VIDEO] * 5, TEXT]]
    time, _, _ = positions(types, videos=[grid(5, 1, 1, interval=0.75)])
    # 0, 0.75, 1.5, 2.25, 3
    assert time == [[0, 0, 1, 2, 3, 4]]


def test_a_video_with_text_between_its_steps_starts_each_step_anew():
    types = [[*[VIDEO] * 2, TEXT, *[VIDEO] * 2, TEXT, *[VIDEO] * 2, TEXT]]
    time, row, column = positions(types, videos=[grid(2, 1, 2), grid(1, 1, 2)])
    assert time == [[0, 0, 2, 3, 3, 5, 6, 6, 8]]
    assert row == [[0, 0, 2, 3, 3, 5, 6, 6, 8]]
    assert column == [[0, 1, 2, 3, 4, 5, 6, 7, 8]]


def test_each_row_of_a_padded_batch_takes_its_own_media():
    types = [[TEXT, IMAGE, TEXT, TEXT], [TEXT, TEXT, TEXT, TEXT], [TEXT, VIDEO, VIDEO, TEXT]]
    mask = [[1, 1, 1, 0], [0, 0, 1, 1], [1, 1, 1, 1]]
    time, _, column = positions(types, images=[grid(1, 1, 1)], videos=[grid(2, 1, 1, interval=2.0)], mask=mask)
    assert time == [[0, 1, 2, 0], [0, 0, 0, 1], [0, 1, 3, 4]]
    assert column == [[0, 1, 2, 0], [0, 0, 0, 1], [0, 1, 1, 4]]


def test_grids_are_counted_in_merged_patches_and_times_in_the_towers_tokens_per_second():
    vision = SimpleNamespace(spatial_merge_size=2, tokens_per_second=2)
    media = {
        "image_grid_thw": torch.tensor([[1, 4, 6]]),
        "video_grid_thw": torch.tensor([[3, 2, 8], [2, 2, 2]]),
        "second_per_grid_ts": torch.tensor([1.0, 0.25]),
    }
    assert grids_of(media, vision=vision) == {
        IMAGE: [grid(1, 2, 3)],
        VIDEO: [grid(3, 1, 4, interval=2.0), grid(2, 1, 1, interval=0.5)],
    }
    del media["second_per_grid_ts"]
    assert grids_of(media, vision=SimpleNamespace(spatial_merge_size=2))[VIDEO] == [grid(3, 1, 4), grid(2, 1, 1)]
