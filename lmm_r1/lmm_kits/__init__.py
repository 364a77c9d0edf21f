"""LMM kits: one module or package per architecture; see README.md for how to add one."""

from lmm_r1.lmm_kits.checkpoint import Checkpoint
from lmm_r1.lmm_kits.kit import EncodedPrompt, LmmKit, Media
from lmm_r1.lmm_kits.registry import KITS, get_kit, kit_of
from lmm_r1.lmm_kits.tiny_model import TinyModelSpec

__all__ = ["KITS", "Checkpoint", "EncodedPrompt", "LmmKit", "Media", "TinyModelSpec", "get_kit", "kit_of"]
