"""Finds the kit of a checkpoint by the `model_type` of its config, and the configs of released checkpoints."""

from __future__ import annotations

import copyreg
import functools
import importlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from lmm_r1 import cpu, hub
from lmm_r1.cluster import KIT_VARIABLE
from lmm_r1.dotted import nearest
from lmm_r1.errors import UserError
from lmm_r1.files.user_code import function_file, load_user_function
from lmm_r1.lmm_kits.kit import LmmKit

KITS: dict[str, str] = {
    "aria": "lmm_r1.lmm_kits.aria:AriaKit",
    "gemma3": "lmm_r1.lmm_kits.gemma3:Gemma3Kit",
    "gemma4": "lmm_r1.lmm_kits.gemma4:Gemma4Kit",
    "glm4v": "lmm_r1.lmm_kits.glm_v:Glm4vKit",
    "glm4v_moe": "lmm_r1.lmm_kits.glm_v:Glm4vMoeKit",
    "idefics3": "lmm_r1.lmm_kits.idefics:Idefics3Kit",
    "internvl": "lmm_r1.lmm_kits.internvl:InternVlKit",
    "janus": "lmm_r1.lmm_kits.janus:JanusKit",
    "llava_onevision": "lmm_r1.lmm_kits.llava_onevision:LlavaOnevisionKit",
    "llm": "lmm_r1.lmm_kits.llm:LanguageModelKit",
    "phi3_v": "lmm_r1.lmm_kits.phi3_v:Phi3VKit",
    "phi4_multimodal": "lmm_r1.lmm_kits.phi4_multimodal:Phi4MultimodalKit",
    "qwen2_5_vl": "lmm_r1.lmm_kits.qwen_vl:Qwen25VlKit",
    "qwen2_vl": "lmm_r1.lmm_kits.qwen_vl:Qwen2VlKit",
    "qwen3_5": "lmm_r1.lmm_kits.qwen_vl.qwen3:Qwen35Kit",
    "qwen3_5_moe": "lmm_r1.lmm_kits.qwen_vl.qwen3:Qwen35MoeKit",
    "qwen3_vl": "lmm_r1.lmm_kits.qwen_vl.qwen3:Qwen3VlKit",
    "qwen3_vl_moe": "lmm_r1.lmm_kits.qwen_vl.qwen3:Qwen3VlMoeKit",
    "smolvlm": "lmm_r1.lmm_kits.idefics:SmolVlmKit",
}
"""`model_type` -> "module:class" of its kit; imported on demand, because a kit loads transformers."""

# `model_type` of an original format that has no kit -> where to get the checkpoint in transformers' format.
ORIGINAL_FORMATS: dict[str, str] = {
    "phi4mm": "take revision refs/pr/70 of microsoft/Phi-4-multimodal-instruct, and merge its adapter for images into it: "
    "lmm-r1 merge --base FOLDER --adapter FOLDER/vision-lora --output MERGED"
}

KIT_FLAG = "--kit"
# Between the files in KIT_VARIABLE: `FILE.py:NAME` has a colon.
_BETWEEN = ";"
# Plain language models share one kit. A config with one of these words in a key is not one of them,
_MEDIA_WORDS = ("vision", "visual", "image", "img", "audio")
# and neither is a checkpoint with one of these files.
_MEDIA_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def get_kit(model_type: str) -> LmmKit:
    """Return the kit named `model_type`; raises UserError that lists the known ones."""
    given = next((kit for kit in given_kits() if kit.model_type == model_type), None)
    if given is None and model_type not in KITS:
        match = nearest(model_type, known=KITS)
        hint = f"did you mean {match}? " if match else ""
        raise UserError(f"no kit for model_type '{model_type}'; {hint}known: {', '.join(sorted(KITS))}")
    return given or _made(KITS[model_type])


@functools.cache
def _made(path: str) -> LmmKit:
    cpu.prepare()
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)()


def given_files() -> list[str]:
    """Return the files of kits that were registered in this process or in one that has started it."""
    return [file for file in os.environ.get(KIT_VARIABLE, "").split(_BETWEEN) if file]


def given_kits() -> Iterator[LmmKit]:
    return map(_given, given_files())


def _given(file: str) -> LmmKit:
    if function_file(file) is not None:
        return _of_code(file)
    from lmm_r1.lmm_kits.derived import derived_kit, read_kit

    return derived_kit(read_kit(file), place=file)


@functools.cache
def _of_code(file: str) -> LmmKit:
    cpu.prepare()
    kit = load_user_function(file, default="Kit", flag=KIT_FLAG)()
    if not isinstance(kit, LmmKit):
        raise UserError(f"{KIT_FLAG} {file}: {type(kit).__name__} is no LmmKit; subclass lmm_r1.lmm_kits.LmmKit")
    # Another process finds the class by its file, which is no module there.
    copyreg.pickle(type(kit), lambda kit: (_of_code, (file,)))
    return kit


