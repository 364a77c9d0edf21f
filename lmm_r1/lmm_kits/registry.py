"""Finds the kit of a checkpoint by the `model_type` of its config."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

from lmm_r1.errors import UserError
from lmm_r1.lmm_kits.base import LmmKit

# Imported on demand: a kit loads transformers.
KITS: dict[str, str] = {
    "llm": "lmm_r1.lmm_kits.llm",
    "qwen2_5_vl": "lmm_r1.lmm_kits.qwen2_5_vl",
}

# Plain language models share one kit; a config with any of these sections is not one of them.
_MEDIA_SECTIONS = ("vision_config", "audio_config", "img_processor", "audio_processor")


def get_kit(model_type: str) -> LmmKit:
    """Return the kit named `model_type`; raises UserError that lists the known ones."""
    if model_type not in KITS:
        raise UserError(f"no kit for model_type '{model_type}'; known: {', '.join(sorted(KITS))}")
    return importlib.import_module(KITS[model_type]).KIT


def kit_of(model_path: str, *, trust_remote_code: bool = False) -> LmmKit:
    """Return the kit of the checkpoint at `model_path` (a folder or a hub name); raises UserError if there is none.

    A multimodal architecture without a kit is refused: training it as a plain language model would drop its images.
    """
    config = _read_config(model_path)
    model_type = config.get("model_type")
    if model_type in KITS:
        return get_kit(model_type)
    media = [section for section in _MEDIA_SECTIONS if section in config]
    if media or not _is_causal_lm(model_type, config, trust_remote_code=trust_remote_code):
        raise UserError(
            f"{model_path}: no kit for model_type '{model_type}'"
            + (f" (its config has {', '.join(media)})" if media else "")
            + f"; known: {', '.join(sorted(KITS))}, and 'llm' serves any plain causal language model"
        )
    return get_kit("llm")


def _read_config(model_path: str) -> dict:
    folder = Path(model_path)
    if folder.is_dir():
        file = folder / "config.json"
        if not file.is_file():
            raise UserError(f"{model_path}: no config.json in this folder; is it a Hugging Face checkpoint?")
        try:
            return json.loads(file.read_text())
        except json.JSONDecodeError as error:
            raise UserError(f"{file}: not valid JSON ({error})") from error
    from transformers import PretrainedConfig

    try:
        return PretrainedConfig.get_config_dict(model_path)[0]
    except OSError as error:
        raise UserError(f"{model_path}: neither a folder nor a model that can be fetched from the hub") from error


def _is_causal_lm(model_type: str | None, config: dict, *, trust_remote_code: bool) -> bool:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return True
    return trust_remote_code and "AutoModelForCausalLM" in config.get("auto_map", {})
