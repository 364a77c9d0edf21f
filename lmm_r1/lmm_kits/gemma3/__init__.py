"""The kit of Gemma 3 with images."""

from lmm_r1.lmm_kits.base import (
    LmmKit,
    base_model_of,
    cut_tokens,
    engine_media,
    inner_language_model_of,
    merge_along_batch,
    runs_tower_once,
)
from lmm_r1.lmm_kits.gemma3 import encoding
from lmm_r1.lmm_kits.gemma3.tiny_model import build_tiny

KIT = LmmKit(
    model_type="gemma3",
    checkpoints="Gemma 3 (4B, 12B, 27B)",
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
    engine_disagreement=(
        "vLLM's CPU backend lets a token of an image attend only to those before it, where the model lets all tokens of "
        "one image attend to each other"
    ),
    banned_token_ids=encoding.banned_token_ids,
    forward_inputs=encoding.forward_inputs,
    merge_media=merge_along_batch,
    in_one_tower_run=runs_tower_once,
    both_way_token_ids=encoding.both_way_token_ids,
    filler_media=encoding.filler_media,
    vision_prefixes=("model.vision_tower.",),
    projector_prefixes=("model.multi_modal_projector.",),
    language_prefixes=("model.language_model.", "lm_head."),
    # The releases have no pooling head; one in a checkpoint would be computed, but nothing reads its output.
    untrained_prefixes=("model.vision_tower.head.",),
    backbone_of=base_model_of,
    language_model_of=inner_language_model_of,
    cut_inputs=cut_tokens,
    zero3_leaf_classes=(),
    save_processor=encoding.save_processor,
    build_tiny=build_tiny,
)
