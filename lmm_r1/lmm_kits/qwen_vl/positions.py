"""M-RoPE positions: three coordinates a token, of which images and videos use time, row and column."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from transformers import PretrainedConfig

from lmm_r1.lmm_kits.kit import Media

TEXT, IMAGE, VIDEO = 0, 1, 2
"""Token types, as the models name them."""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """An image or a video as the language model reads it, in merged patches."""

    steps: int
    rows: int
    columns: int
    interval: float
    """How far the time coordinate moves from one step to the next."""


def grids_of(media: Media, *, vision: PretrainedConfig) -> dict[int, list[Grid]]:
    """Return the grids of a batch's images and videos, in order, by token type.

    A step of a video counts 1, or where the processor says how long it lasts, as much as the vision tower's config says.
    """
    grids: dict[int, list[Grid]] = {}
    for kind, name in ((IMAGE, "image_grid_thw"), (VIDEO, "video_grid_thw")):
        shapes = media[name].tolist() if name in media else []
        intervals = [1.0] * len(shapes)
        if kind == VIDEO and "second_per_grid_ts" in media:
            intervals = [vision.tokens_per_second * seconds for seconds in media["second_per_grid_ts"].tolist()]
        grids[kind] = [
            Grid(
                steps=steps,
                rows=height // vision.spatial_merge_size,
                columns=width // vision.spatial_merge_size,
                interval=interval,
            )
            for (steps, height, width), interval in zip(shapes, intervals, strict=True)
        ]
    return grids


def mrope_positions(types: torch.Tensor, attention_mask: torch.Tensor, grids: dict[int, list[Grid]]) -> torch.Tensor:
    """Return positions (3, B, T) for token types (B, T); every row starts at 0, and padding gets 0.

    As the models were released and as vLLM computes them: text goes on behind the largest coordinate of what precedes
    it. `get_rope_index` of transformers 5.15 goes on behind the rows and columns alone, so that text after a long video
    shares its positions, and cuts seconds per step to a whole number
    (https://github.com/huggingface/transformers/pull/48669).
    """
    positions = torch.zeros(3, *types.shape, dtype=torch.long)
    given = {kind: iter(items) for kind, items in grids.items()}
    for row, (kinds, mask) in enumerate(zip(types.cpu(), attention_mask.bool().cpu(), strict=True)):
        blocks = list(_blocks(kinds[mask].tolist(), given))
        if blocks:
            positions[:, row, mask] = torch.cat(blocks, dim=1)
    return positions.to(types.device)


def _blocks(kinds: Sequence[int], given: dict[int, Iterator[Grid]]) -> Iterator[torch.Tensor]:
    """Yield the positions (3, n) of each run of tokens of one type."""
    start, left = 0, 0
    grid: Grid | None = None
    for kind, run in groupby(kinds):
        length = sum(1 for _ in run)
        if kind == TEXT:
            block = torch.arange(length).expand(3, -1)
        else:
            if grid is None or not left:
                grid = next(given[kind])
                left = grid.steps
            # A video may come as one run, or with text between its steps, each of which then starts a time of its own.
            steps = length // (grid.rows * grid.columns)
            left -= steps
            times = torch.tensor([int(step * grid.interval) for step in range(steps)])
            block = torch.stack(
                torch.meshgrid(times, torch.arange(grid.rows), torch.arange(grid.columns), indexing="ij")
            ).flatten(1)
        yield block + start
        start += int(block.max()) + 1
