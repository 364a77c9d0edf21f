"""A checkpoint in Microsoft's original format (`phi4mm`) written again in transformers' format."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import (
    GenerationConfig,
    Phi4MultimodalConfig,
    Phi4MultimodalFeatureExtractor,
    Phi4MultimodalForCausalLM,
    Phi4MultimodalImageProcessor,
    Phi4MultimodalProcessor,
    PreTrainedTokenizerFast,
)

from lmm_r1.errors import UserError
from lmm_r1.lmm_kits.checkpoint import check_weights
from lmm_r1.lmm_kits.phi4_multimodal.towers import AUDIO_EMBED, IMAGE_EMBED, TURN_END, VISION_TOWER, chat_template

IMAGE_TOKEN, AUDIO_TOKEN = "<|endoftext10|>", "<|endoftext11|>"
HEAD_WIDTH = 72  # of the vision tower, SigLIP's: 1152 / 16 in the release; its config leaves it out

_LAYER = rf"{re.escape(AUDIO_EMBED)}encoder\.encoders\.\d+\."
# Name in transformers' format -> name in the original, where they differ.
_RENAMED = (
    (rf"({_LAYER}feed_forward_(?:in|out)\.)gate_up_proj\.", r"\1net.0.linear."),
    (rf"({_LAYER}feed_forward_(?:in|out)\.)down_proj\.", r"\1net.2."),
    (rf"({_LAYER}self_attn\.)([qkv])_proj\.", r"\1linear_\2."),
    (rf"({_LAYER}self_attn\.)o_proj\.", r"\1linear_out."),
    (rf"({re.escape(AUDIO_EMBED)})up_proj_for_speech\.", r"\1audio_projection.speech.0."),
    (rf"({re.escape(AUDIO_EMBED)})down_proj_for_speech\.", r"\1audio_projection.speech.2."),
    (rf"({re.escape(AUDIO_EMBED)})up_proj_for_vision_speech\.", r"\1audio_projection.vision.0."),
    (rf"({re.escape(AUDIO_EMBED)})down_proj_for_vision_speech\.", r"\1audio_projection.vision.2."),
    (rf"({re.escape(IMAGE_EMBED)})img_projection_up\.", r"\1img_projection.0."),
    (rf"({re.escape(IMAGE_EMBED)})img_projection_down\.", r"\1img_projection.2."),
    (rf"({re.escape(IMAGE_EMBED)})global_img_feature_extensor", r"\1glb_GN"),
    (rf"({re.escape(IMAGE_EMBED)})sub_img_feature_extensor", r"\1sub_GN"),
)
_ADAPTED = re.compile(r"(model\.layers\.\d+\.(?:self_attn\.(?:qkv|o)_proj|mlp\.(?:gate_up|down)_proj)\.)weight")
_SPEECH_ADAPTER = re.compile(rf"{_ADAPTED.pattern.removesuffix('weight')}lora_[AB]\.speech\.weight")

# Parts of the original config that are fixed in transformers' format.
_FIXED_IMAGE_SETTINGS = {
    "use_hd_transform": True,
    "with_learnable_separator": True,
    "hd_transform_order": "sub_glb",
    "image_token_compression_cls": "avg_pool_2d",
    "projection_cls": "mlp",
}
_WITHOUT_BIAS = ("attention_bias", "mlp_bias", "lm_head_bias")
_TEXT_SETTINGS = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads resid_pdrop "
    "embd_pdrop attention_dropout hidden_act max_position_embeddings original_max_position_embeddings initializer_range "
    "rms_norm_eps tie_word_embeddings bos_token_id pad_token_id sliding_window"
).split()
_AUDIO_SETTINGS = (
    "activation chunk_size conv_activation conv_glu_type depthwise_multiplier dropout_rate ext_pw_out_channel input_size "
    "kernel_size left_chunk num_blocks time_reduction"
).split()
_RENAMED_AUDIO_SETTINGS = {
    "attention_dim": "hidden_size",
    "attention_heads": "num_attention_heads",
    "depthwise_seperable_out_channel": "depthwise_separable_out_channel",  # spelt so in the release
    "linear_units": "intermediate_size",
}


def source_of(name: str) -> tuple[str, ...]:
    """Return the names, in the original format, of the tensors that make the weight that transformers calls `name`.

    The image adapter changes some: after the weight's own name come those of the adapter's factors, A (R, M) and B (N, R).
    """
    if adapted := _ADAPTED.fullmatch(name):
        layer = adapted[1]
        return f"{layer}base_layer.weight", f"{layer}lora_A.vision.weight", f"{layer}lora_B.vision.weight"
    for pattern, replacement in _RENAMED:
        renamed, found = re.subn(f"^{pattern}", replacement, name)
        if found:
            return (renamed,)
    return (name,)


def account(wanted: Iterable[str], given: Collection[str]) -> tuple[dict[str, tuple[str, ...]], list[str]]:
    """Return the source of every wanted weight, and the weights that are left out: the speech adapter's.

    Raises:
        UserError: a weight is missing, or one is given that is not known; both are named.
    """
    sources = {name: source_of(name) for name in wanted}
    needed = {name for names in sources.values() for name in names}
    left_out = sorted(name for name in given if _SPEECH_ADAPTER.fullmatch(name))
    for names, problem in (
        (needed.difference(given), "missing; copy the whole checkpoint"),
        (set(given).difference(needed, left_out), "unknown, and would be lost; this is another version of the format"),
    ):
        if names:
            some = ", ".join(sorted(names)[:5]) + (", ..." if len(names) > 5 else "")
            raise UserError(f"{len(names)} weight(s) of the checkpoint are {problem}: {some}")
    return sources, left_out


def adapter_scaling(config: Mapping[str, Any]) -> float:
    """Return the factor of the product of the image adapter's matrices: alpha over rank, 2 in the release."""
    try:
        settings = config["vision_lora"]
        return settings["lora_alpha"] / settings["r"]
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise UserError(
            "config.json has no vision_lora with lora_alpha and r, so the image adapter cannot be merged; copy it again"
        ) from error


