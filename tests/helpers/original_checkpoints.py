"""Checkpoints in the layouts of their original repositories, which convert_checkpoint reads."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from helpers.tables import table
from helpers.tiny_models import CORPUS
from safetensors.torch import save_file
from transformers import Phi4MultimodalConfig, Phi4MultimodalForCausalLM

from lmm_r1.lmm_kits.tiny_model import TinyTokens, train_tokenizer

# Flags that not every version has; where they are missing, notes say so.
# data.val_batch_size, what LoRA adapts, and what is shown of a validation.
EASYR1_LEFT_OUT = {"data.val_batch_size", "worker.actor.model.lora.target_modules", "trainer.val_generations_to_log"}
EASYR1_FLAGS = table("helpers/conversion_examples", "easyr1_flags")

GEO3K = "data.train_files=hiyouga/geometry3k@train data.val_files=hiyouga/geometry3k@test"
GEO3K_FLAGS = {"data.prompt_dataset": "hiyouga/geometry3k", "eval.dataset": "hiyouga/geometry3k"}


VL7B, VL3B = "Qwen/Qwen2.5-VL-7B-Instruct", "Qwen/Qwen2.5-VL-3B-Instruct"
BF16 = "worker.actor.fsdp.torch_dtype=bf16 worker.actor.optim.strategy=adamw_bf16"
ONE_ENGINE_PER_GPU = {"vllm.num_engines": 8, "vllm.tensor_parallel_size": 1}
# What each example script of EasyR1 gives beside the file, what that changes, and what is left out more.
NO_REFERENCE = dict.fromkeys(("ref.offload", "ref.num_nodes", "ref.num_gpus_per_node"))
EASYR1_SCRIPTS: dict[str, tuple[str, dict[str, object], set[str]]] = {
    "qwen2_5_7b_math_grpo": ("", {}, set()),
    "qwen2_5_vl_3b_geo3k_grpo": (
        f"{GEO3K} worker.actor.model.model_path={VL3B} worker.rollout.tensor_parallel_size=1 "
        "trainer.experiment_name=qwen2_5_vl_3b_geo_grpo trainer.n_gpus_per_node=2",
        GEO3K_FLAGS
        | {"actor.model_name_or_path": VL3B, "logger.wandb.run_name": "qwen2_5_vl_3b_geo_grpo"}
        | {"ckpt.output_dir": "checkpoints/easy_r1/qwen2_5_vl_3b_geo_grpo"}
        | {"actor.num_gpus_per_node": 2, "ref.num_gpus_per_node": 2}
        | {"vllm.num_engines": 2, "vllm.tensor_parallel_size": 1},
        set(),
    ),
    "qwen2_5_vl_32b_geo3k_grpo": (
        f"{GEO3K} worker.actor.micro_batch_size_per_device_for_update=1 "
        f"worker.actor.micro_batch_size_per_device_for_experience=8 {BF16} worker.rollout.tensor_parallel_size=8 "
        "trainer.nnodes=2",
        GEO3K_FLAGS
        | {"rollout.micro_batch_size": 8, "rollout.max_tokens_per_gpu": 8 * 4096}
        | {"actor.num_nodes": 2, "ref.num_nodes": 2, "vllm.num_engines": 2, "vllm.tensor_parallel_size": 8},
        {"worker.actor.optim.strategy"},
    ),
    "qwen3_14b_dapo17k_dapo": (
        "data.max_prompt_length=2048 data.max_response_length=20480 data.mini_rollout_batch_size=1536 "
        "worker.actor.micro_batch_size_per_device_for_experience=8 worker.actor.optim.weight_decay=0.1 "
        "worker.actor.optim.lr_warmup_steps=10 worker.actor.global_batch_size=32 worker.actor.clip_ratio_high=0.28 "
        "worker.actor.clip_ratio_dual=10.0 worker.rollout.n=16 worker.rollout.max_num_batched_tokens=22528 "
        'worker.rollout.val_override_config={"n":16,"temperature":1.0,"top_p":0.7} '
        "worker.rollout.gpu_memory_utilization=0.8 "
        "worker.reward.reward_function=./examples/reward_function/dapo.py:compute_score "
        'worker.reward.reward_function_kwargs={"max_response_length":20480,"overlong_buffer_length":4096} '
        "algorithm.disable_kl=True algorithm.online_filtering=True algorithm.filter_key=accuracy_normalized "
        "trainer.total_epochs=10 trainer.max_try_make_batch=10",
        {
            "data.max_len": 22528,
            "rollout.max_new_tokens": 20480,
            "train.max_tokens_per_gpu": 22528,
            "rollout.micro_batch_size": 8,
            "rollout.max_tokens_per_gpu": 180224,  # 8 x 22528
            "rollout.n_samples_per_prompt": 16,
            "train.batch_size": 512,  # 32 x 16
            "actor.adam.weight_decay": 0.1,
            "actor.eps_clip_low_high": [0.2, 0.28],
            "actor.dual_clip": 10.0,
            "vllm.gpu_memory_utilization": 0.8,
            "eval.n_samples_per_prompt": 16,
            "eval.temperature": 1.0,
            "eval.top_p": 0.7,
            "reward.remote_url": "./examples/reward_function/dapo.py:compute_score",
            "reward.function_kwargs": '{"max_response_length": 20480, "overlong_buffer_length": 4096}',
            "algo.dynamic_filtering_part": "accuracy_normalized",
            "algo.dynamic_filtering_range": [0.01, 0.99],
            "algo.dynamic_filtering_max_batches": 30,  # 10 batches of 1536 prompts are 30 of 512
            "algo.kl.init_coef": 0.0,
            "algo.kl.use_loss": None,
            "algo.kl.estimator": None,
            "algo.dynamic_filtering_enable": True,
            "train.num_episodes": 10,
            **NO_REFERENCE,
        },
        {
            "data.mini_rollout_batch_size",
            "worker.actor.optim.lr_warmup_steps",
            "worker.rollout.max_num_batched_tokens",
        },
    ),
    "qwen2_5_vl_7b_geo3k_gspo": (
        f"{GEO3K} worker.actor.loss_type=gspo_token worker.actor.loss_avg_mode=seq worker.actor.clip_ratio_low=3e-4 "
        "worker.actor.clip_ratio_high=4e-4 algorithm.disable_kl=True",
        GEO3K_FLAGS
        | {"actor.policy_loss_type": "gspo_token", "actor.loss_agg_mode": "seq-mean-token-mean"}
        | {"actor.eps_clip_low_high": [3e-4, 4e-4]}
        | {"algo.kl.init_coef": 0.0, "algo.kl.use_loss": None, "algo.kl.estimator": None, **NO_REFERENCE},
        set(),
    ),
    "qwen2_5_vl_7b_geo3k_cispo": (
        f"{GEO3K} worker.actor.loss_type=cispo worker.actor.clip_ratio_low=0 worker.actor.clip_ratio_high=4",
        GEO3K_FLAGS
        | {"actor.policy_loss_type": "cispo", "actor.eps_clip_low_high": [0.0, 4.0], "actor.dual_clip": None},
        set(),
    ),
    "qwen2_5_vl_7b_geo3k_sapo": (
        f"{GEO3K} worker.actor.loss_type=sapo worker.actor.tau_positive=1.0 worker.actor.tau_negative=1.05",
        GEO3K_FLAGS
        | {"actor.policy_loss_type": "sapo", "actor.sapo_temperature_pos": 1.0, "actor.sapo_temperature_neg": 1.05}
        | {"actor.eps_clip_low_high": None, "actor.dual_clip": None},
        set(),
    ),
    "qwen2_5_vl_7b_geo3k_reinforce": (
        f"{GEO3K} algorithm.adv_estimator=reinforce_plus_plus algorithm.use_kl_loss=false algorithm.kl_penalty=kl "
        "algorithm.kl_coef=1.0e-3",
        GEO3K_FLAGS
        | {"algo.advantage.estimator": "reinforce", "algo.kl.init_coef": 0.001}
        | {"algo.kl.use_loss": False, "algo.kl.estimator": "k1"},
        set(),
    ),
    "qwen3_4b_math_grpo_lora": (
        "worker.actor.model.lora.rank=64 worker.actor.model.lora.alpha=64 worker.actor.optim.lr=1e-5 "
        "worker.rollout.tensor_parallel_size=1 trainer.n_gpus_per_node=1",
        {
            "ds.lora.rank": 64,
            "ds.lora.alpha": 64,
            "ds.lora.target_modules": ["all-linear"],
            "actor.adam.lr": 1e-5,
            "actor.num_gpus_per_node": 1,
            "ref.num_gpus_per_node": 1,
            "vllm.num_engines": 1,
            "vllm.tensor_parallel_size": 1,
        },
        set(),
    ),
    "qwen2_5_vl_3b_geoqa8k_grpo": (
        "data.train_files=leonardPKU/GEOQA_8K_R1V@train data.val_files=leonardPKU/GEOQA_8K_R1V@test "
        "data.format_prompt=./examples/format_prompt/r1v.jinja worker.rollout.tensor_parallel_size=1 "
        "worker.reward.reward_function=./examples/reward_function/r1v.py:compute_score",
        {
            "data.prompt_dataset": "leonardPKU/GEOQA_8K_R1V",
            "eval.dataset": "leonardPKU/GEOQA_8K_R1V",
            "data.prompt_template": "./examples/format_prompt/r1v.jinja",
            "reward.remote_url": "./examples/reward_function/r1v.py:compute_score",
            **ONE_ENGINE_PER_GPU,
        },
        set(),
    ),
    "glm4.1v_base_geo3k_grpo": (f"{GEO3K} worker.actor.padding_free=False", GEO3K_FLAGS, set()),
}

LMM_R1_FLAGS = {
    "actor.model_name_or_path": VL3B,
    "actor.num_nodes": 1,
    "actor.num_gpus_per_node": 8,
    "actor.gradient_checkpointing_enable": True,
    "algo.advantage.gamma": 1,
    "algo.advantage.lambd": 1,
    "algo.kl.init_coef": 0.001,
    "ckpt.load_enable": True,
    "ckpt.save_hf": True,
    "ckpt.save_steps": 20,
    "actor.eps_clip": 0.2,  # their default
    "data.input_key": "message",
    "data.label_key": "answer",
    "data.max_len": 8192,  # 4096 + 4096
    "data.max_samples": 100000,
    "ds.zero_stage": 3,
    "ds.param_dtype": "bf16",
    "logger.trackers": ["wandb"],
    "logger.wandb.group": "lmm-r1-training",
    "ref.num_nodes": 1,
    "ref.num_gpus_per_node": 8,
    "reward.remote_url": "http://127.0.0.1:5000/get_reward",
    "rollout.batch_size": 256,
    "rollout.n_samples_per_prompt": 16,
    "rollout.max_new_tokens": 4096,
    "rollout.temperature": 1.0,
    "rollout.micro_batch_size": 2,
    "train.batch_size": 256,
    "train.micro_batch_size": 2,
    "train.max_epochs": 1,
    "train.num_episodes": 2,
    "train.colocate_all": True,
    "vllm.num_engines": 8,
    "vllm.tensor_parallel_size": 1,
    "vllm.gpu_memory_utilization": 0.5,
    "vllm.enable_sleep": True,
    "vllm.enable_prefix_caching": True,
}
CLIPPED = {"critic.value_clip": 0.2}  # their default
CRITIC = {"critic.num_nodes": 1, "critic.num_gpus_per_node": 8, **CLIPPED}
FRE = {"actor.model_name_or_path": "./checkpoints/lmm-r1-fre-text"}
MORE_ROOM = {"rollout.max_new_tokens": 8192, "data.max_len": 12288}
ONE_AT_A_TIME = {"rollout.micro_batch_size": 1, "train.micro_batch_size": 1}
# What each stage of LMM-R1 is beside the common settings: rows, estimator, learning rate, folder, and the rest.
LMM_R1_SCRIPTS: dict[str, tuple[str, str, float, str, dict[str, object]]] = {
    "fre_text": ("deepscaler_message.jsonl", "reinforce_baseline", 4e-7, "/checkpoints/lmm-r1-fre-text", {}),
    "fre_multi": ("mathv60k_message.jsonl", "reinforce_baseline", 1e-6, "./checkpoints/lmm-r1-fre-multi", {}),
    "mgt_geo": ("mathv_geo_message.jsonl", "gae", 1e-6, "./checkpoints/lmm-r1-mgt-geo", FRE | CRITIC),
    "mgt_percereas": (
        *("mathv60k_message.jsonl", "reinforce_baseline", 4e-7, "./checkpoints/lmm-r1-mgt-percereas"),
        FRE | MORE_ROOM | ONE_AT_A_TIME | {"data.prompt_probs": "${PROMPT_DATA_PROBS}"},  # which it sets nowhere
    ),
    "direct_rl_geo": ("MathV360k/geo_split.jsonl", "gae", 1e-6, "./checkpoints/lmm-r1-direct-rl-geo", CRITIC),
    "sokoban": (
        *("sokoban.jsonl", "gae", 1e-6, "./checkpoints/lmm-r1-sokoban"),
        ONE_AT_A_TIME
        | NO_REFERENCE
        | {"rollout.batch_size": 128, "train.batch_size": 128, "train.num_episodes": 4, "ckpt.save_steps": 5}
        | {"rollout.max_new_tokens": 8196, "data.max_len": 12292, "algo.kl.init_coef": 0, "critic.adam.lr": 5e-6}
        | {"actor.freeze_visual_encoder": True, "data.label_key": None, "ckpt.load_enable": None}
        | {"logger.trackers": None, "logger.wandb.group": None, **CLIPPED},
    ),
}

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
    tokens = TinyTokens(special=tuple(SPECIAL_TOKENS), end="<|endoftext|>", chat_template=ORIGINAL_TEMPLATE)
    tokenizer = train_tokenizer(tokens, CORPUS, vocab_size=300)
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
