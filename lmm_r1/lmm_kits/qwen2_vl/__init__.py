"""The kit of Qwen2-VL: Qwen2.5-VL's, with other classes and another vision tower."""

from lmm_r1.lmm_kits.base import (
    LmmKit,
    attends_causally,
    base_model_of,
    cut_tokens,
    inner_language_model_of,
    merge_along_batch,
)
from lmm_r1.lmm_kits.qwen2_5_vl import encoding as family
from lmm_r1.lmm_kits.qwen2_vl import encoding
from lmm_r1.lmm_kits.qwen2_vl.tiny_model import build_tiny

KIT = LmmKit(
    model_type="qwen2_vl",
    checkpoints="Qwen2-VL",
    takes_images=True,
    takes_videos=True,
    load_config=encoding.load_config,
    load_model=encoding.load_model,
    load_processor=encoding.load_processor,
    tokenizer_of=family.tokenizer_of,
    encode=family.encode,
    render=family.render,
    placeholder_ids=family.placeholder_ids,
    engine_arguments=encoding.engine_arguments,
    engine_media=family.engine_media,
    takes_flash_attention=True,
    engine_refusal=None,
    engine_disagreement=None,
    banned_token_ids=family.banned_token_ids,
    forward_inputs=family.forward_inputs,
    merge_media=merge_along_batch,
    in_one_tower_run=family.in_one_tower_run,
    both_way_token_ids=attends_causally,
    filler_media=family.filler_media,
    vision_prefixes=("model.visual.blocks.", "model.visual.patch_embed."),
    projector_prefixes=("model.visual.merger.",),
    language_prefixes=("model.language_model.", "lm_head."),
    untrained_prefixes=(),
    backbone_of=base_model_of,
    language_model_of=inner_language_model_of,
    cut_inputs=cut_tokens,
    zero3_leaf_classes=(),
    save_processor=family.save_processor,
    build_tiny=build_tiny,
)
