"""A checkpoint: its parts, loaded on demand; its weight files; dataset rows and turns as its kit encodes them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
from PIL import Image

from lmm_r1.config.shared import RowReadingConfig
from lmm_r1.data.images import Video, image_size, load_image, load_video, video_size
from lmm_r1.data.messages import ImagePart, Message, Row, TextPart, VideoPart, images_of, videos_of, with_images
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits.encoding import adds_special_tokens, as_plain_prompt, known_ids, placed, text_ids
from lmm_r1.lmm_kits.kit import Config, EncodedPrompt, LmmKit, Processor
from lmm_r1.lmm_kits.registry import kit_of

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


# The trained model adds this to the logits of banned tokens, while engines use minus infinity. The exponential of both
# is 0 at every temperature, but products with this number are not NaN.
BAN_BIAS = -1e9
# An image is not scaled down to less of its pixels.
_LEAST_SHARE = 1e-4


@dataclass(frozen=True)
class Checkpoint:
    """A folder or a hub name; each part is loaded when it is first used, and kept.

    Every part raises UserError if the checkpoint does not have it.
    """

    path: str
    trust_remote_code: bool = False
    chat_template: str | None = None
    """Replaces its own."""

    @cached_property
    def kit(self) -> LmmKit:
        return kit_of(self.path, trust_remote_code=self.trust_remote_code)

    @cached_property
    def config(self) -> Config:
        return self.kit.load_config(self.path, trust_remote_code=self.trust_remote_code)

    @cached_property
    def processor(self) -> Processor:
        return self.kit.load_processor(
            self.path, trust_remote_code=self.trust_remote_code, chat_template=self.chat_template
        )

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.kit.tokenizer_of(self.processor)

    @property
    def banned_token_ids(self) -> tuple[int, ...]:
        """The ids that must never be sampled, sorted."""
        return self.kit.banned_token_ids(self.config, self.tokenizer)

    def load_model(self, *, dtype: torch.dtype, attn_implementation: str, **kwargs: Any) -> PreTrainedModel:
        """Load the model, which is not kept; `kwargs` go to `from_pretrained`."""
        check_unquantized(self.config, path=self.path)
        return self.kit.load_model(
            self.path,
            dtype=dtype,
            attn_implementation=attn_implementation,
            trust_remote_code=self.trust_remote_code,
            **kwargs,
        )


def encode_row(row: Row, *, kit: LmmKit, processor: Any, add_generation_prompt: bool) -> EncodedPrompt:
    """Return the row's encoded messages; raises UserError, with the row's location, for unusable media.

    With a generation prompt, the result ends with the row's prefill, the beginning of the response.
    """
    if row.plain:
        token_ids = [token for part in plain_ids(row, kit=kit, processor=processor) for token in part]
        return EncodedPrompt.of_text(token_ids)
    images, videos = _media_of(row)
    with placed(row.location):
        encoded = kit.encode(
            processor, row.messages, images=images, videos=videos, add_generation_prompt=add_generation_prompt
        )
        if add_generation_prompt and row.prefill:
            encoded = _begun(encoded, row.prefill, kit=kit, processor=processor)
    if images:
        scales = kit.image_scales(processor, encoded, sizes=[image.size for image in images])
        encoded = replace(encoded, image_scales=scales)
    return encoded


def outlined_row(row: Row, *, kit: LmmKit, processor: Any, add_generation_prompt: bool) -> EncodedPrompt:
    """Return the result of `encode_row` without reading any pixels: the ids have one placeholder per image and video.

    Raises the same errors for a conversation that the chat template or the kit refuses, and for media that are missing or
    have a size that the processor refuses. Only `encode_row` raises errors of decoding.
    """
    if row.plain:
        return encode_row(row, kit=kit, processor=processor, add_generation_prompt=add_generation_prompt)
    sizes: list[tuple[ImagePart | VideoPart, tuple[int, int] | None]] = [
        *((image, image_size(image, location=row.location)) for image in images_of(row.messages)),
        *((video, video_size(video, location=row.location)) for video in videos_of(row.messages)),
    ]
    with placed(row.location):
        for part, shape in sizes:
            if shape is not None:
                kit.check_size(processor, part, width=shape[0], height=shape[1])
        ids = kit.render(processor, row.messages, add_generation_prompt=add_generation_prompt)
        outline = EncodedPrompt.of_text(ids)
        if add_generation_prompt and row.prefill:
            outline = _begun(outline, row.prefill, kit=kit, processor=processor)
    return outline


@dataclass(kw_only=True)
class ImageFitting:
    """Bounds the images of prompts that are too long only because of them, in proportion, and counts these prompts."""

    checkpoint: Checkpoint
    max_len: int
    """Longest prompt and response together, in tokens."""
    least: int = 1
    """The fewest tokens that a prompt must leave for the response; 0 in a conversation, which has its response."""
    wanted: int | None
    """Tokens that a scaled prompt leaves, at most half of what its text leaves; None is that half."""
    count: int = 0
    example: str = ""

    def fitted(self, row: Row, outline: EncodedPrompt | None = None) -> Row:
        """Return a prompt with bounds by which its images fit; unchanged if it fits, or if no bounds help."""
        images = images_of(row.messages)
        if not images or row.plain or videos_of(row.messages):
            return row
        try:
            return self._fitted(row, images, outline)
        except UserError:
            return row  # reported when it is encoded

    def _fitted(self, row: Row, images: Sequence[ImagePart], outline: EncodedPrompt | None) -> Row:
        kit, processor = self.checkpoint.kit, self.checkpoint.processor
        sizes = [size for part in images if (size := image_size(part, location=row.location)) is not None]
        outline = outline or outlined_row(row, kit=kit, processor=processor, add_generation_prompt=True)
        limits = kit.pixel_limits(processor)
        before = kit.shown_images(processor, images, sizes) if len(sizes) == len(images) else None
        room = self.max_len - (len(outline.token_ids) - len(images))
        if limits is None or before is None or sum(tokens for _, tokens in before) <= room - self.least:
            return row
        budget = min(room - self.least, max(room - (room if self.wanted is None else self.wanted), room // 2))
        share = budget / sum(tokens for _, tokens in before)
        while share > _LEAST_SHARE:
            bounds = (max(int(share * min(width * height, limits[1])), limits[0]) for (width, height), _ in before)
            pairs = zip(images, bounds, strict=True)
            bounded = [replace(part, max_pixels=max(bound, part.min_pixels or 0)) for part, bound in pairs]
            after = kit.shown_images(processor, bounded, sizes) or before
            if sum(tokens for _, tokens in after) <= budget:
                break
            share *= 0.9
        else:
            return row
        changes = ("{}x{} to {}x{}".format(*one, *other) for (one, _), (other, _) in zip(before, after, strict=True))
        self.example = self.example or f"{', '.join(changes)} in {row.location}"
        self.count += 1
        parts = iter(bounded)
        return replace(row, messages=with_images(row.messages, lambda _: next(parts)))

    def told(self, *, prefix: str) -> str | None:
        """Return a sentence on what was scaled, if anything was; the names of the flags begin with `prefix`."""
        if not self.count:
            return None
        return (
            f"images of {self.count:,} prompts scaled down to fit into {self.max_len:,} tokens, such as {self.example}; "
            f"{prefix}overlong_images keep leaves them as they are"
        )


def bordered_ids(row: Row, *, kit: LmmKit, processor: Any) -> tuple[list[int], int]:
    """Return a conversation's ids with borders at the texts of turns with media, and the border's id.

    Raises the same errors as `encode_row`.
    """
    images, videos = _media_of(row)
    return kit.encode_bordered(processor, row.messages, images=images, videos=videos)


def _media_of(row: Row) -> tuple[list[Image.Image], list[Video]]:
    images = [load_image(part, location=row.location) for part in images_of(row.messages)]
    return images, [load_video(part, location=row.location) for part in videos_of(row.messages)]


def _begun(encoded: EncodedPrompt, prefill: str, *, kit: LmmKit, processor: Any) -> EncodedPrompt:
    """Return the prompt followed by the beginning of the response, as if the model had written it."""
    ids = text_ids(kit, processor, prefill)
    return replace(encoded, token_ids=[*encoded.token_ids, *ids], engine_token_ids=[*encoded.engine_token_ids, *ids])


def check_pixel_bounds(rows: RowReadingConfig, checkpoint: Checkpoint, *, model: str, prefix: str = "--") -> None:
    """Raise UserError for a bound on the pixels of images that the model's processor cannot satisfy; without images, any holds.

    Args:
        rows: the flags, whose names begin with `prefix`.
        model: the flag that names the checkpoint, with its value.
    """
    given = {name: bound for name in ("min_pixels", "max_pixels") if (bound := getattr(rows, name)) is not None}
    if not given or not checkpoint.kit.takes_images:
        return
    limits = checkpoint.kit.pixel_limits(checkpoint.processor)
    for name, bound in given.items():
        if limits is None:
            raise UserError(
                f"{prefix}{name} {bound}: {model} is a {checkpoint.kit.model_type}, which leaves no choice of the size "
                "of an image; leave it out"
            )
        if not limits[0] <= bound <= limits[1]:
            raise UserError(
                f"{prefix}{name} {bound} is not within {limits[0]} and {limits[1]}, the bounds that the image processor "
                f"of {model} has itself"
            )


def plain_ids(row: Row, *, kit: LmmKit, processor: Any) -> list[list[int]]:
    """Return the ids of each message of a plain row; those of a response end with the end token.

    Texts are tokenized one by one, so that a prompt has the same ids as in generation.
    Raises UserError, with the row's location, for a text that holds a media token.
    """
    tokenizer = kit.tokenizer_of(processor)
    parts = []
    for message in row.messages:
        if message.role == "assistant":
            text = "".join(part.text for part in message.parts if isinstance(part, TextPart))
            parts.append([*text_ids(kit, processor, text), tokenizer.eos_token_id])
        else:
            reading, text = as_plain_prompt(kit, processor, message)
            own = kit.tokenizer_of(reading)
            parts.append(own(text, add_special_tokens=adds_special_tokens(own, text=text))["input_ids"])
    if not kit.placeholder_ids(processor).isdisjoint(token for part in parts for token in part):
        raise UserError(f"{row.location}: the text holds a media token; take it out of the row")
    return parts


def check_images_taken(rows: Sequence[Row], *, kit: LmmKit, model: str) -> None:
    """Raise UserError at the first row with an image or a video that the kit's models cannot take."""
    for row in rows:
        if images_of(row.messages) and not kit.takes_images:
            raise UserError(
                f"{row.location}: the row has an image, but {model} is a plain language model; "
                "give a multimodal model or leave such rows out"
            )
        if videos_of(row.messages) and not kit.takes_videos:
            raise UserError(
                f"{row.location}: the row has a video, but {model} takes none; "
                "give a model that does (lmm-r1 kits lists them), or leave such rows out"
            )


