"""Finds out what a kit must know about an architecture: from its config, its processor and a small random model."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image
from transformers import AutoConfig, PreTrainedModel

from lmm_r1.errors import UserError
from lmm_r1.lmm_kits.derived import CAPABILITIES, BlankTensor, Confirmation, KitFile, positions_owner
from lmm_r1.lmm_kits.encoding import any_of, load_image_processor

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Widths of the small model. vLLM's attention on CPUs takes no heads of fewer than 32 dimensions.
HIDDEN, HEADS, HEAD_DIM, EXPERTS = 64, 2, 32, 4
MOST_LAYERS, MOST_TIMES = 8, 16
_LAYERS = ("num_hidden_layers", "depth", "num_layers", "n_layers")
_HIDDEN = ("hidden_size", "embed_dim", "d_model", "n_embd")
# Names of numbers in configs, with the most that a small model has.
_MOST: dict[str, int] = {
    r"(num_(attention_)?|n_|index_n_)heads?": HEADS,
    r"(qk_rope_|qk_nope_|v_|index_)?head_dim": HEAD_DIM,
    r"qk_head_dim": 2 * HEAD_DIM,
    r"n_routed_experts|num_(local_)?experts|moe_num_experts": EXPERTS,
    r"num_experts_per_tok|moe_k|n_group": 2,
    r"topk_group|first_k_dense_replace": 1,
    r"vocab_size": 256,
}
_WIDTH = re.compile(
    r"(.*_)?(intermediate_size|hidden_size|input_dim|output_dim|ffn_dim|conv_dim|block_dim|block_ff_dim|lora_rank|projection_dim)(_.*)?"
)
_OTHER_TOKENS = re.compile(r"(image|img|video|vision|visual|boi|eoi).*token_(id|ids|index)")
# What processors and models raise for inputs that do not fit.
_MISFITS = (ValueError, TypeError, RuntimeError, KeyError, IndexError, AttributeError, AssertionError)
SIZES = ((56, 56), (140, 84), (84, 112), (448, 308))
BLANK_SIDES = (28, 32, 56, 64, 112, 224, 448)
SPREAD = 0.1
QUESTION = "Which digit is this?"


class Unconfirmed(UserError):
    """Why no kit can be derived, or why a check does not confirm a capability."""


def shrunk(config: PretrainedConfig) -> PretrainedConfig:
    """Return a config of the same structure with few layers and small widths; tokens and sizes of images stay."""
    data = config.to_dict()
    text = next((key for key in config.sub_configs if getattr(config, key, None) is config.get_text_config()), None)
    parts = {key: data[key] for key in config.sub_configs if isinstance(data.get(key), dict)}
    found = [section.get(name) for section in (data, *parts.values()) for name in _HIDDEN]
    widths = {width: HIDDEN for width in found if isinstance(width, int)}
    small = {key: _shrunk_part(part, widths, keeps_vocabulary=key == text) for key, part in parts.items()}
    return type(config).from_dict(_shrunk_part({**data, **small}, widths, keeps_vocabulary=True))


def _shrunk_part(section: Mapping[str, Any], widths: dict[int, int], *, keeps_vocabulary: bool) -> dict[str, object]:
    def first_of(names: Sequence[str]) -> int | None:
        return next((section[name] for name in names if isinstance(section.get(name), int)), None)

    made: dict[str, object] = dict(section)
    layers = first_of(_LAYERS)
    fewer = 0
    if layers is not None:
        # As many as have one of each kind.
        lists = [value for value in section.values() if isinstance(value, list) and len(value) == layers]
        kinds, fewer = [list(map(str, value)) for value in lists], min(layers, MOST_LAYERS)
        enough = (n for n in range(min(2, layers), fewer) if all(set(kind[:n]) == set(kind) for kind in kinds))
        fewer = next(enough, fewer)
    heads = first_of(("num_attention_heads", "num_heads", "n_heads")) or 1
    hidden = first_of(_HIDDEN) or HIDDEN
    scale = max((section.get("head_dim") or hidden // heads) // HEAD_DIM, 1)
    for name, value in section.items():
        most = next((most for pattern, most in _MOST.items() if re.fullmatch(pattern, name)), None)
        if isinstance(value, list) and value and layers is not None:
            made[name] = value = _fewer_layers(name, value, layers, fewer)
        if isinstance(value, list) and _WIDTH.fullmatch(name):
            made[name] = [_narrow(part, hidden, widths) for part in value]
        if isinstance(value, bool) or not isinstance(value, int) or (name == "vocab_size" and keeps_vocabulary):
            continue
        if name in (*_LAYERS, "max_window_layers"):
            made[name] = min(value, fewer or value)
        elif most is not None:
            made[name] = min(value, most)
        elif name == "num_key_value_heads":
            made[name] = HEADS if value == heads else 1
        elif name == "rotary_dim":
            made[name] = max(2, value // scale)
        elif name in _HIDDEN or _WIDTH.fullmatch(name):
            made[name] = _narrow(value, hidden, widths)
    rope = section.get("rope_parameters")
    if isinstance(rope, dict) and isinstance(rope.get("mrope_section"), list):
        made["rope_parameters"] = {**rope, "mrope_section": [part // scale for part in rope["mrope_section"]]}
    if isinstance(section.get("initializer_range"), float):
        made["initializer_range"] = HIDDEN**-0.5
    return made


def _narrow(width: int, hidden: int, widths: dict[int, int]) -> int:
    """Return a small width; equal widths stay equal, and small multiples of a hidden size stay the same multiples."""
    if width not in widths:
        known = [hidden, *(size for size, small in widths.items() if small == HIDDEN)]
        times = next((width // size for size in known if width % size == 0 and width // size <= MOST_TIMES), 1)
        widths[width] = HIDDEN * times
    return widths[width]


def _fewer_layers(name: str, value: list[Any], layers: int, fewer: int) -> list[Any]:
    """Return a list with an entry per layer, or with numbers of layers, for the first few layers."""
    is_rising = re.search(r"layers|idxs|indexes|indices", name) and value == sorted(set(value))
    # Numbers of layers.
    if is_rising and all(isinstance(part, int) and 0 <= part < layers for part in value) and max(value) > 1:
        return [part for part in value if part < fewer] or [fewer - 1]
    return value[:fewer] if len(value) == layers else value


def write_small(model: str, folder: Path) -> tuple[PreTrainedModel, Any]:
    """Write a small random checkpoint of a model's architecture, with its processor; return the model and the processor.

    Raises Unconfirmed if transformers has no class for it, or the config cannot be made small.
    """
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, ProcessorMixin
    from transformers.conversion_mapping import get_model_conversion_mapping

    config = AutoConfig.from_pretrained(model)
    if type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        raise Unconfirmed(f"transformers has no model of images and text for {config.model_type}")
    processor = load_image_processor(model, processor_classes=(ProcessorMixin,))
    torch.manual_seed(0)
    try:
        made = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)](shrunk(config)).eval()
    except _MISFITS as error:
        raise Unconfirmed(f"no small model can be made of its config ({first_line(error)})") from error
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in made.parameters():
            # Some weights start at zero or one, and would hide what they are for.
            scale = SPREAD * weight.std() if weight.numel() > 1 and weight.std() > 0 else 0.02
            weight.add_(torch.randn(weight.shape, generator=generator) * scale)
    made.generation_config.eos_token_id = processor.tokenizer.eos_token_id
    made.generation_config.pad_token_id = processor.tokenizer.pad_token_id
    made.config.use_cache = made.config.get_text_config().use_cache = False
    # Saves a built model with all names of released checkpoints; transformers would leave out prefixes.
    made._weight_conversions = get_model_conversion_mapping(made, add_legacy=False) or None
    made.save_pretrained(folder)
    processor.save_pretrained(folder)
    return made, processor


def first_line(error: BaseException) -> str:
    """Return an error as a part of a sentence."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:160]}" if text else type(error).__name__


