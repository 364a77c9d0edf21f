"""A checkpoint in Microsoft's layout, made from a small model by names written out here."""

import json
from pathlib import Path

import torch
from helpers.tables import table
from helpers.tiny_models import CORPUS
from safetensors.torch import save_file
from transformers import Phi4MultimodalConfig, Phi4MultimodalForCausalLM

from lmm_r1.lmm_kits.tiny_model import train_tokenizer

SPECIAL_TOKENS = tuple(table("helpers/original_phi4", "special_tokens"))
ORIGINAL_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"
)
IMAGE, AUDIO = "model.embed_tokens_extend.image_embed.", "model.embed_tokens_extend.audio_embed."
BLOCK = f"{AUDIO}encoder.encoders.0."
# As in the release's weight index; the names that are not here are the same in both.
ORIGINAL_NAMES = {
    f"{IMAGE}global_img_feature_extensor": f"{IMAGE}glb_GN",
    f"{IMAGE}sub_img_feature_extensor": f"{IMAGE}sub_GN",
    f"{IMAGE}img_projection_up": f"{IMAGE}img_projection.0",
    f"{IMAGE}img_projection_down": f"{IMAGE}img_projection.2",
    f"{AUDIO}up_proj_for_speech": f"{AUDIO}audio_projection.speech.0",
    f"{AUDIO}down_proj_for_speech": f"{AUDIO}audio_projection.speech.2",
    f"{AUDIO}up_proj_for_vision_speech": f"{AUDIO}audio_projection.vision.0",
    f"{AUDIO}down_proj_for_vision_speech": f"{AUDIO}audio_projection.vision.2",
    f"{BLOCK}feed_forward_in.gate_up_proj": f"{BLOCK}feed_forward_in.net.0.linear",
    f"{BLOCK}feed_forward_in.down_proj": f"{BLOCK}feed_forward_in.net.2",
    f"{BLOCK}feed_forward_out.gate_up_proj": f"{BLOCK}feed_forward_out.net.0.linear",
    f"{BLOCK}feed_forward_out.down_proj": f"{BLOCK}feed_forward_out.net.2",
    f"{BLOCK}self_attn.q_proj": f"{BLOCK}self_attn.linear_q",
    f"{BLOCK}self_attn.k_proj": f"{BLOCK}self_attn.linear_k",
    f"{BLOCK}self_attn.v_proj": f"{BLOCK}self_attn.linear_v",
    f"{BLOCK}self_attn.o_proj": f"{BLOCK}self_attn.linear_out",
}
LAYERS, RANK, SPEECH_RANK = 2, 4, 3
ADAPTED = [
    f"model.layers.{layer}.{name}"
    for layer in range(LAYERS)
    for name in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
]
SCALING = 2.0  # lora_alpha 8 over rank 4
ROPE = {"type": "longrope", "short_factor": [1.0] * 12, "long_factor": [1.0 + index for index in range(12)]}
CONFIG = {
    "architectures": ["Phi4MMForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_phi4mm.Phi4MMConfig", "AutoTokenizer": "Xenova/gpt-4o"},
    "model_type": "phi4mm",
    "torch_dtype": "float32",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096,
    "partial_rotary_factor": 0.75,
    "rope_theta": 10000.0,
    "rope_scaling": ROPE,
    "initializer_range": 0.125,
    "rms_norm_eps": 1e-5,
    "sliding_window": 262144,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "embd_layer": {
        "embedding_cls": "image_audio",
        "audio_embd_layer": {"compression_rate": 8, "downsample_rate": 1, "projection_cls": "mlp"},
        "image_embd_layer": {
            "crop_size": 448,
            "hd_transform_order": "sub_glb",
            "image_token_compression_cls": "avg_pool_2d",
            "projection_cls": "mlp",
            "use_hd_transform": True,
            "with_learnable_separator": True,
        },
    },
    "img_processor": None,
    "audio_processor": {
        "name": "cascades",
        "config": {
            "attention_dim": 16,
            "attention_heads": 2,
            "linear_units": 16,
            "num_blocks": 1,
            "ext_pw_out_channel": 16,
            "depthwise_seperable_out_channel": 16,
            "input_size": 80,
            "time_reduction": 8,
            "causal": True,
            "nemo_conv_settings": {"conv_channels": 16},
            "relative_attention_bias_args": {"type": "t5", "t5_bias_max_distance": 16},
        },
    },
    "vision_lora": {"r": RANK, "lora_alpha": 8, "dp": 0.0, "layer": "layers.*"},
    "speech_lora": {"r": SPEECH_RANK, "lora_alpha": 6, "dp": 0.01, "layer": "layers.*"},
}