# Two turns of the model that end in different tokens. Tokens that follow both belong to the chat template.
_TURNS = ("Yes", "12")
_QUESTION = Message(role="user", parts=(TextPart("?"),))


def encode_turn(
    kit: LmmKit, processor: Any, message: Message, *, images: Sequence[Image.Image], prefill: str = ""
) -> EncodedPrompt:
    """Encode everything between a generated turn of the model and its next turn, without encoding either again.

    The first tokens end the model's turn, as the chat template does; `without_end` removes the end token that the model
    has generated itself.

    Args:
        message: the message to the model. Special tokens that its text spells stay text.
        images: the message's decoded images.
        prefill: the text with which the model's next turn begins.

    Raises:
        UserError: the processor cannot take the message, or the chat template refuses the conversation.
    """
    try:
        turn = _between_turns(kit, processor, message, images=images)
    except jinja2.TemplateError as error:
        raise UserError(
            f"the checkpoint's chat template refuses a turn of the role {message.role} after one of the model ({error}); "
            "let the environment answer as user"
        ) from error
    return _begun(turn, prefill, kit=kit, processor=processor) if prefill else turn


def settle_ends(model: PreTrainedModel, *, kit: LmmKit, processor: Any) -> None:
    """Let a saved model end a response also with the tokenizer's end token, and with the chat template's end of a turn."""
    config, tokenizer = model.generation_config, kit.tokenizer_of(processor)
    if config is None:
        return
    listed = config.eos_token_id
    found = [*(listed if isinstance(listed, list) else [listed]), tokenizer.eos_token_id]
    try:
        one, other = (kit.render(processor, _turn(text), add_generation_prompt=False) for text in _TURNS)
    except (UserError, jinja2.TemplateError):
        one, other = [], []  # no chat template, or one that refuses this conversation
    shared, added = _shared_end(one, other), tokenizer.added_tokens_decoder
    if 0 < shared < len(one) and one[-shared] in added and added[one[-shared]].special:
        found.append(one[-shared])
    ids = [token for token in dict.fromkeys(found) if token is not None]
    config.eos_token_id = ids if len(ids) > 1 else next(iter(ids), None)


