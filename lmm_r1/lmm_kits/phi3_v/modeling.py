"""Config and model of Phi-3.5-vision, built on transformers' Phi-3 and CLIP, with the names of Microsoft's checkpoints."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from transformers import CLIPVisionConfig, CLIPVisionModel, Phi3Config, Phi3ForCausalLM, Phi3Model
from transformers import initialization as init
from transformers.models.phi3.modeling_phi3 import Phi3PreTrainedModel

from lmm_r1.lmm_kits.phi3_v.processing import CROP

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