def native_model(vocab_size: int, ids: dict[str, int]) -> Phi4MultimodalForCausalLM:
    """What the checkpoint holds, in transformers' class, by a config written out for it."""
    torch.manual_seed(0)
    config = Phi4MultimodalConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=131072,
        original_max_position_embeddings=4096,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 4096,
            "short_factor": ROPE["short_factor"],
            "long_factor": ROPE["long_factor"],
        },
        initializer_range=0.125,
        tie_word_embeddings=True,
        bos_token_id=ids["<|endoftext|>"],
        pad_token_id=ids["<|endoftext|>"],
        eos_token_id=[ids["<|endoftext|>"], ids["<|end|>"]],
        sliding_window=262144,
        vision_config={
            "hidden_size": 144,
            "num_attention_heads": 2,
            "intermediate_size": 96,
            "num_hidden_layers": 3,
            "image_token_id": ids["<|endoftext10|>"],
        },
        audio_config={
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_blocks": 1,
            "num_attention_heads": 2,
            "ext_pw_out_channel": 16,
            "depthwise_separable_out_channel": 16,
            "nemo_conv_channels": 16,
            "bias_max_distance": 16,
            "audio_token_id": ids["<|endoftext11|>"],
        },
    )
    model = Phi4MultimodalForCausalLM(config).eval()
    with torch.no_grad():
        for weight in model.state_dict().values():
            weight.copy_(torch.randn(weight.shape) * 0.1)
    return model


def adapters(model: Phi4MultimodalForCausalLM) -> dict[str, torch.Tensor]:
    """Both adapters of every adapted matrix, at random."""
    factors = {}
    for name in ADAPTED:
        rows, columns = model.get_submodule(name).weight.shape
        for kind, rank in (("vision", RANK), ("speech", SPEECH_RANK)):
            factors[f"{name}.lora_A.{kind}.weight"] = torch.randn(rank, columns) * 0.1
            factors[f"{name}.lora_B.{kind}.weight"] = torch.randn(rows, rank) * 0.1
    return factors


def original_weights(model: Phi4MultimodalForCausalLM, factors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The model's weights and both adapters under Microsoft's names."""
    weights = dict(factors)
    for name, weight in model.state_dict().items():
        place, dot, kind = name.rpartition(".")
        if name in ORIGINAL_NAMES:
            weights[ORIGINAL_NAMES[name]] = weight
        elif place in ADAPTED:
            weights[f"{place}.base_layer.{kind}"] = weight
        elif name != "lm_head.weight":  # tied
            weights[f"{ORIGINAL_NAMES.get(place, place)}{dot}{kind}"] = weight
    return {name: weight.clone() for name, weight in weights.items()}


def build_original(folder: Path) -> Phi4MultimodalForCausalLM:
    """Write the checkpoint; return the native model with the image adapter's products added."""
    tokenizer = train_tokenizer(
        CORPUS,
        vocab_size=300,
        special_tokens=SPECIAL_TOKENS,
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        chat_template=ORIGINAL_TEMPLATE,
    )
    tokenizer.save_pretrained(folder)
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS}
    model = native_model(len(tokenizer), ids)
    factors = adapters(model)
    weights = original_weights(model, factors)
    # Two files, with a matrix and its adapter apart.
    parts = {"model-00001-of-00002.safetensors": {}, "model-00002-of-00002.safetensors": {}}
    for name, weight in weights.items():
        parts[f"model-0000{2 if '.lora_B.' in name else 1}-of-00002.safetensors"][name] = weight
    for name, part in parts.items():
        save_file(part, folder / name, metadata={"format": "pt"})
    index = {name: file for file, part in parts.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), ids["<|endoftext|>"])
    (folder / "config.json").write_text(json.dumps({**CONFIG, **special, "vocab_size": len(tokenizer)}))
    (folder / "preprocessor_config.json").write_text(
        json.dumps(
            {
                "auto_map": {"AutoImageProcessor": "processing_phi4mm.Phi4MMImageProcessor"},
                "dynamic_hd": 12,
                "audio_compression_rate": 8,
                "audio_downsample_rate": 1,
                "audio_feat_stride": 1,
            }
        )
    )
    with torch.no_grad():
        for name in ADAPTED:
            a, b = (factors[f"{name}.lora_{factor}.vision.weight"] for factor in "AB")
            model.get_submodule(name).weight += SCALING * b @ a
    return model
