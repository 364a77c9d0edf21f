"""The kit of Phi-3.5-vision, which transformers has no classes for: config, processor and model are here.

Microsoft's checkpoint was not at hand. The names of the weights are those that vLLM's and MLC's loaders of it list; the
pixels, the order of an image's tokens and the start token before every piece of text between images follow public copies
of Microsoft's processing code and vLLM's class. Nothing was run against the release itself: not its logits, nor what its
tokenizer makes of the pieces, nor long contexts. vLLM, started on Microsoft's own folder, stops at the end tokens named there,
which `<|end|>` is reported not to be among; folders saved from here name it.
"""

from lmm_r1.lmm_kits.base import (
    LmmKit,
    attends_causally,
    base_model_of,
    engine_media,
    merge_along_batch,
    runs_tower_once,
)
from lmm_r1.lmm_kits.phi3_v import encoding
from lmm_r1.lmm_kits.phi3_v.auto_classes import register_auto_classes
from lmm_r1.lmm_kits.phi3_v.configuration import CLIP_SIZES
from lmm_r1.lmm_kits.phi3_v.tiny_model import build_tiny

register_auto_classes()

_IMAGES = "model.vision_embed_tokens."
_TOWER = f"{_IMAGES}img_processor.vision_model."
_LAST_LAYER = CLIP_SIZES["num_hidden_layers"] - 1

KIT = LmmKit(
    model_type="phi3_v",
    checkpoints="Phi-3.5-vision",
    takes_images=True,
    takes_videos=False,
    load_config=encoding.load_config,
    load_model=encoding.load_model,
    load_processor=encoding.load_processor,
    tokenizer_of=encoding.tokenizer_of,
    encode=encoding.encode,
    render=encoding.render,
    placeholder_ids=encoding.placeholder_ids,
    engine_arguments=encoding.engine_arguments,
    engine_media=engine_media,
    takes_flash_attention=True,
    engine_refusal=None,
    engine_disagreement=None,
    banned_token_ids=encoding.banned_token_ids,
    forward_inputs=encoding.forward_inputs,
    merge_media=merge_along_batch,
    in_one_tower_run=runs_tower_once,
    both_way_token_ids=attends_causally,
    filler_media=encoding.filler_media,
    vision_prefixes=(
        f"{_TOWER}embeddings.",
        f"{_TOWER}pre_layrnorm.",
        *(f"{_TOWER}encoder.layers.{layer}." for layer in range(_LAST_LAYER)),
    ),
    projector_prefixes=(f"{_IMAGES}img_projection.", f"{_IMAGES}glb_GN", f"{_IMAGES}sub_GN"),
    language_prefixes=("model.embed_tokens.", "model.layers.", "model.norm.", "lm_head."),
    # The projector reads the last layer but one, in the release and in tiny models, which keep the tower's depth.
    untrained_prefixes=(f"{_TOWER}encoder.layers.{_LAST_LAYER}.", f"{_TOWER}post_layernorm."),
    backbone_of=base_model_of,
    language_model_of=base_model_of,
    cut_inputs=encoding.cut_inputs,
    zero3_leaf_classes=(),
    save_processor=encoding.save_processor,
    build_tiny=build_tiny,
)
