"""The kit of every plain causal language model, whatever its `model_type`."""

from lmm_r1.lmm_kits.base import LmmKit, attends_causally, cut_tokens, engine_media, merge_along_batch, runs_tower_once
from lmm_r1.lmm_kits.llm import encoding
from lmm_r1.lmm_kits.llm.tiny_model import build_tiny

KIT = LmmKit(
    model_type="llm",
    checkpoints="any plain language model",
    takes_images=False,
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
    filler_media=None,
    vision_prefixes=(),
    projector_prefixes=(),
    language_prefixes=("",),
    untrained_prefixes=(),
    backbone_of=encoding.backbone_of,
    language_model_of=encoding.backbone_of,
    cut_inputs=cut_tokens,
    zero3_leaf_classes=(),
    save_processor=encoding.save_processor,
    build_tiny=build_tiny,
)
