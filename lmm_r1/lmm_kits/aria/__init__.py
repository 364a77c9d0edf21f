"""The kit of Aria: square images of one size with a mask over their padding."""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers import (
    AriaConfig,
    AriaForConditionalGeneration,
    AriaImageProcessor,
    AriaProcessor,
    PreTrainedTokenizerBase,
)

from lmm_r1.errors import UserError
from lmm_r1.lmm_kits.features import FeaturePoint, exact_patch_positions
from lmm_r1.lmm_kits.kit import LmmKit, Media
from lmm_r1.lmm_kits.tiny_model import TinyModelSpec, TinyTokens, chatml, text_settings, tower_settings

TINY_TOKENS = TinyTokens(
    special=(
        *("<unk>", "<s>", "</s>", "<pad>", "<|img|>", "<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<|im_start|>"),
        # The released tokenizer spells <|im_end|> in several tokens, and its users stop at the text. Here it is one
        # token and the end token, as training and sampling need it.
        "<|im_end|>",
    ),
    padding="<pad>",
    names={"image_token": "<|img|>"},
    roles={"unk_token": "<unk>"},
    # No default system turn; images in place between the markers of infilling.
    chat_template=chatml({"image": "<fim_prefix><|img|><fim_suffix>"}),
)
# The processor knows two sizes of an image. The released model cuts them into 35 x 35 and 70 x 70 patches, which become
# 128 and 256 tokens; larger patches and a sixteenth of the tokens keep the tiny model fast.
PATCH_SIZE = 49
IMAGE_TOKENS = {490: 8, 980: 16}


class AriaKit(LmmKit):
    """Text and images.

    Pixel bounds of an image change nothing: the processor scales the longer side of every image to 980 pixels and pads it
    to a square. Neither it nor vLLM cuts large images into crops, whatever the checkpoint's `split_image` says.
    """

    model_type = "aria"
    checkpoints = "Aria"
    config_class = AriaConfig
    model_class = AriaForConditionalGeneration
    processor_class = AriaProcessor
    # The chat template writes an image between two tokens that text models use for infilling.
    media_tokens = ("<|img|>", "<fim_prefix>", "<fim_suffix>")
    media_keys = ("pixel_values", "pixel_mask")
    tokenizer_adds_start = True
    vision_prefixes = ("model.vision_tower.embeddings.", "model.vision_tower.encoder.")
    projector_prefixes = ("model.multi_modal_projector.",)
    feature_points = (
        FeaturePoint(
            owner="model", method="get_image_features", projects=True, beside=("pixel_mask",), reads="pooler_output"
        ),
        FeaturePoint(owner="model.vision_tower", beside=("patch_attention_mask",), reads="hidden_states"),
    )
    # The projector reads the last layer's output, before this norm.
    untrained_prefixes = ("model.vision_tower.post_layernorm.",)
    zero3_leaf_classes = ("AriaTextMoELayer",)
    takes_4bit = False
    tiny_tokens = TINY_TOKENS

    def load_model(self, path: str, **settings: Any) -> AriaForConditionalGeneration:
        """Load the model; raises UserError for an implementation of experts that transformers lacks for it."""
        experts = settings.pop("experts_implementation", None)
        if experts not in (None, "eager"):
            raise UserError(
                f"--ds.experts_implementation {experts}: transformers computes this architecture's experts one after the "
                "other only; leave the flag out"
            )
        return super().load_model(path, **settings)

    def adapt(self, model: AriaForConditionalGeneration) -> AriaForConditionalGeneration:
        """Turn the cache off, and make the patch positions of the vision tower exact in any dtype."""
        super().adapt(model)
        exact_patch_positions(model.model.vision_tower.embeddings)
        return model

    def image_mark(self, processor: AriaProcessor) -> str:
        image, before, after = self.media_tokens
        return f"{before}{image}{after}"

    def filler_media(self, config: AriaConfig) -> tuple[list[int], Media]:
        """Return the smaller of the two legal images, in black, with its placeholders."""
        patches = min(config.projector_patch_to_query_dict)
        side = math.isqrt(patches) * config.vision_config.patch_size
        media = {
            "pixel_values": torch.zeros(1, config.vision_config.num_channels, side, side),
            "pixel_mask": torch.ones(1, side, side, dtype=torch.bool),
        }
        return [config.image_token_id] * config.projector_patch_to_query_dict[patches], media

    def tiny_config(self, spec: TinyModelSpec, tokenizer: PreTrainedTokenizerBase) -> AriaConfig:
        return AriaConfig(
            text_config={
                **text_settings(spec, tokenizer),
                "model_type": "aria_text",
                # Of one expert.
                "intermediate_size": spec.hidden_size,
                "moe_num_experts": 4,
                "moe_topk": 2,
                "moe_num_shared_experts": 2,
            },
            vision_config=tower_settings(spec, image_size=max(IMAGE_TOKENS), patch_size=PATCH_SIZE),
            projector_patch_to_query_dict={(size // PATCH_SIZE) ** 2: tokens for size, tokens in IMAGE_TOKENS.items()},
            image_token_index=tokenizer.image_token_id,
            initializer_range=spec.hidden_size**-0.5,
            tie_word_embeddings=spec.tie_embeddings,
        )

    def tiny_parts(self) -> dict[str, object]:
        return {"image_processor": AriaImageProcessor(), "size_conversion": IMAGE_TOKENS}
