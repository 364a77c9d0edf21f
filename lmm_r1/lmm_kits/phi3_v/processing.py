"""The processor of text and images: `<|image_1|>` becomes one placeholder id per token of that image."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch.nn.functional import interpolate
from transformers import BatchFeature, ProcessorMixin
from transformers.image_processing_utils import BaseImageProcessor

CROP = 336
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


def scaled_size(*, width: int, height: int, num_crops: int) -> tuple[int, int]:
    """Return the (width, height) to which an image that is no higher than wide is scaled.

    Its width becomes the largest number of crops for which the grid has at most `num_crops` of them. Raises ValueError
    for an image so long that it would have no height.
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
    """Return an image's number of tokens: those of its crops and of the whole, a newline per token row, a separator."""
    return (rows * columns + 1) * crop_tokens + (rows + 1) * math.isqrt(crop_tokens) + 1


def hd_transform(image: Image.Image, *, num_crops: int) -> Image.Image:
    """Scale an image to its grid, bilinearly, and centre it on white along its shorter side."""
    if image.width < image.height:
        # Pillow rounds between its two passes, so a tall image must be transposed first to give the release's pixels.
        lying = hd_transform(image.transpose(Image.Transpose.TRANSPOSE), num_crops=num_crops)
        return lying.transpose(Image.Transpose.TRANSPOSE)
    width, height = scaled_size(width=image.width, height=image.height, num_crops=num_crops)
    missing = -height % CROP
    scaled = image.resize((width, height), Image.Resampling.BILINEAR)
    return ImageOps.expand(scaled, (0, missing // 2, 0, missing - missing // 2), fill="white")


class Phi3VImageProcessor(BaseImageProcessor):
    """Makes `pixel_values` (N, num_crops + 1, 3, 336, 336), the whole first, and `image_sizes` (N, 2), height and width.

    Crops that an image does not fill are zeros. The sizes are those of the grid in pixels. `num_img_tokens` is the
    number of tokens of a crop: 144 in the release, from 24 x 24 patches joined 2 x 2.
    """

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
        return_tensors: str | None = None,
        **unused: Any,
    ) -> BatchFeature:
        """Return the images' crops and sizes; raises ValueError for an image too long to be scaled."""
        images = [images] if isinstance(images, Image.Image) else list(images)
        grids = [hd_transform(image.convert("RGB"), num_crops=self.num_crops) for image in images]
        return BatchFeature(
            {
                "pixel_values": torch.stack([self._crops(grid) for grid in grids]),
                "image_sizes": torch.tensor([(grid.height, grid.width) for grid in grids]),
            },
            tensor_type=return_tensors,
        )

    def _crops(self, grid: Image.Image) -> torch.Tensor:
        pixels = torch.from_numpy(np.array(grid, dtype=np.float32) / 255).permute(2, 0, 1)  # (3, H, W)
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in (self.image_mean, self.image_std))
        pixels = (pixels - mean) / std
        # Without antialiasing and without clipping, as the model was trained.
        whole = interpolate(pixels[None], size=(CROP, CROP), mode="bicubic")
        crops = pixels.unfold(1, CROP, CROP).unfold(2, CROP, CROP)  # (3, rows, columns, 336, 336)
        crops = crops.permute(1, 2, 0, 3, 4).reshape(-1, 3, CROP, CROP)
        filled = torch.cat([whole, crops])
        return torch.cat([filled, filled.new_zeros(self.num_crops + 1 - len(filled), 3, CROP, CROP)])

    def num_image_tokens(self, *, width: int, height: int) -> int:
        """Return the number of tokens of an image of this size in pixels."""
        rows, columns = grid_of(width=width, height=height, num_crops=self.num_crops)
        return tokens_of_grid(rows, columns, crop_tokens=self.num_img_tokens)


IMAGE_TAG = re.compile(r"<\|image_(\d+)\|>")
IMAGE_TOKEN = "<|image|>"


class Phi3VProcessor(ProcessorMixin):
    """Microsoft's image processor and tokenizer as one, with its chat template.

    vLLM reads `img_tokens` and calls `calc_num_image_tokens_from_image_size`.
    """

    image_token = IMAGE_TOKEN
    img_tokens = tuple(f"<|image_{number}|>" for number in range(1, 1001))

    def __init__(self, image_processor: Any, tokenizer: Any, chat_template: str | None = None) -> None:
        # Released checkpoints hold the template in the tokenizer's config.
        super().__init__(image_processor, tokenizer, chat_template=chat_template or tokenizer.chat_template)

    @property
    def image_token_id(self) -> int:
        return self.tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)

    def __call__(
        self,
        images: Image.Image | Sequence[Image.Image] | None = None,
        text: str | Sequence[str] | None = None,
        return_tensors: str | None = None,
        padding: bool = False,
        add_special_tokens: bool = True,
        **kwargs: Any,
    ) -> BatchFeature:
        """Return ids, mask and image tensors; the images are in the order of the texts.

        Raises ValueError if the tags of a text are not `<|image_1|>`, `<|image_2|>` and so on in this order.
        """
        media: Mapping[str, Any] = {}
        counts: list[int] = []
        if images is not None:
            media = self.image_processor(images, return_tensors="pt", **kwargs)
            crop_tokens = self.image_processor.num_img_tokens
            counts = [
                tokens_of_grid(height // CROP, width // CROP, crop_tokens=crop_tokens)
                for height, width in media["image_sizes"].tolist()
            ]
        if text is None:
            return BatchFeature(dict(media), tensor_type=return_tensors)
        texts = [text] if isinstance(text, str) else list(text)
        rows = []
        for one in texts:
            tags = len(IMAGE_TAG.findall(one))
            rows.append(self.token_ids(one, counts=counts[:tags], add_special_tokens=add_special_tokens))
            counts = counts[tags:]
        if counts:
            raise ValueError(f"{len(counts)} images more than there are image tags in the text")
        padded = self.tokenizer.pad({"input_ids": rows}, padding=padding, return_tensors=return_tensors)
        return BatchFeature({**padded, **media}, tensor_type=return_tensors)

    def token_ids(self, text: str, *, counts: Sequence[int], add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text whose i-th image tag is replaced by `counts[i]` placeholders.

        The pieces between the tags are tokenized one by one, so a tokenizer that begins texts with a token (`<s>` in the
        release) begins every piece with it.
        """
        pieces = IMAGE_TAG.split(text)  # text, number, text, number, ..., text
        numbers = [int(number) for number in pieces[1::2]]
        if numbers != list(range(1, len(counts) + 1)):
            raise ValueError(f"the image tags of a text must count from 1 to its {len(counts)} images, not {numbers}")
        first, *others = self.tokenizer(pieces[::2], add_special_tokens=add_special_tokens)["input_ids"]
        for count, ids in zip(counts, others, strict=True):
            first += [self.image_token_id] * count + ids
        return first

    def calc_num_image_tokens_from_image_size(self, *, width: int, height: int) -> int:
        """Return the number of tokens of an image of this size in pixels."""
        return self.image_processor.num_image_tokens(width=width, height=height)