def without_end(turn: EncodedPrompt, generated: Sequence[int]) -> EncodedPrompt:
    """Return an encoded turn without its first token, which ends the model's turn, if the model has generated it."""
    if not generated or generated[-1] != turn.token_ids[0]:
        return turn
    return replace(turn, token_ids=turn.token_ids[1:], engine_token_ids=turn.engine_token_ids[1:])


def _between_turns(kit: LmmKit, processor: Any, message: Message, *, images: Sequence[Image.Image]) -> EncodedPrompt:
    first, other = ([*_turn(text), message] for text in _TURNS)
    encoded = kit.encode(processor, first, images=images, add_generation_prompt=True)
    ids, others = encoded.engine_token_ids, kit.render(processor, other, add_generation_prompt=True)
    shared = _shared_end(ids, others)
    start = len(ids) - shared
    if shared in (len(ids), len(others)) or encoded.token_ids[:start] != ids[:start]:
        raise UserError(
            "the checkpoint's chat template does not write a conversation turn by turn, so that a turn cannot be added "
            "to what the model has generated; train it on single turns"
        )
    return replace(encoded, token_ids=encoded.token_ids[start:], engine_token_ids=ids[start:])


def _turn(text: str) -> list[Message]:
    """Return a conversation that ends with a turn of the model."""
    return [_QUESTION, Message(role="assistant", parts=(TextPart(text),))]


