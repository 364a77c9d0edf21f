"""What vLLM calls in each of its processes (entry point group `vllm.general_plugins`): it learns of classes of our own."""

from __future__ import annotations

import importlib

ENGINE_CLASSES: dict[str, str] = {}
"""Architecture as a checkpoint's `config.json` names it -> "module:class" of vLLM's model for it."""
AUTO_CLASS_MODULES: tuple[str, ...] = ()
"""Modules with a `register_auto_classes()` for configs and processors that transformers does not know."""


def register() -> None:
    """Tell vLLM and transformers in this process of the classes; may be called again."""
    from vllm import ModelRegistry

    for module in AUTO_CLASS_MODULES:
        importlib.import_module(module).register_auto_classes()
    for architecture, place in ENGINE_CLASSES.items():
        ModelRegistry.register_model(architecture, place)