def native_config(
    config: Mapping[str, Any], *, shapes: Mapping[str, tuple[int, ...]], token_ids: Mapping[str, int]
) -> Phi4MultimodalConfig:
    """Return the config in transformers' format.

    Args:
        shapes: the shape of every weight, which shows the size of the vision tower: the original config omits it.
        token_ids: ids of `IMAGE_TOKEN`, `AUDIO_TOKEN`, and of the tokens that end a text and a turn ("end", "turn").
    """
    try:
        embedding = config["embd_layer"]
        image, audio = embedding["image_embd_layer"], embedding["audio_embd_layer"]
        encoder = config["audio_processor"]["config"]
        _refuse_variants(config, image)
        return Phi4MultimodalConfig(
            **{key: config[key] for key in _TEXT_SETTINGS if key in config},
            rope_parameters=_rope(config),
            eos_token_id=[token_ids["end"], token_ids["turn"]],
            vision_config={
                **_vision_sizes(shapes),
                "crop_size": image["crop_size"],
                "feature_layer": (config.get("img_processor") or {}).get("layer_idx", -2),
                "image_token_id": token_ids[IMAGE_TOKEN],
            },
            audio_config={
                **{key: encoder[key] for key in _AUDIO_SETTINGS if key in encoder},
                **{native: encoder[key] for key, native in _RENAMED_AUDIO_SETTINGS.items() if key in encoder},
                "nemo_conv_channels": encoder["nemo_conv_settings"]["conv_channels"],
                "bias_max_distance": encoder["relative_attention_bias_args"]["t5_bias_max_distance"],
                "downsample_rate": audio["downsample_rate"],
                "audio_token_id": token_ids[AUDIO_TOKEN],
            },
            dtype=config.get("torch_dtype"),
            architectures=["Phi4MultimodalForCausalLM"],
        )
    except KeyError as error:
        raise UserError(
            f"config.json or the weights lack {error}, which this format needs; copy them again"
        ) from error


def _refuse_variants(config: Mapping[str, Any], image: Mapping[str, Any]) -> None:
    for key, value in _FIXED_IMAGE_SETTINGS.items():
        if image.get(key, value) != value:
            raise UserError(
                f"config.json: image_embd_layer.{key} {image[key]!r} cannot be converted, only {value!r} can"
            )
    for key in _WITHOUT_BIAS:
        if config.get(key):
            raise UserError(f"config.json: {key} cannot be converted; transformers' class has no such bias")


def _rope(config: Mapping[str, Any]) -> dict[str, object]:
    """Return the rotary embedding's settings, which are separate settings in the original."""
    rope = {key: config[key] for key in ("rope_theta", "partial_rotary_factor") if key in config}
    scaling = config.get("rope_scaling")
    if scaling is None:
        return {"rope_type": "default", **rope}
    kind = scaling.get("rope_type") or scaling["type"]
    if kind not in ("longrope", "su"):  # the second is an older name of the first
        raise UserError(f"config.json: rope_scaling of type {kind!r} cannot be converted, only 'longrope' can")
    return {
        "rope_type": "longrope",
        **rope,
        **{key: scaling[key] for key in ("short_factor", "long_factor")},
        "original_max_position_embeddings": config["original_max_position_embeddings"],
    }


def _vision_sizes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    width, channels, patch, _ = shapes[f"{VISION_TOWER}embeddings.patch_embedding.weight"]
    positions, _ = shapes[f"{VISION_TOWER}embeddings.position_embedding.weight"]
    layer = re.compile(rf"{re.escape(VISION_TOWER)}encoder\.layers\.(\d+)\.")
    layers = {int(found[1]) for name in shapes if (found := layer.match(name))}
    return {
        "hidden_size": width,
        "num_channels": channels,
        "patch_size": patch,
        "image_size": math.isqrt(positions) * patch,
        "num_hidden_layers": len(layers),
        "num_attention_heads": width // HEAD_WIDTH,
        "intermediate_size": shapes[f"{VISION_TOWER}encoder.layers.0.mlp.fc1.weight"][0],
    }


