"""The kit of Aria."""

from lmm_r1.lmm_kits.aria import encoding
from lmm_r1.lmm_kits.aria.tiny_model import build_tiny
from lmm_r1.lmm_kits.base import (
    LmmKit,
    attends_causally,
    base_model_of,
    cut_tokens,
    engine_media,
    inner_language_model_of,
    merge_along_batch,
    runs_tower_once,
)

KIT = LmmKit(
    model_type="aria",
    checkpoints="Aria",
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
    takes_flash_attention=False,
    engine_refusal=None,
    engine_disagreement=None,
    banned_token_ids=encoding.banned_token_ids,
    forward_inputs=encoding.forward_inputs,
    merge_media=merge_along_batch,
    in_one_tower_run=runs_tower_once,
    both_way_token_ids=attends_causally,
    filler_media=encoding.filler_media,
    vision_prefixes=("model.vision_tower.embeddings.", "model.vision_tower.encoder."),
    projector_prefixes=("model.multi_modal_projector.",),
    language_prefixes=("model.language_model.", "lm_head."),
    # The projector reads the last layer's output, which this norm comes after.
    untrained_prefixes=("model.vision_tower.post_layernorm.",),
    backbone_of=base_model_of,
    language_model_of=inner_language_model_of,
    cut_inputs=cut_tokens,
    zero3_leaf_classes=("AriaTextMoELayer",),
    save_processor=encoding.save_processor,
    build_tiny=build_tiny,
)