def kit_of(model_path: str, *, trust_remote_code: bool = False) -> LmmKit:
    """Return the kit of the checkpoint at `model_path` (a folder or a hub name); raises UserError if there is none."""
    return _given_or_stored(model_path) or get_kit(kit_name_of(model_path, trust_remote_code=trust_remote_code))


def _given_or_stored(model_path: str) -> LmmKit | None:
    """Return the kit of a registered file, or a derived one in the checkpoint's config; None for one of `KITS`."""
    config = stored_config(model_path)
    model_type = config.get("model_type")
    given = next((kit for kit in given_kits() if kit.model_type == model_type), None)
    if given is not None or model_type in KITS:
        return given
    from lmm_r1.lmm_kits.derived import derived_kit, stored_kit

    stored = stored_kit(config, path=model_path)
    return None if stored is None else derived_kit(stored, place=model_path)


def kit_name_of(model_path: str, *, trust_remote_code: bool = False) -> str:
    """Return the name of the checkpoint's kit without loading the kit; raises UserError if there is none.

    A multimodal architecture without a kit is refused: training it as a plain language model would drop its images.
    """
    if (kit := _given_or_stored(model_path)) is not None:
        return kit.model_type
    config = stored_config(model_path)
    model_type = config.get("model_type")
    if model_type in KITS:
        return model_type
    if model_type in ORIGINAL_FORMATS:
        raise UserError(f"{model_path}: no kit for model_type '{model_type}'; {ORIGINAL_FORMATS[model_type]}")
    refusal = _llm_refusal(model_path, model_type, config, trust_remote_code=trust_remote_code)
    if refusal is not None:
        raise UserError(
            f"{model_path}: no kit for model_type '{model_type}' ({refusal}); known: {', '.join(sorted(KITS))}, and 'llm' "
            "serves any plain causal language model. For one with images, lmm-r1 kits --derive MODEL --output KIT.json "
            "finds out what works; lmm-r1 --kit KIT.json COMMAND uses it"
        )
    return "llm"


def register_kit(file: str | Path) -> LmmKit:
    """Let this process and those that it starts use the kit of a file for models of its `model_type`.

    Args:
        file: what `lmm-r1 kits --derive` has written, or `FILE.py:NAME`, a subclass of `LmmKit`; NAME is Kit by default.

    Raises:
        UserError: the file holds no kit, or a derived one of an architecture that has a kit of its own.
    """
    path = function_file(str(file)) or str(file)
    own = str(Path(path).resolve()) + str(file).removeprefix(path)
    made = _given(own)
    if function_file(own) is None and made.model_type in KITS:
        raise UserError(f"{file}: model_type '{made.model_type}' has a kit of its own; leave the file out")
    os.environ[KIT_VARIABLE] = _BETWEEN.join(dict.fromkeys([own, *given_files()]))
    return made


def stored_config(model_path: str) -> dict:
    """Return the config.json of a folder or a hub name; raises UserError if it cannot be read."""
    folder = Path(model_path)
    if folder.suffix == ".gguf" and folder.is_file():
        raise UserError(f"{folder}: a GGUF file; lmm-r1 convert_checkpoint {folder} --output DIR converts it")
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


def _llm_refusal(
    model_path: str, model_type: str | None, config: Mapping[str, Any], *, trust_remote_code: bool
) -> str | None:
    """Return why a checkpoint is not a plain causal language model; None if it is one."""
    media = [key for key in config if any(word in key for word in _MEDIA_WORDS)]
    if media:
        return f"its config has {', '.join(media)}"
    # With code of its own, a checkpoint may take media although its config does not show it.
    files = [name for name in _MEDIA_FILES if (Path(model_path) / name).is_file()]
    if files:
        return f"it has {files[0]}, and so takes images or sound; delete that file if it does not"
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    # The rest loads torch; an unknown name is reported without it.
    if model_type is not None and model_type in CONFIG_MAPPING_NAMES:
        cpu.prepare()
        from lmm_r1.lmm_kits.llm import refusal_of

        return refusal_of(model_type)
    if trust_remote_code and "AutoModelForCausalLM" in config.get("auto_map", {}):
        return None
    return "transformers has no causal language model of that name"


@functools.cache
def released_configs() -> Mapping[str, Mapping[str, Any]]:
    """Return for each name the settings of its config.json that determine its size (`config`), and its `parameters`."""
    return json.loads((resources.files("lmm_r1.lmm_kits") / "released.json").read_text(encoding="utf-8"))


@functools.cache
def released_folder(name: str) -> Path:
    """Return a folder with a released checkpoint's config, from which a run can be planned; it is deleted at exit."""
    folder = Path(_folders().name) / name
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(released_configs()[name]["config"]), encoding="utf-8")
    return folder


@functools.cache
def _folders() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="released_")
