"""A checkpoint's side of a conversation with an engine: prompts encoded by its kit, tokens decoded again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lmm_r1.data.messages import Row
from lmm_r1.data.row_checks import check_images_taken
from lmm_r1.data.row_encoding import encode_row
from lmm_r1.errors import UserError
from lmm_r1.inference.completion import Completion, EngineSettings, FinishReason
from lmm_r1.lmm_kits import Checkpoint, EncodedPrompt
from lmm_r1.models.rope_scaling import tell_factors


class PromptCodec:
    """Encodes rows and decodes responses of one checkpoint."""

    def __init__(self, path: str, settings: EngineSettings) -> None:
        checkpoint = Checkpoint(path, trust_remote_code=settings.trust_remote_code)
        self.path = path
        self.kit = checkpoint.kit
        self.processor = checkpoint.processor
        self.tokenizer = checkpoint.tokenizer
        self.config = checkpoint.config
        self.banned_token_ids = checkpoint.banned_token_ids
        self._asked_len = settings.max_model_len
        self.max_len = min(settings.max_model_len, self.config.get_text_config().max_position_embeddings)
        tell_factors(self.config, max_len=self.max_len, flag="--max_model_len")
        self._limits = {"image": settings.max_images, "video": settings.max_videos}

    def encode(self, row: Row) -> EncodedPrompt:
        """Return the row's prompt; raises UserError for media that cannot be taken and a prompt that leaves no room."""
        check_images_taken([row], kit=self.kit, model=self.path)
        encoded = encode_row(row, kit=self.kit, processor=self.processor, add_generation_prompt=True)
        for kind, items in (("image", encoded.images), ("video", encoded.videos)):
            if len(items) > self._limits[kind]:
                raise UserError(
                    f"{row.location}: {len(items)} {kind}s in one prompt, more than --max_{kind}s {self._limits[kind]}"
                )
        if len(encoded.token_ids) >= self.max_len:
            bound = f"--max_model_len {self.max_len}; raise it"
            if self.max_len < self._asked_len:
                bound = f"the {self.max_len} tokens that the model takes"
            raise UserError(
                f"{row.location}: the prompt takes {len(encoded.token_ids)} tokens, which leaves no room for a response "
                f"in {bound}"
            )
        return encoded

    def room(self, encoded: EncodedPrompt, *, max_new_tokens: int) -> int:
        """Return how many tokens a response to the prompt may take."""
        return min(max_new_tokens, self.max_len - len(encoded.token_ids))

    def completion(self, token_ids: Sequence[int], finish_reason: FinishReason) -> Completion:
        """Return a response; `token_ids` end with the end token where the model wrote one."""
        ids = list(token_ids)
        text_ids = ids[:-1] if finish_reason == "stop" else ids
        return Completion(
            text=self.tokenizer.decode(text_ids, skip_special_tokens=False),
            num_tokens=len(ids),
            finish_reason=finish_reason,
        )

    def stop_token_ids(self, generation_config: Any) -> list[int]:
        """Return the tokenizer's end token and those of the checkpoint's generation config."""
        ids = generation_config.eos_token_id
        listed = [] if ids is None else ids if isinstance(ids, list) else [ids]
        return sorted({self.tokenizer.eos_token_id, *listed})
