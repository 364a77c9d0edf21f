"""Encodes prompts for an engine with a checkpoint's kit, and decodes its tokens."""

from __future__ import annotations

import copy
import hashlib
import logging
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from transformers import GenerationConfig

from lmm_r1 import cpu, dotted
from lmm_r1.config import PPOConfig
from lmm_r1.data.messages import Message, Row, TextPart, images_of
from lmm_r1.data.sample import Completion, FinishReason
from lmm_r1.errors import UserError
from lmm_r1.generation.engine import EngineSettings
from lmm_r1.lmm_kits import Checkpoint, EncodedPrompt, LmmKit
from lmm_r1.lmm_kits.checkpoint import check_images_taken, encode_row
from lmm_r1.lmm_kits.plain_text import with_system_placed
from lmm_r1.models.rope_scaling import tell_factors
from remote_rm.responses import THINK

if TYPE_CHECKING:
    from PIL import Image
    from vllm.inputs import TokensPrompt


_OPENING_TOKENS = 12
"""Enough for the tag that opens a thought and the line break after it."""
# Written by tokenizers for an incomplete character.
_INCOMPLETE = "\ufffd"


class PromptCodec:
    """Encodes rows as prompts, and decodes tokens as text; thread-safe."""

    def __init__(self, *, kit: LmmKit, processor: Any, banned_token_ids: tuple[int, ...]) -> None:
        """Args: banned_token_ids: tokens that the engine never samples."""
        self.kit = kit
        self._first_processor = processor
        self._processors: dict[int, Any] = {threading.get_ident(): processor}
        self._copying = threading.Lock()
        self.tokenizer = kit.tokenizer_of(processor)
        self.banned_token_ids = banned_token_ids

    @property
    def processor(self) -> Any:
        """The processor of the current thread: a fast tokenizer used by two threads raises "Already borrowed"."""
        thread = threading.get_ident()
        with self._copying:
            if thread not in self._processors:
                self._processors[thread] = copy.deepcopy(self._first_processor)
            return self._processors[thread]

    @classmethod
    def of(cls, path: str, *, trust_remote_code: bool) -> PromptCodec:
        """Return the codec of a checkpoint."""
        checkpoint = Checkpoint(path, trust_remote_code=trust_remote_code)
        return cls(kit=checkpoint.kit, processor=checkpoint.processor, banned_token_ids=checkpoint.banned_token_ids)

    def encode(self, row: Row) -> EncodedPrompt:
        """Return the row's prompt; raises UserError, with the row's location, for unusable media."""
        return encode_row(row, kit=self.kit, processor=self.processor, add_generation_prompt=True)

    def engine_prompt(self, encoded: EncodedPrompt) -> TokensPrompt:
        """Return the prompt for vLLM, which expands the placeholders itself."""
        # Only a type, but its module takes seconds to load, and plain transformers does not need it.
        from vllm.inputs import TokensPrompt

        prompt = TokensPrompt(prompt_token_ids=encoded.engine_token_ids)
        media = self.kit.engine_media(encoded)
        if media:
            prompt["multi_modal_data"] = media
        if encoded.image_ids:
            assert len(encoded.image_ids) == len(encoded.images), "every image has its own"
            prompt["multi_modal_uuids"] = {"image": list(encoded.image_ids)}
        return prompt

    def begun_with(self, row: Row, token_ids: Sequence[int]) -> str:
        """Return the text with which a response begins: the row's prefill, or the tag of a thought that the template opens."""
        if row.prefill:
            return row.prefill
        tail = self.tokenizer.decode(token_ids[-_OPENING_TOKENS:], skip_special_tokens=False).rstrip()
        return f"{THINK}\n" if tail.endswith(THINK) else ""

    def prompt_text(self, row: Row) -> str:
        """Return the row as rendered by the chat template, with the beginning of its responses; plain text unchanged.

        Special tokens in its texts cannot be distinguished from the template's. Raises UserError, with the row's location,
        for a media token in a text.
        """
        if row.plain:
            parts = [part for message in row.messages for part in message.parts]
            return "".join(part.text for part in parts if isinstance(part, TextPart))
        try:
            messages = with_system_placed(self.kit, self.processor, row.messages)
            text = self.kit.chat_text(self.processor, messages, add_generation_prompt=True)
        except UserError as error:
            raise UserError(f"{row.location}: {error}") from error
        return text + row.prefill

    def marked_text(self, engine_token_ids: Sequence[int]) -> str:
        """Return tokens as text for people, including special tokens, with `<image>` for each picture.

        Args:
            engine_token_ids: tokens with one placeholder per image.
        """
        placeholders = self.kit.placeholder_ids(self.processor)
        marks = [place for place, token in enumerate(engine_token_ids) if token in placeholders]
        pieces = [engine_token_ids[start + 1 : end] for start, end in pairwise([-1, *marks, len(engine_token_ids)])]
        return "<image>".join(self.tokenizer.decode(piece, skip_special_tokens=False) for piece in pieces)

    def text(self, token_ids: Sequence[int], *, ended: bool) -> str:
        """Return a response's text without its end token, which is its last token if it has ended."""
        return self.tokenizer.decode(self.words(token_ids, ended=ended), skip_special_tokens=False)

    def words(self, token_ids: Sequence[int], *, ended: bool) -> Sequence[int]:
        """Return the tokens of a response's text: all but an end token, unless that is part of the text."""
        spoken = not token_ids or token_ids[-1] in self.kit.spoken_end_ids(self.tokenizer)
        return token_ids[:-1] if ended and not spoken else token_ids

    def completion(self, token_ids: Sequence[int], finish_reason: FinishReason) -> Completion:
        """Return a response; its tokens include the end token if the model generated one."""
        text = self.text(token_ids, ended=finish_reason == "stop")
        return Completion(text=text, num_tokens=len(token_ids), finish_reason=finish_reason)


