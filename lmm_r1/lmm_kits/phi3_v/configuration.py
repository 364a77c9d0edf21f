"""The config of Phi-3.5-vision: Phi-3's own, with Microsoft's two dicts for the image part."""

from __future__ import annotations

from typing import Any

from transformers import CLIPVisionConfig, Phi3Config

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
EMBD_LAYER = {
    "embedding_cls": "image",
    "hd_transform_order": "sub_glb",
    "projection_cls": "mlp",
    "use_hd_transform": True,
    "with_learnable_separator": True,
}


class Phi3VConfig(Phi3Config):
    """Reads Microsoft's `config.json` as it is; raises ValueError for a layout of image features that it never had.

    `img_processor["clip_overrides"]` is ours: sizes of the CLIP tower that differ from ViT-L/14-336, for tiny models.
    `image_token_id` is ours as well: Microsoft's code and vLLM's have the id 32044 written into them.
    """

    model_type = "phi3_v"

    img_processor: dict[str, Any] | None = None
    embd_layer: dict[str, Any] | None = None
    image_token_id: int = 32044

    def __post_init__(self, **kwargs: Any) -> None:
        self.img_processor = IMG_PROCESSOR | (self.img_processor or {})
        self.embd_layer = EMBD_LAYER | (self.embd_layer or {})
        layout = {key: self.embd_layer[key] for key in EMBD_LAYER}
        if layout != EMBD_LAYER or self.img_processor.get("type_feature", "patch") != "patch":
            raise ValueError(f"embd_layer {layout} is not the one known layout of image features, {EMBD_LAYER}")
        super().__post_init__(**kwargs)

    @property
    def image_settings(self) -> dict[str, Any]:
        """`img_processor`, with the release's values for what it leaves out."""
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
