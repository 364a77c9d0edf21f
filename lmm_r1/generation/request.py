"""Requests to an engine: prompts encoded with a checkpoint's kit, sampling parameters, responses so far and their text."""

from __future__ import annotations

import copy
import hashlib
import logging
import threading
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

from transformers import GenerationConfig

from lmm_r1 import cpu, dotted
from lmm_r1.config import PPOConfig
from lmm_r1.data.messages import Message, Row, TextPart, images_of
from lmm_r1.data.sample import WHOLE, Completion, FinishReason, WeightSpan
from lmm_r1.errors import UserError
from lmm_r1.generation.engine import EngineSettings, SamplingSettings, TokenEngine
from lmm_r1.lmm_kits import Checkpoint, EncodedPrompt, LmmKit
from lmm_r1.lmm_kits.checkpoint import check_images_taken, encode_row
from lmm_r1.lmm_kits.encoding import with_system_placed, with_thoughts_apart
from lmm_r1.models.rope_scaling import tell_factors
from remote_rm.responses import THINK

if TYPE_CHECKING:
    from PIL import Image
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.outputs import CompletionOutput, RequestOutput


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
            placed = with_system_placed(self.kit, self.processor, row.messages)
            messages = with_thoughts_apart(self.kit, self.processor, placed)
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


def sampling_params(
    sampling: SamplingSettings,
    *,
    max_tokens: int,
    end_token_id: int,
    output_per: Literal["token", "response", "prompt"],
    logprobs: bool = False,
    ignore_eos: bool = False,
    stops: Sequence[str] = (),
) -> SamplingParams:
    """Return vLLM's parameters for all responses to one prompt.

    Args:
        max_tokens: the longest response to this prompt.
        output_per: when the engine returns output: for every token, for each response when it ends (and for its first
            token), or for all responses when the last has ended.
        logprobs: the engine reports the log-probs of the sampled tokens.
        ignore_eos: responses run to `max_tokens`.
        stops: texts that end a response and belong to it.
    """
    # Imported here, because encoding prompts needs no vLLM.
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        n=sampling.n_samples,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=max_tokens,
        seed=sampling.seed,
        # In addition to those of the checkpoint's generation config, which some released checkpoints fill in wrongly.
        stop_token_ids=[] if ignore_eos else [end_token_id],
        ignore_eos=ignore_eos,
        skip_special_tokens=False,
        # The engine can only find stop texts in text.
        detokenize=bool(stops),
        stop=list(stops),
        include_stop_str_in_output=bool(stops),
        # With 0, only the sampled token's log-prob, without the most likely tokens.
        logprobs=0 if logprobs else None,
        output_kind=RequestOutputKind.FINAL_ONLY if output_per == "prompt" else RequestOutputKind.DELTA,
        stream_interval=max_tokens if output_per == "response" else None,
    )


@dataclass(kw_only=True)
class EngineWeights:
    """The weights of one engine: their version, and the requests in progress."""

    version: int = 0
    """The number of updates so far."""
    under_way: dict[str, Request] = field(default_factory=dict)
    """The requests in which updates are recorded, by id."""

    def replaced(self, counts: Mapping[str, Mapping[int, int]]) -> None:
        """Count an update.

        Args:
            counts: the tokens of unfinished responses before it, by request and place; without requests that the engine has
                not begun.
        """
        self.version += 1
        for request_id, request in self.under_way.items():
            request.note_update(counts.get(request_id, {}), version=self.version)


def tokens_under_way(engine: Any) -> dict[str, dict[int, int]]:
    """Return the number of tokens of each unfinished response of a paused vLLM engine, by request and place.

    For an engine in a process of its own, these are the tokens that have arrived.
    """
    counts: dict[str, dict[int, int]] = {}
    for state in engine.output_processor.request_states.values():
        counts.setdefault(state.external_req_id, {})[state.request_index] = state.detokenizer.num_output_tokens()
    return counts


