"""The kit of Qwen3-VL: a deepstack vision tower; each step of a video is a run of placeholders behind its time as text."""

from __future__ import annotations

from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from lmm_r1.lmm_kits.qwen_vl.deepstack import DeepstackKit


class Qwen3VlKit(DeepstackKit):
    """The dense models."""

    model_type = "qwen3_vl"
    checkpoints = "Qwen3-VL"
    config_class = Qwen3VLConfig
    model_class = Qwen3VLForConditionalGeneration
    engine_language_model = "Qwen3ForCausalLM"


KIT = Qwen3VlKit()
