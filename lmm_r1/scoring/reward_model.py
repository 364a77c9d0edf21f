"""Trained reward models: samples are encoded as in the RL loop, and computed in batches of many tokens."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from lmm_r1.data.messages import Row
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits import Checkpoint, EncodedPrompt, Media
from lmm_r1.lmm_kits.checkpoint import check_weights, encode_row
from lmm_r1.lmm_kits.encoding import text_ids
from lmm_r1.models.actor import KitValueModel, head_name, stored_weight
from lmm_r1.models.loading import LoadSettings
from lmm_r1.models.packed.attention import packing_refusal, use_packed_attention
from lmm_r1.models.packed.packing import ModelSample
from lmm_r1.models.packed.self_check import check_packing
from lmm_r1.models.rope_scaling import tell_factors
from remote_rm.responses import end_of_prompt

logger = logging.getLogger(__name__)

GPU_BATCH_TOKENS = 16384
# Measured: with 16,384 tokens a sample of 85 or 379 tokens took 2.3 and 2.0 times as long as with this many.
CPU_BATCH_TOKENS = 1024


@dataclass(frozen=True, kw_only=True, eq=False)
class EncodedSample:
    """A prompt and its response, as the model reads them."""

    token_ids: list[int]
    """Every image is expanded to its full run of placeholders."""
    media: Media | None
    """None for a sample without images and videos."""


class RewardModel:
    """A checkpoint with a value head, which gives a response one reward, on the GPU if there is one.

    One thread at a time may use it.
    """

    def __init__(
        self,
        path: str,
        *,
        dtype: str,
        max_len: int,
        max_batch_tokens: int | None,
        value_head_prefix: str,
        normalize: bool,
        trust_remote_code: bool,
    ) -> None:
        """Load the checkpoint; raises UserError if it cannot be loaded or has no value head.

        Args:
            path: a folder or a hub name.
            dtype: bf16, fp16 or fp32.
            max_len: the longest sample, in tokens; a longer one is refused.
            max_batch_tokens: tokens computed in one forward pass, including padding; only a single sample may exceed it.
                None takes a default for the device.
            value_head_prefix: the name of the value head, for a checkpoint whose config does not state it.
            normalize: whether to use the mean and the standard deviation in the checkpoint's config.
        """
        checkpoint = Checkpoint(path, trust_remote_code=trust_remote_code)
        self.max_len = max_len
        self.max_batch_tokens = max_batch_tokens or batch_tokens(has_gpu=torch.cuda.is_available())
        self.kit = checkpoint.kit
        check_weights(path)
        self.processor = checkpoint.processor
        self._tokenizer = checkpoint.tokenizer
        name = head_name(checkpoint.config, default=value_head_prefix)
        try:
            stored_weight(checkpoint.path, name=name, config=checkpoint.config, required=True)
        except UserError as error:
            # Flags that belong to a group in training have no prefix here.
            raise UserError(str(error).replace("--ds.", "--")) from error
        settings = LoadSettings(
            attn_implementation="auto", param_dtype=dtype, trust_remote_code=trust_remote_code, max_len=max_len
        )
        model = KitValueModel(
            path, "reward", settings, value_head_prefix=value_head_prefix, normalize_reward=normalize
        )
        tell_factors(model.model_config, max_len=max_len, flag="--max_len")
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._model = model.to(self.device).eval()
        self._pack_where_it_can()
        known = len(self._tokenizer)
        banned = self.kit.banned_token_ids(model.model_config, self._tokenizer)
        self._media_ids = self.kit.placeholder_ids(self.processor) | {token for token in banned if token < known}
        texts = self._tokenizer.convert_ids_to_tokens(sorted(self._media_ids))
        # Without any, a pattern that never matches.
        self._media_text = re.compile("|".join(f"({re.escape(text)})" for text in texts) or "(?!)")

    @property
    def is_packed(self) -> bool:
        """Whether batches are packed sequences, without padding."""
        return self._model.packing_samples

    def encode_prompt(self, row: Row) -> EncodedPrompt:
        """Return the row's prompt with its images, for several responses to it; raises UserError as `encode` does.

        A row's prefill belongs to the responses.
        """
        row = replace(row, prefill="")
        return encode_row(row, kit=self.kit, processor=self.processor, add_generation_prompt=True)

    def score(self, samples: Sequence[EncodedSample]) -> list[float]:
        """Return the reward of each sample; rewards are not checked, and may not be finite."""
        results: dict[int, float] = {}
        lengths = [len(sample.token_ids) for sample in samples]
        for batch in plan_batches(lengths, max_tokens=self.max_batch_tokens, padded=not self.is_packed):
            given = [ModelSample.whole(samples[index].token_ids, samples[index].media) for index in batch]
            with torch.no_grad():
                rewards = self._model(given, of_samples=True)
            results |= zip(batch, rewards.float().tolist(), strict=True)
        return [results[index] for index in range(len(samples))]

    def _pack_where_it_can(self) -> None:
        refusal = self.kit.refusals.get("packed") or packing_refusal(self._model.model)
        if refusal is not None:
            logger.warning("samples are scored in padded batches: %s", refusal)
            return
        use_packed_attention(self._model.model)
        self._model.packing_samples = True
        try:
            check_packing(self._model)
        except UserError as error:
            # A run would stop here; padded batches give the same scores, only slower.
            self._model.packing_samples = False
            logger.warning("samples are scored in padded batches: %s", error)

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    def _ids_of_text(self, text: str) -> list[int]:
        """Return the ids of a text with special tokens; raises UserError for one with a media token."""
        ids = self._ids(text)
        if not self._media_ids.isdisjoint(ids):
            found = self._media_text.search(text)
            raise UserError(
                f"the text holds the media token {found[0] if found else 'of an image'}, but has no image for it; "
                "send the prompt as messages with the images in their places, and the response separately"
            )
        return ids

    def _response_ids(self, response: str) -> list[int]:
        """Return the ids of a policy's response, in which special tokens are plain text."""
        return text_ids(self.kit, self.processor, response)

    def _check_length(self, length: int, *, where: str) -> None:
        if length > self.max_len:
            raise UserError(
                f"{where}the prompt and the response take {length} tokens, which is more than --max_len {self.max_len}; "
                "raise it, or leave the sample out"
            )

    def encode(
        self, row: Row, response: str, *, ending: str | None = None, prompt: EncodedPrompt | None = None
    ) -> EncodedSample:
        """Return the row's prompt with its images, the response and its end token.

        Args:
            ending: the token after the response if it is not the model's end token; "" for a response that was cut off at
                the limit.
            prompt: the result of `encode_prompt` for the row, which is then not encoded again.

        Raises:
            UserError: the kit cannot take the prompt, or the sample is longer than `max_len`; names the row's location.
        """
        prompt = prompt or self.encode_prompt(row)
        end = [self._tokenizer.eos_token_id] if ending is None else self._ids(ending)
        token_ids = [*prompt.token_ids, *self._response_ids(response), *end]
        self._check_length(len(token_ids), where=f"{row.location}: ")
        return EncodedSample(token_ids=token_ids, media=prompt.media)

    def known_ending(self, text: str | None) -> str | None:
        """Return a text that can be the `ending` of a response, a single special token or nothing; None for any other."""
        if not text:
            return text
        ids = self._ids(text)
        is_end = len(ids) == 1 and ids[0] in self._tokenizer.all_special_ids and ids[0] not in self._media_ids
        return text if is_end else None

    def encode_text(self, query: str, *, prompt: str = "") -> EncodedSample:
        """Return a prompt and its response that are rendered already.

        What follows the prompt is the policy's: text, and the token that ended it. The prompt may contain special tokens, and
        so may a query that does not begin with the prompt.

        Raises UserError for a text that is empty, too long, or contains a media token, for which there is no image.
        """
        start = end_of_prompt(query, prompt=prompt) if prompt else 0
        if start:
            texts = [text for text in self._tokenizer.all_special_tokens if self.known_ending(text)]
            ending = max((text for text in texts if query[start:].endswith(text)), key=len, default="")
            response = self._response_ids(query[start:].removesuffix(ending))
            token_ids = [*self._ids_of_text(query[:start]), *response, *self._ids(ending)]
        else:
            token_ids = self._ids_of_text(query)
        if not token_ids:
            raise UserError("the text is empty, so there is nothing to score")
        self._check_length(len(token_ids), where="")
        return EncodedSample(token_ids=token_ids, media=None)


def batch_tokens(*, has_gpu: bool) -> int:
    """Return how many tokens to compute together: on a CPU, as many as keep the activations in its caches."""
    return GPU_BATCH_TOKENS if has_gpu else CPU_BATCH_TOKENS


def plan_batches(lengths: Sequence[int], *, max_tokens: int, padded: bool) -> list[list[int]]:
    """Return the samples' indices in batches of at most `max_tokens` tokens, the longest first.

    [3, 9, 4] and 9 -> [[1], [2, 0]], padded to 8 tokens or packed in 7.
    """
    batches: list[list[int]] = []
    width = used = 0
    for index in sorted(range(len(lengths)), key=lambda index: lengths[index], reverse=True):
        cost = width if padded else lengths[index]
        if not batches or used + cost > max_tokens:
            batches.append([])
            width = cost = lengths[index]
            used = 0
        batches[-1].append(index)
        used += cost
    return batches
