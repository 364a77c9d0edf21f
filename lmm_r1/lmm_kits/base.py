"""What a kit is: the values and callables through which the project asks everything that depends on an architecture."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmm_r1.errors import UserError

if TYPE_CHECKING:
    import torch
    from PIL import Image
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

    from lmm_r1.data.messages import Message
    from lmm_r1.data.videos import Video

Media = dict[str, "torch.Tensor"]
"""Media tensors of one prompt or of one batch, under the names that the model's forward takes."""


@dataclass(frozen=True, kw_only=True)
class EncodedPrompt:
    """One prompt, encoded once for its whole group of samples."""

    token_ids: list[int]
    """Ids with every image expanded to its full run of placeholders; what training sees."""
    engine_token_ids: list[int]
    """Ids as vLLM takes them: with one placeholder per image or video, which it expands itself."""
    images: list[Image.Image]
    """The images in the order of their placeholders, resized to their pixel bounds."""
    media: Media | None
    """Media tensors for the training forward; None for a text prompt."""
    videos: list[Video] = field(default_factory=list)
    """The videos in the order of their placeholders, as both sides cut them into patches."""


@dataclass(frozen=True, kw_only=True)
class TinyModelSpec:
    """The size of a randomly initialised checkpoint."""

    hidden_size: int
    layers: int
    seed: int
    tie_embeddings: bool


@dataclass(frozen=True, kw_only=True)
class LmmKit:
    """Everything that depends on one architecture; a folder of `lmm_kits` exports one as `KIT`.

    Every callable is a module-level function, so that a kit pickles and can cross to a Ray worker.
    """

    model_type: str
    """The `model_type` of the checkpoint's config; also the folder's name and the registry's key."""
    checkpoints: str
    """The released checkpoints it serves, for the table of `lmm-r1 kits`: "Qwen2.5-VL"."""
    takes_images: bool
    takes_videos: bool
    load_config: Callable[..., PretrainedConfig]
    """(path, *, trust_remote_code) -> config."""
    load_model: Callable[..., PreTrainedModel]
    """(path, *, dtype, attn_implementation, trust_remote_code, **from_pretrained_kwargs) -> model without cache."""
    load_processor: Callable[..., ProcessorMixin | PreTrainedTokenizerBase]
    """(path, *, trust_remote_code) -> what turns messages into ids and media tensors."""
    tokenizer_of: Callable[[Any], PreTrainedTokenizerBase]
    encode: Callable[..., EncodedPrompt]
    """(processor, messages, *, images, videos, add_generation_prompt) -> EncodedPrompt; `images` are decoded PIL images."""
    render: Callable[..., list[int]]
    """(processor, messages, *, add_generation_prompt) -> ids with one placeholder per image; reads no image."""
    placeholder_ids: Callable[[Any], frozenset[int]]
    """(processor) -> the ids that `encode` repeats once per image patch."""
    engine_arguments: Callable[..., dict[str, Any]]
    """(config, *, max_images, max_videos) -> extra arguments for vLLM's engine, `hf_overrides` among them."""
    engine_media: Callable[[EncodedPrompt], dict[str, list[Any]]]
    """(encoded) -> vLLM's `multi_modal_data`; empty for a text prompt."""
    takes_flash_attention: bool
    """Whether `--ds.attn_implementation auto` may choose flash attention, which takes causal and no masks alone."""
    engine_refusal: str | None
    """Why vLLM cannot run this architecture, so that it trains (SFT) but takes no part in RL; None where it can."""
    engine_disagreement: str | None
    """Why vLLM's CPU backend computes other log-probs than the model itself; None where they agree."""
    banned_token_ids: Callable[..., tuple[int, ...]]
    """(config, tokenizer) -> ids that must never be sampled: media tokens, and ids beyond the tokenizer."""
    forward_inputs: Callable[..., dict[str, torch.Tensor]]
    """(config, sequences, attention_mask, media) -> keyword arguments of the model's forward beside ids and mask."""
    merge_media: Callable[[Sequence[Media]], Media]
    """Media of several prompts -> media of the batch, in row order."""
    in_one_tower_run: Callable[..., dict[str, torch.Tensor]]
    """(config, inputs) -> the forward's arguments for a batch or a packed row, such that the vision tower runs once.

    In a run of the tower, ZeRO-3's ranks wait for one another: those with images and videos may not run it twice.
    """
    both_way_token_ids: Callable[[PretrainedConfig], frozenset[int]]
    """(config) -> ids whose runs attend to each other in both directions in the language model; empty for most."""
    filler_media: Callable[..., tuple[list[int], Media]] | None
    """(config) -> ids and media of the smallest legal image sample; None where there is no image tower."""
    vision_prefixes: tuple[str, ...]
    """Prefixes of the names of vision tower parameters in `model.named_parameters()`."""
    projector_prefixes: tuple[str, ...]
    language_prefixes: tuple[str, ...]
    """Prefixes of the names of all other parameters; LoRA adapts the linear layers under them, but for the output layer."""
    untrained_prefixes: tuple[str, ...]
    """Prefixes of parameters that no loss of ours reaches (an audio tower, an unused pooling head)."""
    backbone_of: Callable[[Any], torch.nn.Module]
    """(model) -> the module whose `last_hidden_state` the output layer reads, and on which a value head stands."""
    language_model_of: Callable[[Any], torch.nn.Module]
    """(model) -> the module that runs the language model's layers, whose inputs are cut where ranks share a row."""
    cut_inputs: Callable[..., dict[str, Any]]
    """(language_model, inputs, tokens) -> its keyword arguments for the row's tokens in the slice, images merged in."""
    zero3_leaf_classes: tuple[str, ...]
    """Classes of modules whose parameters ZeRO-3 must gather together, such as a layer of experts."""
    save_processor: Callable[..., None]
    """(processor, folder): write processor, tokenizer and chat template."""
    build_tiny: Callable[..., None]
    """(spec, tokenizer_corpus, folder): write a small random checkpoint with the real architecture."""


