"""Finds the kit of a checkpoint by the `model_type` of its config."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

from lmm_r1 import hub
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits.base import LmmKit

# Imported on demand: a kit loads transformers.
KITS: dict[str, str] = {
    "llm": "lmm_r1.lmm_kits.llm",
    "qwen2_5_vl": "lmm_r1.lmm_kits.qwen2_5_vl",
}

# Plain language models share one kit; a config with a key that holds any of these words is not one of them.
_MEDIA_WORDS = ("vision", "visual", "image", "img", "audio")


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
    media = [key for key in config if any(word in key for word in _MEDIA_WORDS)]
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
            config = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UserError(f"{file}: not valid JSON ({error}); copy the checkpoint again") from error
        if not isinstance(config, dict):
            raise UserError(f"{file}: a JSON object is needed, not {type(config).__name__}; copy the checkpoint again")
        return config
    if model_path.startswith(("/", ".", "~")):
        raise UserError(f"{model_path}: no such folder; check the path")
    from transformers import PretrainedConfig

    hub.is_reachable()
    try:
        return PretrainedConfig.get_config_dict(model_path)[0]
    except OSError as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"{model_path}: no such folder, and no model of this name can be had from the hub ({reason}); "
            "check the path or the name"
        ) from error


def _is_causal_lm(model_type: str | None, config: dict, *, trust_remote_code: bool) -> bool:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return True
    return trust_remote_code and "AutoModelForCausalLM" in config.get("auto_map", {})