def picture(width: int, height: int) -> Image.Image:
    """Return a picture of random pixels, always the same."""
    generator = torch.Generator().manual_seed(width * height)
    return Image.fromarray(torch.randint(0, 256, (height, width, 3), generator=generator, dtype=torch.uint8).numpy())


@dataclass(frozen=True)
class Discovery:
    """A small model and its processor, of which a kit file is made."""

    model: PreTrainedModel
    processor: Any

    def kit_file(self) -> KitFile:
        """Return what is found, with every capability confirmed; raises Unconfirmed if something is not found."""
        names = self.processor.tokenizer.convert_ids_to_tokens
        image_token, text = self._image_token(), self._chat(1)
        written = [self._expansion(text, image_token, picture(*size)) for size in SIZES]
        placeholder, number = Counter(written[-1]).most_common(1)[0]
        if number < 2 or not all(placeholder in ids for ids in written):
            raise Unconfirmed("the processor repeats no token for an image")
        mark = self._image_mark(text, image_token)
        bare, special = (self.processor.tokenizer(text, add_special_tokens=add)["input_ids"] for add in (False, True))
        if special[len(special) - len(bare) :] != bare:
            raise Unconfirmed("the tokenizer adds a token to the end of a text")
        batch = self._batch(text, picture(*SIZES[1]))
        media_keys, token_inputs = self._inputs(batch)
        prefixes = self._prefixes(self._reached(batch), self._reached(self._batch(self._chat(0))))
        inner = {name: one for name, one in self.model.named_modules() if name and isinstance(one, PreTrainedModel)}
        if not (towers := [name for name, one in inner.items() if one.config is self.model.config.get_text_config()]):
            raise Unconfirmed("its language model is no module of its own")
        blank_ids, blank_media = self._blank(mark, media_keys)
        return KitFile(
            model_type=self.model.config.model_type,
            config_class=type(self.model.config).__name__,
            model_class=type(self.model).__name__,
            processor_class=type(self.processor).__name__,
            image_token=image_token,
            image_mark=mark,
            placeholder=names(placeholder),
            placeholder_id=placeholder,
            opening=self._border(written, 0, placeholder),
            closing=self._border(written, -1, placeholder),
            media_tokens=self._media_tokens(written, mark),
            media_keys=media_keys,
            token_inputs=token_inputs,
            positions="text" if positions_owner(type(self.model)) is None else "model",
            adds_start=special != bare,
            text_as_parts=self._as_parts,
            **prefixes,
            language_model=towers[-1],
            blank_ids=blank_ids,
            blank_media=blank_media,
            capabilities={name: Confirmation(confirmed=True, reason="being checked") for name in CAPABILITIES},
        )

    @cached_property
    def _as_parts(self) -> bool:
        """Whether the template needs text as parts."""
        for as_parts in (False, True):
            try:
                text = self._rendered([{"type": "text", "text": QUESTION}] if as_parts else QUESTION)
            except Exception:  # templates raise what they like
                continue
            if QUESTION in text and "'type'" not in text:
                return as_parts
        raise Unconfirmed("the chat template writes a text neither as a string nor as a list of parts")

    def _rendered(self, content: object) -> str:
        chat = [{"role": "user", "content": content}]
        return self.processor.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)

    def _chat(self, images: int) -> str:
        parts = [*({"type": "image"} for _ in range(images)), {"type": "text", "text": QUESTION}]
        return self._rendered(parts if images or self._as_parts else QUESTION)

    def _image_token(self) -> str:
        zero = self._chat(0)
        try:
            one, two = self._chat(1), self._chat(2)
        except Exception as error:
            raise Unconfirmed(f"the chat template does not take images ({first_line(error)})") from error
        added = self.processor.tokenizer.get_added_vocab()
        found = [token for token in added if [text.count(token) - zero.count(token) for text in (one, two)] == [1, 2]]
        own = str(getattr(self.processor, "image_token", None))
        if own not in found and len(found) != 1:
            what = f"the chat template writes {len(found)} tokens for an image"
            raise Unconfirmed(f"{what}, and the processor names none")
        return own if own in found else found[0]

    def _batch(self, text: str, *images: Image.Image) -> dict[str, torch.Tensor]:
        given = {"images": list(images)} if images else {}
        return dict(self.processor(text=[text], add_special_tokens=False, return_tensors="pt", **given))

    def _expansion(self, text: str, image_token: str, image: Image.Image) -> list[int]:
        """Return the ids that the processor writes in the place of the image token; all others must stay as they are."""
        tokenizer = self.processor.tokenizer
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        place = ids.index(tokenizer.convert_tokens_to_ids(image_token))
        try:
            full = self._batch(text, image)["input_ids"][0].tolist()
        except _MISFITS as error:
            raise Unconfirmed(f"the processor does not take an image ({first_line(error)})") from error
        after = len(ids) - place - 1
        if full[:place] != ids[:place] or full[len(full) - after :] != ids[place + 1 :]:
            raise Unconfirmed("the processor changes text around an image")
        made = full[place : len(full) - after]
        if words := set(made) - set(tokenizer.get_added_vocab().values()):
            shown = tokenizer.decode(sorted(words))
            raise Unconfirmed(f"the processor writes ordinary text in the place of an image ({shown!r})")
        return made

    def _border(self, written: Sequence[list[int]], place: int, placeholder: int) -> str | None:
        """Return the token that every image has once, at this place; None without one."""
        token = written[0][place]
        once = all(ids[place] == token and ids.count(token) == 1 for ids in written)
        return self.processor.tokenizer.convert_ids_to_tokens(token) if once and token != placeholder else None

    def _image_mark(self, text: str, image_token: str) -> str:
        """Return the image token with the tokens that the template writes next to it only for an image."""
        plain = self._chat(0)
        added = any_of(token for token in self.processor.tokenizer.get_added_vocab() if token not in plain).pattern
        return re.findall(rf"(?:{added})*{re.escape(image_token)}(?:{added})*", text)[0]

    def _inputs(self, batch: Mapping[str, torch.Tensor]) -> tuple[list[str], dict[str, list[int]]]:
        """Return the names of the media tensors, and of the inputs with a 1 at certain tokens, with the ids of these."""
        ids, taken = batch["input_ids"], set(inspect.signature(self.model.forward).parameters)
        taken |= set(inspect.signature(self.model.base_model.forward).parameters)
        media, marked = [], {}
        for name, value in batch.items():
            if name in ("input_ids", "attention_mask", "mm_token_type_ids") or name not in taken:
                continue
            if value.shape != ids.shape or value.is_floating_point():
                media.append(name)
                continue
            kinds = {token: set(value[ids == token].tolist()) for token in set(ids[0].tolist())}
            if any(len(found) > 1 or not found <= {0, 1} for found in kinds.values()):
                raise Unconfirmed(f"its input {name} does not follow from the tokens")
            marked[name] = sorted(token for token, found in kinds.items() if found == {1})
        if not media:
            raise Unconfirmed("the processor makes no tensors that the model takes")
        return media, marked

    def _blank(self, mark: str, media_keys: Sequence[str]) -> tuple[list[list[int]], dict[str, BlankTensor]]:
        """Return ids and tensors of the first square black image that the processor and the model take."""
        for side in BLANK_SIDES:
            try:
                batch = self._batch(mark, Image.new("RGB", (side, side)))
                self._reached(batch)
            except (Unconfirmed, *_MISFITS):
                continue
            runs = [[token, len(list(run))] for token, run in groupby(batch["input_ids"][0].tolist())]
            tensors = {}
            for name in media_keys:
                dtype, shape = str(batch[name].dtype).removeprefix("torch."), list(batch[name].shape)
                listed = None if batch[name].is_floating_point() else [int(value) for value in batch[name].flatten()]
                tensors[name] = BlankTensor(dtype=dtype, shape=shape, integers=listed)
            return runs, tensors
        raise Unconfirmed("the processor takes no square image")

    def _media_tokens(self, written: Sequence[Sequence[int]], mark: str) -> list[str]:
        """Return the tokens seen in images, those that differ from them in numbers, and those that the config names."""
        tokenizer, config = self.processor.tokenizer, self.model.config.to_dict()
        added = tokenizer.get_added_vocab()
        seen = {tokenizer.convert_ids_to_tokens(token) for ids in written for token in ids}
        seen |= {token for token in added if token in mark and len(token) > 1}
        named = [value for name, value in config.items() if _OTHER_TOKENS.fullmatch(name)]
        numbers = {number for value in named for number in (value if isinstance(value, list) else [value])}
        patterns = {re.sub(r"\d+", "0", token) for token in seen}
        alike = {token for token in added if re.sub(r"\d+", "0", token) in patterns}
        video = str(getattr(self.processor, "video_token", None))
        return sorted(seen | alike | {token for token in added if added[token] in numbers or token == video})

    def _reached(self, batch: Mapping[str, torch.Tensor]) -> set[str]:
        """Return the names of the weights that a loss on a batch reaches."""
        self.model.zero_grad()
        taken = {name: data.to(self.model.dtype) if data.is_floating_point() else data for name, data in batch.items()}
        try:
            self.model(**taken).logits.float().logsumexp(-1).sum().backward()
        except _MISFITS as error:
            raise Unconfirmed(f"the model does not run on what the processor makes ({first_line(error)})") from error
        reached = {name for name, weight in self.model.named_parameters() if weight.grad is not None}
        self.model.zero_grad()
        return reached

    def _prefixes(self, by_image: set[str], by_text: set[str]) -> dict[str, list[str]]:
        """Return the prefixes of the parts of the model, by what losses on an image and on text reach.

        The projector counts as a part of the vision tower: both are frozen together.
        """
        names = [name for name, _ in self.model.named_parameters()]
        vision, language = {_owner(name) for name in by_image}, {_owner(name) for name in by_text}
        if vision <= language:
            raise Unconfirmed("a loss on an image reaches no weights but the language model's")
        unread = {name for name in names if name not in by_image and _owner(name) in vision - language}
        return {
            "vision_prefixes": sorted(vision - language),
            "projector_prefixes": [],
            # A tied output layer has no weight of its own.
            "language_prefixes": sorted({*language, "lm_head."}),
            "untrained_prefixes": sorted({_owner(name) for name in names} - vision - language | unread),
        }


def _owner(name: str) -> str:
    """Return the prefix of the part that a weight belongs to: a child of the inner model, or of the model itself."""
    parts = name.split(".")
    part = ".".join(parts[: 2 if parts[0] == "model" else 1])
    return part if part == name else f"{part}."
