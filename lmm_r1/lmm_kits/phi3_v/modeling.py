"""Config, processor and model of Phi-3.5-vision, on transformers' Phi-3 and CLIP, with the names of Microsoft's checkpoints.

In the processor, `<|image_1|>` becomes one placeholder id per token of that image.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import nn
from torch.nn.functional import interpolate
from transformers import (
    BatchFeature,
    CLIPVisionConfig,
    CLIPVisionModel,
    Phi3Config,
    Phi3ForCausalLM,
    Phi3Model,
    ProcessorMixin,
)
from transformers import initialization as init
from transformers.image_processing_utils import BaseImageProcessor
from transformers.models.phi3.modeling_phi3 import Phi3PreTrainedModel

# CLIP ViT-L/14-336, which the release names but does not spell out in its config.
CLIP_LAYERS = 24
CLIP_SIZES = {
    "hidden_act": "quick_gelu",
    "hidden_size": 1024,
    "image_size": 336,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_hidden_layers": CLIP_LAYERS,
    "patch_size": 14,
    "projection_dim": 768,
}
IMG_PROCESSOR = {
    "name": "clip_vision_model",
    "model_name": "openai/clip-vit-large-patch14-336",
    "image_dim_out": 1024,
    "num_img_tokens": 144,
}


class Phi3VConfig(Phi3Config):
    """Reads Microsoft's `config.json` as it is; of `embd_layer`, only the release's layout of image features is known.

    `img_processor["clip_overrides"]` is ours: sizes of the CLIP tower that differ from ViT-L/14-336, for tiny models.
    `image_token_id` is ours as well: Microsoft's code and vLLM's have the id 32044 written into them.
    """

    model_type = "phi3_v"

    img_processor: dict[str, Any] | None = None
    embd_layer: dict[str, Any] | None = None
    image_token_id: int = 32044

    def __post_init__(self, **kwargs: Any) -> None:
        self.img_processor = IMG_PROCESSOR | (self.img_processor or {})
        super().__post_init__(**kwargs)

    @property
    def image_settings(self) -> dict[str, Any]:
        """`img_processor`, completed with the release's values."""
        assert self.img_processor is not None, "__post_init__ fills it in"
        return self.img_processor

    @property
    def clip_config(self) -> CLIPVisionConfig:
        """The sizes of the vision tower."""
        config = CLIPVisionConfig(**(CLIP_SIZES | self.image_settings.get("clip_overrides", {})))
        assert config.hidden_size == self.image_settings["image_dim_out"], "the projector reads another width"
        return config

    @property
    def clip_layers(self) -> int:
        """How many layers of the vision tower run: `layer_idx` counts the hidden states from the embeddings' on."""
        states = self.clip_config.num_hidden_layers + 1
        return range(states)[self.image_settings.get("layer_idx", -2)]


def merge_patches(crops: torch.Tensor, *, rows: int, columns: int) -> torch.Tensor:
    """Lay crops (rows * columns, side ** 2, C) out as one picture and join each 2 x 2 patches into one.

    Returns (rows * side / 2, columns * side / 2, 4 C); the four lie in reading order.
    """
    count, patches, width = crops.shape
    half = math.isqrt(patches) // 2
    assert (count, patches) == (rows * columns, (2 * half) ** 2)
    grid = crops.view(rows, columns, half, 2, half, 2, width).permute(0, 2, 1, 4, 3, 5, 6)
    return grid.reshape(rows * half, columns * half, 4 * width)


def lay_out(
    crops: torch.Tensor, *, rows: int, columns: int, newline: torch.Tensor, separator: torch.Tensor
) -> torch.Tensor:
    """Return the tokens of one image, (T, 4 C), before they are projected: its crops, the separator, the whole.

    A newline ends each row of tokens. `crops` (1 + rows * columns, side ** 2, C) begins with the view of the whole.
    """
    parts = []
    for part, height, width in ((crops[1:], rows, columns), (crops[:1], 1, 1)):
        merged = merge_patches(part, rows=height, columns=width)
        ends = newline.view(1, 1, -1).expand(len(merged), 1, -1)
        parts.append(torch.cat([merged, ends], dim=1).flatten(0, 1))
    return torch.cat([parts[0], separator.view(1, -1), parts[1]])