def text_positions(attention_mask: torch.Tensor) -> torch.Tensor:
    """Return positions that count the attended tokens of each row from 0; (B, T) from a (B, T) mask, any padding side."""
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)


def attends_causally(config: PretrainedConfig) -> frozenset[int]:
    """Return no ids: the language model attends backwards only, from every token."""
    return frozenset()


def merge_along_batch(media: Sequence[Media]) -> Media:
    """Join the media tensors of several prompts along their first dimension, key by key."""
    import torch

    keys = {key: None for item in media for key in item}
    return {key: torch.cat([item[key] for item in media if key in item]) for key in keys}


def runs_tower_once(config: PretrainedConfig, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the arguments of a forward as they are: the model runs its tower once, if at all."""
    return inputs


def ids_beyond_tokenizer(config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the ids of a padded vocabulary that the tokenizer does not know."""
    return tuple(range(len(tokenizer), config.get_text_config().vocab_size))


def collapse_runs(token_ids: Sequence[int], *, placeholders: frozenset[int]) -> list[int]:
    """Keep one of every run of equal placeholders: [1, 9, 9, 9, 2] -> [1, 9, 2] for placeholder 9."""
    return [
        token
        for index, token in enumerate(token_ids)
        if token not in placeholders or index == 0 or token_ids[index - 1] != token
    ]


def bounded_size(*, height: int, width: int, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Return (height, width) as multiples of `factor` with an area inside the bounds and nearly the same aspect ratio.

    The area wins over the aspect ratio, and the upper bound over the lower; sides never fall below `factor`.
    """
    rows, columns = (max(factor, round(side / factor) * factor) for side in (height, width))
    if rows * columns > max_pixels:
        scale = math.sqrt(max_pixels / (height * width))
        rows, columns = (max(factor, math.floor(side * scale / factor) * factor) for side in (height, width))
    elif rows * columns < min_pixels:
        scale = math.sqrt(min_pixels / (height * width))
        rows, columns = (math.ceil(side * scale / factor) * factor for side in (height, width))
    # Where one side stands at its smallest, or both were rounded up, the longer one gives way.
    if rows * columns > max_pixels:
        shorter = min(rows, columns)
        longer = max(factor, max_pixels // shorter // factor * factor)
        rows, columns = (longer, shorter) if rows > columns else (shorter, longer)
    return rows, columns


def load_image_processor(path: str, *, processor_class: type[ProcessorMixin]) -> Any:
    """Load the processor of a model with images; raises UserError where a part of it or the chat template is missing."""
    from transformers import AutoProcessor

    # Either name holds the image processor's settings; transformers 5 writes the first.
    names = ("processor_config.json", "preprocessor_config.json")
    wanted = f"copy {' or '.join(names)}, the tokenizer files and the chat template of the original model into it"
    folder = Path(path)
    if folder.is_dir() and not any((folder / name).is_file() for name in names):
        raise UserError(f"{path}: no image processor in this checkpoint; {wanted}")
    try:
        processor = AutoProcessor.from_pretrained(path)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path}: the image processor or the tokenizer of this checkpoint cannot be loaded ({error}); {wanted}"
        ) from error
    if not isinstance(processor, processor_class):
        raise UserError(f"{path}: this checkpoint has a tokenizer but no image processor; {wanted}")
    # Some processor classes take no chat template when they are loaded; the same file gives the tokenizer its own.
    if processor.chat_template is None:
        processor.chat_template = processor.tokenizer.chat_template
    check_chat(processor, tokenizer=processor.tokenizer, path=path)
    return processor


def adds_special_tokens(tokenizer: PreTrainedTokenizerBase, *, text: str) -> bool:
    """Return whether the tokenizer is to add its start token to a rendered chat: not where the template wrote it."""
    return tokenizer.bos_token is None or not text.startswith(tokenizer.bos_token)


def check_typed_media(messages: Sequence[Message], *, media_tokens: Sequence[str]) -> None:
    """Raise UserError where a text holds a media token: it would stand for an image that is not there."""
    from lmm_r1.data.messages import TextPart

    texts = [part.text for message in messages for part in message.parts if isinstance(part, TextPart)]
    typed = [token for token in media_tokens for text in texts if token in text]
    if typed:
        raise UserError(f"the text of a message holds the media token {typed[0]}; take it out of the row")


def check_placeholders(written: int, *, given: int, kind: str) -> None:
    """Raise UserError where a rendered chat has other than one placeholder per image, or per video as `kind` says."""
    if written != given:
        raise UserError(
            f"the checkpoint's chat template writes {written} placeholders for the {given} {kind} of a row"
        )


def check_chat(processor: Any, *, tokenizer: PreTrainedTokenizerBase, path: str) -> None:
    """Raise UserError where a checkpoint brings no vocabulary or no usable chat template.

    Transformers lets both pass: an empty tokenizer is made, and a template is first looked at when it is used.
    """
    import jinja2

    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise UserError(f"{path}: no tokenizer in this checkpoint; copy the original model's tokenizer files into it")
    if processor.chat_template is None:
        raise UserError(
            f"{path}: no chat template in this checkpoint; copy the original model's chat_template.jinja (or the "
            "tokenizer_config.json or chat_template.json that holds it) into it"
        )
    try:
        processor.apply_chat_template([{"role": "user", "content": "?"}], tokenize=False)
    except jinja2.TemplateError as error:
        raise UserError(f"{path}: the chat template of this checkpoint is broken ({error}); correct it") from error


def engine_media(encoded: EncodedPrompt) -> dict[str, list[Any]]:
    """Return the images as vLLM takes them; nothing for a text prompt."""
    return {"image": encoded.images} if encoded.images else {}


def base_model_of(model: PreTrainedModel) -> torch.nn.Module:
    """Return what stands under the output layer of Hugging Face's generation classes."""
    return model.model


def inner_language_model_of(model: PreTrainedModel) -> torch.nn.Module:
    """Return the language model that stands beside a vision tower, and gets embeddings with the images merged in."""
    return model.model.language_model


def cut_tokens(language_model: torch.nn.Module, inputs: Mapping[str, Any], tokens: slice) -> dict[str, Any]:
    """Return a language model's inputs for some of the T tokens: ids (1, T) or embeddings (1, T, H), and positions."""
    parts = {name: inputs[name][:, tokens] for name in ("input_ids", "inputs_embeds") if inputs.get(name) is not None}
    return {**inputs, **parts, "position_ids": inputs["position_ids"][..., tokens]}


def chat_of(messages: Sequence[Message]) -> list[Mapping[str, Any]]:
    """Return messages in the form that Hugging Face's chat templates take."""
    from lmm_r1.data.messages import to_chat

    return to_chat(messages)