def _shared_end(ids: Sequence[int], others: Sequence[int]) -> int:
    """Return the number of equal tokens at the end of both."""
    pairs = zip(reversed(ids), reversed(others), strict=False)
    return next((count for count, (one, other) in enumerate(pairs) if one != other), min(len(ids), len(others)))


# In the order in which transformers searches for them; an index names the files of a model in several parts.
_NAMES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")


def check_weights(model_path: str) -> None:
    """Raise UserError if weights of a checkpoint folder are missing or truncated; a hub name is not checked."""
    folder = Path(model_path)
    if not folder.is_dir():
        return
    from safetensors import SafetensorError, safe_open

    found = [folder / name for name in _NAMES if (folder / name).is_file()]
    if not found:
        raise UserError(f"{model_path}: no weights in this folder ({_NAMES[0]} or {_NAMES[1]}); copy them into it")
    for file in _parts(found[0]):
        if not file.is_file():
            raise UserError(f"{file}: this weight file, which {found[0].name} names, is missing; copy it again")
        if file.suffix == ".safetensors":
            try:
                # Compares the file's length with its header; no tensor is read.
                with safe_open(file, framework="np"):
                    pass
            except SafetensorError as error:
                raise UserError(f"{file}: the weight file is damaged ({error}); copy it again") from error


