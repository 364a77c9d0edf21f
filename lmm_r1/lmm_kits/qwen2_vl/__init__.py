"""The kit of Qwen2-VL."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration, Qwen2VLProcessor

from lmm_r1.lmm_kits.kit import TinyModelSpec
from lmm_r1.lmm_kits.qwen_vl import QwenVlKit


class Qwen2VlKit(QwenVlKit):
    """A step of a video always counts 1 in the positions: its processor does not say how long one lasts."""

    model_type = "qwen2_vl"
    checkpoints = "Qwen2-VL"
    config_class = Qwen2VLConfig
    model_class = Qwen2VLForConditionalGeneration
    processor_class = Qwen2VLProcessor
    writes_thousandths = True

    def build_tiny(self, spec: TinyModelSpec, tokenizer_corpus: Iterable[str], folder: str | Path) -> None:
        from lmm_r1.lmm_kits.qwen_vl.tiny_model import write_tiny

        # The tower's own width is `embed_dim`; `hidden_size` is the language model's.
        vision = {"embed_dim": spec.hidden_size, "mlp_ratio": 2}
        write_tiny(self, spec, tokenizer_corpus, folder, vision_config=vision)


KIT = Qwen2VlKit()
