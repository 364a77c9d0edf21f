"""The kit of Phi-4-multimodal: images and text; its audio tower stays in the checkpoint, untrained."""

from lmm_r1.lmm_kits.base import LmmKit, attends_causally, base_model_of, engine_media, runs_tower_once
from lmm_r1.lmm_kits.phi4_multimodal import crops, encoding, loading
from lmm_r1.lmm_kits.phi4_multimodal.tiny_model import build_tiny

KIT = LmmKit(
    model_type="phi4_multimodal",
    checkpoints="Phi-4-multimodal",
    takes_images=True,
    takes_videos=False,
    load_config=loading.load_config,
    load_model=loading.load_model,
    load_processor=loading.load_processor,
    tokenizer_of=loading.tokenizer_of,
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
    merge_media=crops.merge_media,
    in_one_tower_run=runs_tower_once,
    both_way_token_ids=attends_causally,
    filler_media=crops.filler_media,
    vision_prefixes=(loading.VISION_TOWER,),
    projector_prefixes=(
        f"{loading.IMAGE_EMBED}img_projection_",
        f"{loading.IMAGE_EMBED}global_img_feature_extensor",
        f"{loading.IMAGE_EMBED}sub_img_feature_extensor",
    ),
    language_prefixes=("model.embed_tokens.", "model.layers.", "model.norm.", "lm_head."),
    # The last layers of the vision tower belong here too; how many depends on the config, see `loading.dead_prefixes`.
    untrained_prefixes=(
        loading.AUDIO_EMBED,
        f"{loading.VISION_TOWER}head.",
        f"{loading.VISION_TOWER}post_layernorm.",
    ),
    backbone_of=base_model_of,
    language_model_of=base_model_of,
    cut_inputs=encoding.cut_inputs,
    # The projection runs once per image, so ranks with different numbers of images would gather its weights out of step.
    zero3_leaf_classes=("Phi4MultimodalImageEmbedding",),
    save_processor=encoding.save_processor,
    build_tiny=build_tiny,
)