@dataclass(kw_only=True)
class Response:
    """One response so far."""

    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    """Of every token, if requested."""
    finish_reason: Literal["stop", "length", "abort", "error", "repetition"] | None = None
    """Why it ended, in vLLM's words."""
    stop_text: str | None = None
    """The text that ended it, if any; the last token is then no end token."""
    begins: list[tuple[int, int]] = field(default_factory=list)
    """The first token of each weight version, with the version; empty if that is not recorded."""

    @property
    def weights(self) -> tuple[WeightSpan, ...]:
        """The weight versions of its tokens, as far as recorded."""
        bounds = pairwise([*self.begins, (len(self.token_ids), 0)])
        spans = (WeightSpan(version, end - start) for (start, version), (end, _) in bounds)
        return tuple(span for span in spans if span.tokens > 0)

    def add(self, part: CompletionOutput) -> None:
        self.token_ids.extend(part.token_ids)
        if part.logprobs is not None:
            pairs = zip(part.token_ids, part.logprobs, strict=True)
            self.log_probs.extend(logprobs[token].logprob for token, logprobs in pairs)
        self.finish_reason = part.finish_reason
        self.stop_text = part.stop_reason if isinstance(part.stop_reason, str) else None


class Request:
    """One prompt and its responses."""

    def __init__(
        self, prompt: TokensPrompt, parameters: SamplingParams, *, weights: EngineWeights | None = None
    ) -> None:
        """Args: weights: those of the engine; None if they are never updated."""
        self.prompt = prompt
        self.parameters = parameters
        self._weights = weights
        self.responses = [Response() for _ in range(parameters.n)]
        self.read_token_ids: list[int] | None = None
        """The prompt as the engine read it, with expanded placeholders; None before its first output."""
        self.output: RequestOutput | None = None
        """The engine's last output."""

    async def sent_to(self, engine: TokenEngine) -> AsyncGenerator[Response, None]:
        """Yield each response whenever it has grown, and when it has ended; leaving early aborts all of them.

        The parameters' `output_kind` and `stream_interval` decide how often.
        """
        request_id = uuid.uuid4().hex
        if self._weights is not None:
            for response in self.responses:
                response.begins = [(0, self._weights.version)]
            self._weights.under_way[request_id] = self
        try:
            async with aclosing(engine.generate(self.prompt, self.parameters, request_id)) as outputs:
                async for output in outputs:
                    self.output, self.read_token_ids = output, output.prompt_token_ids
                    for part in output.outputs:
                        response = self.responses[part.index]
                        response.add(part)
                        yield response
        finally:
            if self._weights is not None:
                del self._weights.under_way[request_id]

    def note_update(self, counts: Mapping[int, int], *, version: int) -> None:
        """Record that the following tokens come from new weights.

        Args:
            counts: the tokens of unfinished responses; empty if the engine has not begun.
        """
        for place, response in enumerate(self.responses):
            # A response that is missing among others has ended.
            if response.finish_reason is None and (place in counts or not counts):
                response.begins.append((counts.get(place, 0), version))

    @property
    def broken(self) -> Counter[str | None]:
        """Why incomplete responses ended; None for those that did not end."""
        return Counter(response.finish_reason for response in self.responses if response.finish_reason not in WHOLE)


async def hand_on(
    request: Request, engine: TokenEngine, *, codec: PromptCodec, on_text: Callable[[str], None]
) -> None:
    """Send a request for one response, and pass on its text as it grows, also if this is cancelled."""
    text, read = TextStream(codec.tokenizer), 0
    try:
        async with aclosing(request.sent_to(engine)) as grown:
            async for response in grown:
                ended = response.finish_reason == "stop" and response.stop_text is None
                words = codec.words(response.token_ids, ended=ended)
                if piece := text.add(words[read:]):
                    on_text(piece)
                read = len(words)
    finally:
        if piece := text.rest():
            on_text(piece)
