"""LMM-R1: rule-based reinforcement learning for large multimodal models, text first, then images.

The names of the Python API are attributes of this package, imported on first use.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmm_r1.api.functions import (
        AnsweredRow,
        Evaluation,
        GeneratedResponse,
        Generation,
        TrainedRun,
        evaluate,
        generate,
        train_dpo,
        train_kd,
        train_rl,
        train_rm,
        train_sft,
    )
    from lmm_r1.config import PPOConfig, SFTConfig
    from lmm_r1.errors import RunStopped, UserError
    from lmm_r1.lmm_kits.registry import KITS, get_kit, register_kit
    from remote_rm.registry import VERIFIERS, get_verifier
    from remote_rm.verifier import Item, Score

__all__ = [
    "KITS",
    "VERIFIERS",
    "AnsweredRow",
    "Evaluation",
    "GeneratedResponse",
    "Generation",
    "Item",
    "PPOConfig",
    "RunStopped",
    "SFTConfig",
    "Score",
    "TrainedRun",
    "UserError",
    "evaluate",
    "generate",
    "get_kit",
    "get_verifier",
    "register_kit",
    "train_dpo",
    "train_kd",
    "train_rl",
    "train_rm",
    "train_sft",
]
_HOMES = {
    "lmm_r1.api.functions": (
        *("AnsweredRow", "Evaluation", "GeneratedResponse", "Generation", "TrainedRun"),
        *("evaluate", "generate", "train_dpo", "train_kd", "train_rl", "train_rm", "train_sft"),
    ),
    "lmm_r1.config": ("PPOConfig", "SFTConfig"),
    "lmm_r1.errors": ("RunStopped", "UserError"),
    "lmm_r1.lmm_kits.registry": ("KITS", "get_kit", "register_kit"),
    "remote_rm.registry": ("VERIFIERS", "get_verifier"),
    "remote_rm.verifier": ("Item", "Score"),
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Return an attribute from the module that defines it."""
        import importlib

        home = next((module for module, names in _HOMES.items() if name in names), None)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        # Stored, so that it is looked up once.
        return globals().setdefault(name, getattr(importlib.import_module(home), name))

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
