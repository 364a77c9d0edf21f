"""Images as Phi-3.5-vision sees them: scaled up to a grid of square crops, with a small view of the whole before them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch.nn.functional import interpolate
from transformers import BatchFeature
from transformers.image_processing_utils import BaseImageProcessor
from transformers.processing_utils import ImagesKwargs

CROP = 336
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


def scaled_size(*, width: int, height: int, num_crops: int) -> tuple[int, int]:
    """Return the (width, height) to which an image that is no higher than wide is scaled.

    It becomes as many crops wide as it can while the grid holds no more than `num_crops` of them. Raises ValueError for
    an image so long that it would have no height.
    """
    ratio = width / height
    columns = 1
    while (columns + 1) * math.ceil((columns + 1) / ratio) <= num_crops:
        columns += 1
    scaled = int(columns * CROP / ratio)
    if scaled == 0:
        raise ValueError(
            f"one side is {ratio:.0f} times the other, where at most {columns * CROP} times fit into {num_crops} crops"
        )
    return columns * CROP, scaled


def grid_of(*, width: int, height: int, num_crops: int) -> tuple[int, int]:
    """Return (rows, columns) of crops that an image is cut into."""
    longer, shorter = scaled_size(width=max(width, height), height=min(width, height), num_crops=num_crops)
    sides = math.ceil(shorter / CROP), longer // CROP
    return sides if width >= height else sides[::-1]


def tokens_of_grid(rows: int, columns: int, *, crop_tokens: int) -> int:
    """Return how many tokens stand for an image: those of its crops and of the whole, a newline a token row, a separator."""
    return (rows * columns + 1) * crop_tokens + (rows + 1) * math.isqrt(crop_tokens) + 1


def hd_transform(image: Image.Image, *, num_crops: int) -> Image.Image:
    """Scale an image to its grid, bilinearly, and centre it on white along its shorter side."""
    if image.width < image.height:
        # Pillow rounds between its two passes, so that a tall image must be scaled lying to give the release's pixels.
        lying = hd_transform(image.transpose(Image.Transpose.TRANSPOSE), num_crops=num_crops)
        return lying.transpose(Image.Transpose.TRANSPOSE)
    width, height = scaled_size(width=image.width, height=image.height, num_crops=num_crops)
    missing = -height % CROP
    scaled = image.resize((width, height), Image.Resampling.BILINEAR)
    return ImageOps.expand(scaled, (0, missing // 2, 0, missing - missing // 2), fill="white")


# A TypedDict, which mypy does not see: it does not follow imports of transformers.
class Phi3VImageProcessorKwargs(ImagesKwargs, total=False):  # type: ignore[call-arg]
    """What can be set per call beside the usual settings of image processors."""

    num_crops: int
    num_img_tokens: int


class Phi3VImageProcessor(BaseImageProcessor):
    """Makes `pixel_values` (N, num_crops + 1, 3, 336, 336), the whole first, and `image_sizes` (N, 2), height and width.

    Crops that an image does not fill are zeros. The sizes are those of the grid in pixels. `num_img_tokens` is how many
    tokens the model makes of a crop: in the release 144, of 24 x 24 patches 2 x 2 at a time.
    """

    valid_kwargs = Phi3VImageProcessorKwargs
    model_input_names = ["pixel_values", "image_sizes"]

    def __init__(
        self,
        num_crops: int = 4,
        num_img_tokens: int = 144,
        image_mean: Sequence[float] = CLIP_MEAN,
        image_std: Sequence[float] = CLIP_STD,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.num_crops = num_crops
        self.num_img_tokens = num_img_tokens
        self.image_mean = list(image_mean)
        self.image_std = list(image_std)

    def preprocess(
        self,
        images: Image.Image | Sequence[Image.Image],
        num_crops: int | None = None,
        return_tensors: str | None = None,
        **unused: Any,
    ) -> BatchFeature:
        """Return the images' crops and sizes; raises ValueError for an image too long to be scaled."""
        images = [images] if isinstance(images, Image.Image) else list(images)
        limit = self.num_crops if num_crops is None else num_crops
        grids = [hd_transform(image.convert("RGB"), num_crops=limit) for image in images]
        return BatchFeature(
            {
                "pixel_values": torch.stack([self._crops(grid, num_crops=limit) for grid in grids]),
                "image_sizes": torch.tensor([(grid.height, grid.width) for grid in grids]),
            },
            tensor_type=return_tensors,
        )

    def _crops(self, grid: Image.Image, *, num_crops: int) -> torch.Tensor:
        pixels = torch.from_numpy(np.array(grid, dtype=np.float32) / 255).permute(2, 0, 1)  # (3, H, W)
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in (self.image_mean, self.image_std))
        pixels = (pixels - mean) / std
        # Without antialiasing and without clipping, as the model was trained.
        whole = interpolate(pixels[None], size=(CROP, CROP), mode="bicubic")
        crops = pixels.unfold(1, CROP, CROP).unfold(2, CROP, CROP)  # (3, rows, columns, 336, 336)
        crops = crops.permute(1, 2, 0, 3, 4).reshape(-1, 3, CROP, CROP)
        filled = torch.cat([whole, crops])
        return torch.cat([filled, filled.new_zeros(num_crops + 1 - len(filled), 3, CROP, CROP)])

    def num_image_tokens(self, *, width: int, height: int) -> int:
        """Return how many tokens stand for an image of this size in pixels."""
        rows, columns = grid_of(width=width, height=height, num_crops=self.num_crops)
        return tokens_of_grid(rows, columns, crop_tokens=self.num_img_tokens)