def with_image_ids(encoded: EncodedPrompt) -> EncodedPrompt:
    """Return a prompt whose images have ids by their content, for a prompt that is sent often."""
    return replace(encoded, image_ids=tuple(_image_id(image) for image in encoded.images))


def _image_id(image: Image.Image) -> str:
    digest = hashlib.blake2b(f"{image.mode} {image.width} {image.height} ".encode(), digest_size=16)
    digest.update(image.tobytes())
    return digest.hexdigest()


class LimitedCodec(PromptCodec):
    """The codec of an engine outside of training: refuses prompts beyond the engine's limits."""

    def __init__(self, path: str, settings: EngineSettings, *, checkpoint: Checkpoint | None = None) -> None:
        checkpoint = checkpoint or Checkpoint(path, trust_remote_code=settings.trust_remote_code)
        super().__init__(
            kit=checkpoint.kit, processor=checkpoint.processor, banned_token_ids=checkpoint.banned_token_ids
        )
        self.config = checkpoint.config
        self.path = path
        self._asked_len = settings.max_model_len
        self.max_len = min(settings.max_model_len, self.config.get_text_config().max_position_embeddings)
        tell_factors(self.config, max_len=self.max_len, flag="--max_model_len")
        self._limits = {"image": settings.max_images, "video": settings.max_videos}

    def encode(self, row: Row) -> EncodedPrompt:
        """Return the row's prompt; raises UserError for unusable media and for a prompt that leaves no room."""
        check_images_taken([row], kit=self.kit, model=self.path)
        encoded = super().encode(row)
        for kind, items in (("image", encoded.images), ("video", encoded.videos)):
            if len(items) > self._limits[kind]:
                raise UserError(
                    f"{row.location}: {len(items)} {kind}s in one prompt, more than --max_{kind}s {self._limits[kind]}"
                )
        if len(encoded.token_ids) >= self.max_len:
            bound = f"--max_model_len {self.max_len}; raise it"
            if self.max_len < self._asked_len:
                bound = f"the model's {self.max_len} tokens"
            raise UserError(
                f"{row.location}: the prompt takes {len(encoded.token_ids)} tokens, which leaves no room for a response "
                f"in {bound}"
            )
        return encoded

    def room(self, encoded: EncodedPrompt, *, max_new_tokens: int | None) -> int:
        """Return how many tokens a response to the prompt may take."""
        left = self.max_len - len(encoded.token_ids)
        return left if max_new_tokens is None else min(max_new_tokens, left)

    def stop_token_ids(self, generation_config: Any) -> list[int]:
        """Return the tokenizer's end token and those of the checkpoint's generation config."""
        ids = generation_config.eos_token_id
        listed = [] if ids is None else ids if isinstance(ids, list) else [ids]
        return sorted({self.tokenizer.eos_token_id, *listed})


