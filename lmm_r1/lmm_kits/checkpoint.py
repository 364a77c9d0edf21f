"""A checkpoint as a command names it, with its kit, config, processor and tokenizer loaded on demand."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from lmm_r1.lmm_kits.kit import Config, LmmKit, Processor
from lmm_r1.lmm_kits.registry import kit_of

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Checkpoint:
    """A folder or a hub name; each part is loaded when it is first asked for, and kept.

    Every part raises UserError where the checkpoint does not have it.
    """

    path: str
    trust_remote_code: bool = False

    @cached_property
    def kit(self) -> LmmKit:
        return kit_of(self.path, trust_remote_code=self.trust_remote_code)

    @cached_property
    def config(self) -> Config:
        return self.kit.load_config(self.path, trust_remote_code=self.trust_remote_code)

    @cached_property
    def processor(self) -> Processor:
        return self.kit.load_processor(self.path, trust_remote_code=self.trust_remote_code)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.kit.tokenizer_of(self.processor)

    @property
    def banned_token_ids(self) -> tuple[int, ...]:
        """The ids that must never be sampled, sorted."""
        return self.kit.banned_token_ids(self.config, self.tokenizer)

    def load_model(self, *, dtype: torch.dtype, attn_implementation: str, **kwargs: Any) -> PreTrainedModel:
        """Load the model, which is not kept; `kwargs` go to `from_pretrained`."""
        return self.kit.load_model(
            self.path,
            dtype=dtype,
            attn_implementation=attn_implementation,
            trust_remote_code=self.trust_remote_code,
            **kwargs,
        )
