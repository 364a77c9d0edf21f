"""Makes transformers' Auto classes know Phi-3.5-vision, in this process."""

from __future__ import annotations

from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
)

from lmm_r1.lmm_kits.phi3_v.configuration import Phi3VConfig
from lmm_r1.lmm_kits.phi3_v.image_processing import Phi3VImageProcessor
from lmm_r1.lmm_kits.phi3_v.modeling import Phi3VForCausalLM, Phi3VModel
from lmm_r1.lmm_kits.phi3_v.processing import Phi3VProcessor


def register_auto_classes() -> None:
    """Register config, processors and models under `phi3_v`; may be called again."""
    AutoConfig.register(Phi3VConfig.model_type, Phi3VConfig, exist_ok=True)
    # One class for either backend: it takes Pillow's images and makes tensors.
    AutoImageProcessor.register(
        Phi3VConfig,
        image_processor_classes={"pil": Phi3VImageProcessor, "torchvision": Phi3VImageProcessor},
        exist_ok=True,
    )
    AutoProcessor.register(Phi3VConfig, Phi3VProcessor, exist_ok=True)
    AutoModel.register(Phi3VConfig, Phi3VModel, exist_ok=True)
    AutoModelForCausalLM.register(Phi3VConfig, Phi3VForCausalLM, exist_ok=True)
    AutoModelForImageTextToText.register(Phi3VConfig, Phi3VForCausalLM, exist_ok=True)