class TextStream:
    """Decodes the tokens of one response as they arrive; together, the pieces are the decoded response.

    Replacement characters for incomplete characters may differ.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        # The text before `_read` was returned; decoding starts at `_from`, because a token's text depends on the previous one.
        self._from = 0
        self._read = 0

    def add(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens complete; empty in the middle of a character."""
        self._ids.extend(token_ids)
        known, text = self._decoded(self._read), self._decoded(len(self._ids))
        if text.endswith(_INCOMPLETE) or len(text) <= len(known):
            return ""
        self._from, self._read = self._read, len(self._ids)
        return text[len(known) :]

    def rest(self) -> str:
        """Return the remaining text, when no token follows."""
        known, text = self._decoded(self._read), self._decoded(len(self._ids))
        self._from = self._read = len(self._ids)
        return text[len(known) :]

    def _decoded(self, end: int) -> str:
        return self._tokenizer.decode(self._ids[self._from : end], skip_special_tokens=False)


logger = logging.getLogger(__name__)
CORRECTION = "algo.advantage.is_correction_level"


def check_turn_end(kit: LmmKit, processor: Any, *, path: str, model: str) -> None:
    """Raise UserError if no end token ends a turn of the chat template, because responses would run to their limit.

    Args:
        path: the checkpoint.
        model: the flag and the path, for the message.
    """
    tokenizer = kit.tokenizer_of(processor)
    question = Message(role="user", parts=(TextPart("?"),))
    answer = Message(role="assistant", parts=(TextPart("Yes."),))
    before = kit.render(processor, [question], add_generation_prompt=True)
    through = kit.render(processor, [question, answer], add_generation_prompt=False)
    same = next((place for place, pair in enumerate(zip(before, through, strict=False)) if pair[0] != pair[1]), None)
    turn = through[len(before) if same is None else same :]
    # vLLM ends a response at these: the tokenizer's, and those of the checkpoint's generation config.
    ends = [tokenizer.eos_token_id]
    with suppress(OSError):  # not every checkpoint has one
        listed = GenerationConfig.from_pretrained(path).eos_token_id
        ends += listed if isinstance(listed, list) else [listed]
    if set(ends).isdisjoint(turn):
        raise UserError(
            f"{model}: the chat template renders an answer as {tokenizer.decode(turn)!r}, which contains no token that ends "
            f"a response ({tokenizer.eos_token}), so no response would end; set the tokenizer's eos_token to the token that "
            "ends a turn, and train the model with lmm-r1 train_sft to generate it"
        )


def disagrees(policy: Checkpoint) -> bool:
    """Return whether this machine's engine cannot agree with the trainer on rows with images or videos."""
    return not cpu.has_cuda() and policy.kit.engine_disagrees(policy.config)


def with_correction(config: PPOConfig, *, policy: Checkpoint, rows: Sequence[Row]) -> PPOConfig:
    """Return the configuration with the mismatch correction on if the engine cannot agree with the trainer.

    That is so for image rows of a kit with `engine_disagreement`, on vLLM's CPU backend; the run warns of it once.
    """
    if not disagrees(policy) or not any(images_of(row.messages) for row in rows):
        return config
    corrected = config.algo.advantage.is_correction_level
    if corrected == "off":
        corrected = "token"
        config = dotted.replace(config, {CORRECTION: corrected})
    logger.warning(
        "%s; its samples are corrected for that (--%s %s)", policy.kit.engine_disagreement, CORRECTION, corrected
    )
    return config
