"""The kit of Janus in transformers' format: it trains what reads images and leaves what draws them as it is."""

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
from lmm_r1.lmm_kits.janus import encoding
from lmm_r1.lmm_kits.janus.tiny_model import build_tiny

KIT = LmmKit(
    model_type="janus",
    checkpoints="Janus, Janus-Pro",
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
    engine_refusal=(
        "vLLM has no model class for it, and its Transformers backend takes only models whose attention it can replace"
    ),
    engine_disagreement=None,
    banned_token_ids=encoding.banned_token_ids,
    forward_inputs=encoding.forward_inputs,
    merge_media=merge_along_batch,
    in_one_tower_run=runs_tower_once,
    both_way_token_ids=attends_causally,
    filler_media=encoding.filler_media,
    vision_prefixes=("model.vision_model.",),
    projector_prefixes=("model.aligner.",),
    language_prefixes=("model.language_model.", "lm_head."),
    untrained_prefixes=(
        "model.vqmodel.",
        "model.generation_embeddings.",
        "model.generation_aligner.",
        "model.generation_head.",
    ),
    backbone_of=base_model_of,
    language_model_of=inner_language_model_of,
    cut_inputs=cut_tokens,
    zero3_leaf_classes=(),
    save_processor=encoding.save_processor,
    build_tiny=build_tiny,
)