def quantization_of(config: Config) -> str | None:
    """Return how a checkpoint's weights are quantized, None if they are whole."""
    parts = (config, config.get_text_config())
    settings = next((one.quantization_config for one in parts if hasattr(one, "quantization_config")), None)
    if not settings:
        return None
    return str((settings if isinstance(settings, dict) else settings.to_dict()).get("quant_method"))


def check_unquantized(config: Config, *, path: str) -> None:
    """Raise UserError for a checkpoint of quantized weights, as of AWQ, GPTQ, bitsandbytes or FP8."""
    if (method := quantization_of(config)) is not None:
        raise UserError(
            f"{path}: its weights are quantized ({method}), which only vLLM loads; give the model that they were made of"
        )


def stored_bytes(model_path: str) -> int:
    """Return the size of a checkpoint folder's weight files; 0 for a hub name."""
    found = [file for name in _NAMES if (file := Path(model_path) / name).is_file()]
    return sum(part.stat().st_size for file in found[:1] for part in _parts(file))


def check_embeddings(checkpoint: Checkpoint) -> None:
    """Raise UserError if the tokenizer can write ids for which the model has no embedding; padded rows do no harm."""
    tokenizer, rows = checkpoint.tokenizer, checkpoint.config.get_text_config().vocab_size
    # Media tokens are replaced before they are embedded, also those that a language model shares with a larger one.
    named = set(tokenizer.special_tokens_map) - set(tokenizer.SPECIAL_TOKENS_ATTRIBUTES)
    media = known_ids(tokenizer, (str(tokenizer.special_tokens_map[name]) for name in named))
    media |= checkpoint.kit.media_token_ids(checkpoint.config, tokenizer)
    known = {number: token for token, number in tokenizer.get_vocab().items() if number not in media}
    if max(known) >= rows:
        first = min(number for number in known if number >= rows)
        raise UserError(
            f"{checkpoint.path}: the tokenizer has {max(known) + 1} ids and the model {rows} embeddings, so that {known[first]!r} "
            f"(id {first}) has none; enlarge them (resize_token_embeddings), or take the token out of the tokenizer"
        )


def torch_dtype(name: str, *, config: PretrainedConfig) -> torch.dtype:
    """Return the precision called `name`; `auto` is the checkpoint config's, or fp32 if it has none."""
    import torch

    dtype = name if name != "auto" else config.dtype or config.get_text_config().dtype or torch.float32
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype


def _parts(file: Path) -> list[Path]:
    if file.suffix != ".json":
        return [file]
    try:
        names = set(json.loads(file.read_text(encoding="utf-8"))["weight_map"].values())
        if leaving := [name for name in names if name != Path(name).name]:
            raise ValueError(f"{leaving[0]!r} is not in its folder")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file}: not an index of weight files ({error}); copy it again") from error
    return [file.parent / name for name in sorted(names)]


def read_tensors(path: str, wanted: Callable[[str], bool]) -> dict[str, torch.Tensor]:
    """Return the tensors whose stored names are wanted, without reading the others.

    Args:
        path: a folder or a hub name.
    """
    import torch
    from safetensors import safe_open
    from transformers.utils import cached_file

    def stored(name: str) -> str | None:
        return cached_file(path, name, _raise_exceptions_for_missing_entries=False)

    first = next((file for name in _NAMES if (file := stored(name)) is not None), None)
    if first is None:
        return {}
    files = [first]
    if first.endswith(".json"):
        places = json.loads(Path(first).read_text(encoding="utf-8"))["weight_map"]
        parts = sorted({part for name, part in places.items() if wanted(name)})
        files = [file for part in parts if (file := stored(part)) is not None]
    found: dict[str, torch.Tensor] = {}
    for file in files:
        if file.endswith(".safetensors"):
            with safe_open(file, framework="pt") as weights:
                found |= {name: weights.get_tensor(name) for name in weights.keys() if wanted(name)}
        else:
            held = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
            found |= {name: tensor for name, tensor in held.items() if wanted(name)}
    return found