class Phi3VVisionTower(CLIPVisionModel):
    """CLIP up to the layer whose output is used; later layers are kept for the checkpoint and never run."""

    def __init__(self, config: CLIPVisionConfig, *, layers: int) -> None:
        super().__init__(config)
        self.used_layers = layers

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Return the features of the patches, (N, 576, C) in the release, of crops (N, 3, 336, 336)."""
        hidden = self.pre_layrnorm(self.embeddings(pixel_values))
        for layer in self.encoder.layers[: self.used_layers]:
            hidden = layer(hidden, attention_mask=None)
        return hidden[:, 1:]  # without the class token


class Phi3VImageEmbedding(nn.Module):
    """Images to embeddings: the tower, the layout with its trained separators, and the projector."""

    def __init__(self, config: Phi3VConfig) -> None:
        super().__init__()
        clip = config.clip_config
        clip._attn_implementation = config._attn_implementation
        width = 4 * clip.hidden_size
        self.img_processor = nn.ModuleDict({"vision_model": Phi3VVisionTower(clip, layers=config.clip_layers)})
        self.glb_GN = nn.Parameter(torch.empty(1, 1, width))
        self.sub_GN = nn.Parameter(torch.empty(1, 1, 1, width))
        self.img_projection = nn.Sequential(
            nn.Linear(width, config.hidden_size), nn.GELU(), nn.Linear(config.hidden_size, config.hidden_size)
        )

    def forward(self, pixel_values: torch.Tensor, image_sizes: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of all tokens of all images, (T, H).

        Tower and projector run once for all images, so that each rank gathers sharded weights equally often.
        """
        grids = [(height // CROP, width // CROP) for height, width in image_sizes.tolist()]
        crops = [pixels[: 1 + rows * columns] for pixels, (rows, columns) in zip(pixel_values, grids, strict=True)]
        features = self.img_processor["vision_model"](torch.cat(crops)).split([len(image) for image in crops])
        tokens = [
            lay_out(image, rows=rows, columns=columns, newline=self.sub_GN, separator=self.glb_GN)
            for image, (rows, columns) in zip(features, grids, strict=True)
        ]
        return self.img_projection(torch.cat(tokens))


class Phi3VPreTrainedModel(Phi3PreTrainedModel):
    config_class = Phi3VConfig
    input_modalities = ("image", "text")
    _no_split_modules = ["Phi3DecoderLayer", "CLIPEncoderLayer", "CLIPVisionEmbeddings"]
    # Microsoft's code has a second copy of the embedding here, and old CLIP code has position ids.
    _keys_to_ignore_on_load_unexpected = [r"vision_embed_tokens\.wte\.", r"\.position_ids$"]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, Phi3VImageEmbedding):
            init.normal_(module.glb_GN, std=self.config.initializer_range)
            init.normal_(module.sub_GN, std=self.config.initializer_range)


class Phi3VModel(Phi3VPreTrainedModel, Phi3Model):
    """Phi-3 without its output layer, with images."""

    def __init__(self, config: Phi3VConfig) -> None:
        super().__init__(config)
        self.vision_embed_tokens = Phi3VImageEmbedding(config)
        self.post_init()

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        *args: Any,
        inputs_embeds: torch.Tensor | None = None,
        pixel_values: torch.Tensor | None = None,
        image_sizes: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run Phi-3 on ids (B, T) whose placeholders are replaced by the images' embeddings.

        Raises ValueError if placeholders and images differ in number of tokens.
        """
        if pixel_values is not None:
            assert input_ids is not None, "images are merged into ids"
            assert image_sizes is not None, "images come with their sizes"
            inputs_embeds = self.with_images(input_ids, pixel_values, image_sizes)
            input_ids = None
        return super().forward(input_ids, *args, inputs_embeds=inputs_embeds, **kwargs)

    def with_images(
        self, input_ids: torch.Tensor, pixel_values: torch.Tensor, image_sizes: torch.Tensor
    ) -> torch.Tensor:
        """Return the embeddings (B, T, H) of ids (B, T), with those of the images instead of the placeholders'."""
        embeds = self.embed_tokens(input_ids)  # (B, T, H)
        images = self.vision_embed_tokens(pixel_values, image_sizes).to(embeds)
        places = input_ids == self.config.image_token_id  # (B, T)
        if int(places.sum()) != len(images):
            raise ValueError(f"{int(places.sum())} image placeholders in the ids for {len(images)} tokens of images")
        return embeds.masked_scatter(places[..., None], images)


class Phi3VForCausalLM(Phi3VPreTrainedModel, Phi3ForCausalLM):
    """Phi-3.5-vision with its output layer."""

    def __init__(self, config: Phi3VConfig) -> None:
        # Not Phi3ForCausalLM's, which would build a Phi-3 without images first.
        Phi3PreTrainedModel.__init__(self, config)
        self.model = Phi3VModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def prepare_inputs_for_generation(
        self,
        input_ids: torch.Tensor,
        pixel_values: torch.Tensor | None = None,
        image_sizes: torch.Tensor | None = None,
        is_first_iteration: bool | None = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Return the inputs of one step; with a cache only the first one has placeholders, and images for them."""
        inputs = super().prepare_inputs_for_generation(input_ids, is_first_iteration=is_first_iteration, **kwargs)
        if is_first_iteration or not inputs.get("use_cache"):
            inputs.update(pixel_values=pixel_values, image_sizes=image_sizes)
        return inputs


CROP = 336
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


def scaled_size(*, width: int, height: int, num_crops: int) -> tuple[int, int]:
    """Return the (width, height) to which a square or landscape image is scaled.

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
        self, images: Image.Image | Sequence[Image.Image], return_tensors: str | None = None, **unused: Any
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