SHARD_BYTES = 4 * 10**9


def convert(source: Path, output: Path) -> list[str]:
    """Write the checkpoint in folder `source` to the empty folder `output` and return sentences on what was done.

    The image adapter is merged into the language model. Microsoft's code uses it only for prompts with an image; here it
    also applies to prompts without one. The adapter for speech is left out, because it excludes the other and this project
    has no audio.
    """
    check_weights(str(source))
    settings = _read_json(source / "config.json")
    scaling = adapter_scaling(settings)
    if not (source / "tokenizer.json").is_file():
        raise UserError(f"{source}: no tokenizer.json; copy the original checkpoint's tokenizer files into it")
    # Not by the auto class: the original's config names a tokenizer on the hub.
    tokenizer = PreTrainedTokenizerFast.from_pretrained(
        source, extra_special_tokens={"image_token": IMAGE_TOKEN, "audio_token": AUDIO_TOKEN}
    )
    processor = _processor(source, tokenizer)
    with ExitStack() as stack:
        files = _open_weights(source, stack)
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name, file in files.items()}
        config = native_config(settings, shapes=shapes, token_ids=_token_ids(tokenizer, source))
        with torch.device("meta"):
            model = Phi4MultimodalForCausalLM(config)
        tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
        sources, left_out = account(model.state_dict().keys() - tied, files)
        weights = {name: _weight(files, scaling, *names) for name, names in sources.items()}
    try:
        model.load_state_dict(weights, strict=False, assign=True)
    except RuntimeError as error:
        raise UserError(f"the weights do not fit config.json; one is not its own: {error}") from error
    model.tie_weights()
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    model.save_pretrained(output, max_shard_size=SHARD_BYTES)
    processor.save_pretrained(output)
    merged = sum(len(names) > 1 for names in sources.values())
    sentences = [f"the image adapter is merged into {merged} matrices of the language model, scaled by {scaling:g}"]
    if left_out:
        sentences.append(f"the speech adapter is left out: {len(left_out)} weights, {left_out[0]} and so on")
    return sentences


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: cannot be read ({error}); copy it from the original checkpoint again") from error


def _open_weights(source: Path, stack: ExitStack) -> dict[str, safe_open]:
    """Return for every weight the memory-mapped file that holds it."""
    index = source / "model.safetensors.index.json"
    names = {"model.safetensors"}
    if not (source / "model.safetensors").is_file():
        if not index.is_file():
            raise UserError(
                f"{source}: the weights are not in safetensors files; take the checkpoint that has them so"
            )
        names = set(_read_json(index)["weight_map"].values())
    opened = [stack.enter_context(safe_open(source / name, framework="pt")) for name in sorted(names)]
    return {name: file for file in opened for name in file.keys()}


def _weight(files: Mapping[str, Any], scaling: float, own: str, *factors: str) -> torch.Tensor:
    """Return a weight, with the product of the adapter's factors added in fp32 and rounded once."""
    weight = files[own].get_tensor(own)
    if not factors:
        return weight
    a, b = (files[factor].get_tensor(factor).float() for factor in factors)
    try:
        return (weight.float() + scaling * (b @ a)).to(weight.dtype)
    except RuntimeError as error:
        raise UserError(f"{' and '.join(factors)} do not fit {own} ({error}); copy them again") from error


def _token_ids(tokenizer: PreTrainedTokenizerFast, source: Path) -> dict[str, int]:
    vocabulary = tokenizer.get_vocab()
    tokens = {IMAGE_TOKEN: IMAGE_TOKEN, AUDIO_TOKEN: AUDIO_TOKEN, "turn": TURN_END, "end": tokenizer.eos_token}
    for token in tokens.values():
        if token not in vocabulary:
            raise UserError(f"{source}: the tokenizer has no {token}; copy the original checkpoint's tokenizer files")
    return {key: vocabulary[token] for key, token in tokens.items()}


def _processor(source: Path, tokenizer: PreTrainedTokenizerFast) -> Phi4MultimodalProcessor:
    """Return image processor, feature extractor and tokenizer, with a chat template that has images in it."""
    settings = _read_json(source / "preprocessor_config.json")
    if "dynamic_hd" not in settings:
        raise UserError(f"{source}/preprocessor_config.json: no dynamic_hd, the most crops of an image; copy it again")
    template = chat_template(image_token=IMAGE_TOKEN, audio_token=AUDIO_TOKEN)
    tokenizer.chat_template = template
    audio = {key: value for key, value in settings.items() if key.startswith("audio_")}
    return Phi4MultimodalProcessor(
        image_processor=Phi4MultimodalImageProcessor(dynamic_hd=settings["dynamic_hd"]),
        audio_processor=Phi4MultimodalFeatureExtractor(**audio),
        tokenizer=tokenizer,
        chat_template=template,
    )
