"""Finds out what a kit must know about an architecture: from its config, its processor and a small random model."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image
from transformers import AutoConfig, PreTrainedModel

from lmm_r1.errors import UserError
from lmm_r1.lmm_kits.derived import CAPABILITIES, BlankTensor, Confirmation, KitFile, positions_owner
from lmm_r1.lmm_kits.encoding import load_image_processor

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
}
_WIDTH = re.compile(
    r"(.*_)?(intermediate_size|hidden_size|input_dim|output_dim|ffn_dim|conv_dim|block_dim|block_ff_dim|lora_rank|projection_dim)(_.*)?"
)
_OTHER_TOKENS = re.compile(r"(image|img|video|vision|visual|boi|eoi).*token_(id|ids|index)")
SIZES = ((56, 56), (140, 84), (84, 112), (448, 308))
BLANK_SIDES = (28, 32, 56, 64, 112, 224, 448)
SPREAD = 0.1


class Unsupported(UserError):
    """What the architecture has or lacks, for which no kit can be derived."""


def shrunk(config: PretrainedConfig) -> PretrainedConfig:
    """Return a config of the same structure with few layers and small widths; tokens and sizes of images stay."""
    data = config.to_dict()
    text = next((key for key in config.sub_configs if getattr(config, key, None) is config.get_text_config()), None)
    widths: dict[int, int] = {}
    for section in [data, *(data[key] for key in config.sub_configs if isinstance(data.get(key), dict))]:
        for name in _HIDDEN:
            if isinstance(section.get(name), int):
                widths[section[name]] = HIDDEN
    for key in config.sub_configs:
        if isinstance(data.get(key), dict):
            data[key] = _shrunk_section(data[key], widths, keeps_vocabulary=key == text)
    return type(config).from_dict(_shrunk_section(data, widths, keeps_vocabulary=True))


def _shrunk_section(
    section: Mapping[str, Any], widths: dict[int, int], *, keeps_vocabulary: bool
) -> dict[str, object]:
    made: dict[str, object] = dict(section)
    layers = next((section[name] for name in _LAYERS if isinstance(section.get(name), int)), None)
    fewer = None if layers is None else _enough_layers(section, layers)
    heads = next((section[name] for name in ("num_attention_heads", "num_heads", "n_heads") if name in section), 1)
    hidden = next((section[name] for name in _HIDDEN if isinstance(section.get(name), int)), HIDDEN)
    scale = max((section.get("head_dim") or hidden // heads) // HEAD_DIM, 1)
    for name, value in section.items():
        most = next((most for pattern, most in _MOST.items() if re.fullmatch(pattern, name)), None)
        if isinstance(value, list) and fewer is not None and value and layers is not None:
            made[name] = value = _fewer_layers(name, value, layers, fewer)
        if isinstance(value, list) and _WIDTH.fullmatch(name):
            made[name] = [_narrow(part, hidden, widths) for part in value]
        if isinstance(value, bool) or not isinstance(value, int):
            continue
        if name in (*_LAYERS, "max_window_layers"):
            made[name] = min(value, fewer or value)
        elif most is not None:
            made[name] = min(value, most)
        elif name == "num_key_value_heads":
            made[name] = HEADS if value == heads else 1
        elif name == "rotary_dim":
            made[name] = max(2, value // scale)
        elif name == "vocab_size" and not keeps_vocabulary:
            made[name] = min(value, 256)
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


def _enough_layers(section: Mapping[str, Any], layers: int) -> int:
    """Return how many layers have one of each kind."""
    kinds = [value for value in section.values() if isinstance(value, list) and len(value) == layers]
    for number in range(min(2, layers), min(layers, MOST_LAYERS) + 1):
        if all(set(map(str, kind[:number])) == set(map(str, kind)) for kind in kinds):
            return number
    return min(layers, MOST_LAYERS)


def _fewer_layers(name: str, value: list[Any], layers: int, fewer: int) -> list[Any]:
    """Return a list with an entry per layer, or with numbers of layers, for the first few layers."""
    if len(value) == layers:
        kept = value[:fewer]
        # A mixture whose list of layers is complete numbers them.
        return kept if not _numbers_layers(name, value, layers) else [part for part in value if part < fewer]
    if _numbers_layers(name, value, layers):
        return [part for part in value if part < fewer] or [fewer - 1]
    return value


def _numbers_layers(name: str, value: list[Any], layers: int) -> bool:
    return (
        bool(re.search(r"layers|idxs|indexes|indices", name))
        and value == sorted(set(value))
        and all(isinstance(part, int) and 0 <= part < layers for part in value)
        and max(value) > 1
    )


def write_small(model: str, folder: Path) -> tuple[PreTrainedModel, Any]:
    """Write a small random checkpoint of a model's architecture, with its processor; return the model and the processor.

    Raises Unsupported if transformers has no class for it, or the config cannot be made small.
    """
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, ProcessorMixin
    from transformers.conversion_mapping import get_model_conversion_mapping

    config = AutoConfig.from_pretrained(model)
    if type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        raise Unsupported(f"transformers has no model of images and text for {config.model_type}")
    processor = load_image_processor(model, processor_classes=(ProcessorMixin,))
    small = shrunk(config)
    torch.manual_seed(0)
    try:
        made = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)](small).eval()
    except (RuntimeError, ValueError, TypeError, AssertionError) as error:
        raise Unsupported(f"no small model can be made of its config ({first_line(error)})") from error
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
    pixels = torch.randint(0, 256, (height, width, 3), generator=generator, dtype=torch.uint8)
    return Image.fromarray(pixels.numpy())


@dataclass(frozen=True)
class Discovery:
    """A small model and its processor, of which a kit file is made."""

    model: PreTrainedModel
    processor: Any

    def kit_file(self) -> KitFile:
        """Return what is found, with every capability confirmed; raises Unsupported if something is not found."""
        tokenizer, as_parts = self.processor.tokenizer, self._text_as_parts()
        image_token = self._image_token(as_parts)
        texts = {size: self._chat(1, as_parts) for size in SIZES}
        written = [self._expansion(texts[size], image_token, [picture(*size)]) for size in SIZES]
        placeholder = self._placeholder(written)
        names = tokenizer.convert_ids_to_tokens
        mark = self._image_mark(texts[SIZES[0]], image_token, as_parts)
        adds_start = self._adds_start(texts[SIZES[0]])
        batch = self._batch(texts[SIZES[1]], [picture(*SIZES[1])])
        media_keys, token_inputs = self._inputs(batch)
        reached = self._reached(batch), self._reached(self._batch(self._chat(0, as_parts), []))
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
            opening=self._border([ids[0] for ids in written], written, placeholder),
            closing=self._border([ids[-1] for ids in written], written, placeholder),
            media_tokens=self._media_tokens(written, mark),
            media_keys=media_keys,
            token_inputs=token_inputs,
            positions="text" if positions_owner(type(self.model)) is None else "model",
            adds_start=adds_start,
            text_as_parts=as_parts,
            **self._prefixes(*reached),
            language_model=self._language_model(),
            blank_ids=blank_ids,
            blank_media=blank_media,
            capabilities={name: Confirmation(confirmed=True, reason="being checked") for name in CAPABILITIES},
        )

    def _render(self, chat: Sequence[Mapping[str, Any]]) -> str:
        return self.processor.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)

    def _chat(self, images: int, as_parts: bool) -> str:
        words: list[dict[str, str]] = [{"type": "text", "text": "Which digit is this?"}]
        content: object = [*({"type": "image"} for _ in range(images)), *words]
        if not images and not as_parts:
            content = words[0]["text"]
        return self._render([{"role": "user", "content": content}])

    def _text_as_parts(self) -> bool:
        """Return whether the template needs text as parts; raises Unsupported if it writes neither form."""
        for as_parts in (False, True):
            try:
                text = self._chat(0, as_parts)
            except Exception:  # templates raise what they like
                continue
            if "Which digit is this?" in text and "'type'" not in text:
                return as_parts
        raise Unsupported("the chat template writes a text neither as a string nor as a list of parts")

    def _image_token(self, as_parts: bool) -> str:
        try:
            texts = [self._chat(number, as_parts) for number in range(3)]
        except Exception as error:
            raise Unsupported(f"the chat template does not take images ({first_line(error)})") from error
        counts = [[text.count(token) for text in texts] for token in self.processor.tokenizer.get_added_vocab()]
        tokens = self.processor.tokenizer.get_added_vocab()
        found = [
            token for token, (zero, one, two) in zip(tokens, counts, strict=True) if (one - zero, two - zero) == (1, 2)
        ]
        own = str(getattr(self.processor, "image_token", None))
        if own in found:
            return own
        if len(found) != 1:
            raise Unsupported(
                f"the chat template writes {len(found)} tokens for an image, and the processor names none"
            )
        return found[0]

    def _batch(self, text: str, images: Sequence[Image.Image]) -> dict[str, torch.Tensor]:
        given = {"images": list(images)} if images else {}
        return dict(self.processor(text=[text], add_special_tokens=False, return_tensors="pt", **given))

    def _expansion(self, text: str, image_token: str, images: Sequence[Image.Image]) -> list[int]:
        """Return the ids that the processor writes in the place of the image token; all others must stay as they are."""
        tokenizer = self.processor.tokenizer
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        place = ids.index(tokenizer.convert_tokens_to_ids(image_token))
        try:
            full = self._batch(text, images)["input_ids"][0].tolist()
        except (ValueError, TypeError, RuntimeError, KeyError, IndexError) as error:
            raise Unsupported(f"the processor does not take an image ({first_line(error)})") from error
        after = len(ids) - place - 1
        if full[:place] != ids[:place] or full[len(full) - after :] != ids[place + 1 :]:
            raise Unsupported("the processor changes text around an image")
        made = full[place : len(full) - after]
        words = set(made) - set(tokenizer.get_added_vocab().values())
        if words:
            shown = tokenizer.decode(sorted(words))
            raise Unsupported(f"the processor writes ordinary text in the place of an image ({shown!r})")
        return made

    def _placeholder(self, written: Sequence[Sequence[int]]) -> int:
        config = self.model.config
        named = [getattr(config, name, None) for name in ("image_token_id", "image_token_index")]
        inside = set.intersection(*map(set, written))
        for token in named:
            if token in inside:
                return token
        (token, number), *_ = Counter(written[-1]).most_common(1)
        if token not in inside or number < 2:
            raise Unsupported("the processor repeats no token for an image")
        return token

    def _border(self, tokens: Sequence[int], written: Sequence[Sequence[int]], placeholder: int) -> str | None:
        once = len(set(tokens)) == 1 and all(list(ids).count(tokens[0]) == 1 for ids in written)
        return self.processor.tokenizer.convert_ids_to_tokens(tokens[0]) if once and tokens[0] != placeholder else None

    def _image_mark(self, text: str, image_token: str, as_parts: bool) -> str:
        """Return the image token with the tokens that the template writes next to it only for an image."""
        plain = self._chat(0, as_parts)
        added = sorted((token for token in self.processor.tokenizer.get_added_vocab() if token not in plain), key=len)
        before, after = text.split(image_token, 1)
        mark = image_token
        while token := next((token for token in reversed(added) if before.endswith(token)), None):
            mark, before = token + mark, before.removesuffix(token)
        while token := next((token for token in reversed(added) if after.startswith(token)), None):
            mark, after = mark + token, after.removeprefix(token)
        return mark

    def _adds_start(self, text: str) -> bool:
        tokenizer = self.processor.tokenizer
        bare, special = (tokenizer(text, add_special_tokens=add)["input_ids"] for add in (False, True))
        if special[len(special) - len(bare) :] != bare:
            raise Unsupported("the tokenizer adds a token to the end of a text")
        return special != bare

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
                raise Unsupported(f"its input {name} does not follow from the tokens")
            marked[name] = sorted(token for token, found in kinds.items() if found == {1})
        if not media:
            raise Unsupported("the processor makes no tensors that the model takes")
        return media, marked

    def _blank(self, mark: str, media_keys: Sequence[str]) -> tuple[list[list[int]], dict[str, BlankTensor]]:
        """Return ids and tensors of the first square black image that the processor and the model take."""
        for side in BLANK_SIDES:
            try:
                batch = self._batch(mark, [Image.new("RGB", (side, side))])
                self._reached(batch)
            except (Unsupported, ValueError, TypeError, RuntimeError, KeyError, IndexError):
                continue
            ids: list[list[int]] = []
            for token in batch["input_ids"][0].tolist():
                if ids and ids[-1][0] == token:
                    ids[-1][1] += 1
                else:
                    ids.append([token, 1])
            return ids, {name: _blank_tensor(batch[name]) for name in media_keys}
        raise Unsupported("the processor takes no square image")

    def _media_tokens(self, written: Sequence[Sequence[int]], mark: str) -> list[str]:
        """Return the tokens seen in images, those that differ from them in numbers, and those that the config names."""
        tokenizer, config = self.processor.tokenizer, self.model.config.to_dict()
        added = tokenizer.get_added_vocab()
        seen = {tokenizer.convert_ids_to_tokens(token) for ids in written for token in ids}
        seen |= {token for token in added if token in mark and len(token) > 1}
        named = [value for name, value in config.items() if _OTHER_TOKENS.fullmatch(name)]
        numbers = {number for value in named for number in (value if isinstance(value, list) else [value])}
        patterns = {re.sub(r"\d+", "0", token) for token in seen}
        others = {
            token for token, number in added.items() if number in numbers or re.sub(r"\d+", "0", token) in patterns
        }
        video = str(getattr(self.processor, "video_token", None))
        return sorted(seen | others | ({video} if video in added else set()))

    def _reached(self, batch: Mapping[str, torch.Tensor]) -> set[str]:
        """Return the names of the weights that a loss on a batch reaches."""
        self.model.zero_grad()
        taken = {
            name: value.to(self.model.dtype) if value.is_floating_point() else value for name, value in batch.items()
        }
        try:
            self.model(**taken).logits.float().logsumexp(-1).sum().backward()
        except (ValueError, TypeError, RuntimeError, KeyError, IndexError, AttributeError) as error:
            raise Unsupported(f"the model does not run on what the processor makes ({first_line(error)})") from error
        reached = {name for name, weight in self.model.named_parameters() if weight.grad is not None}
        self.model.zero_grad()
        return reached

    def _language_model(self) -> str:
        text = self.model.config.get_text_config()
        towers = [
            name
            for name, module in self.model.named_modules()
            if name and isinstance(module, PreTrainedModel) and module.config is text
        ]
        if not towers:
            raise Unsupported("its language model is no module of its own")
        return towers[-1]

    def _prefixes(self, by_image: set[str], by_text: set[str]) -> dict[str, list[str]]:
        """Return the prefixes of the parts of the model, by what losses on an image and on text reach."""
        names = [name for name, _ in self.model.named_parameters()]
        owners = {name: _owner(self.model, name) for name in names}
        language = {owner for name, owner in owners.items() if name in by_text}
        # With tied weights, the output layer has no names of its own here.
        head = [
            f"{name}." for name, module in self.model.named_modules() if module is self.model.get_output_embeddings()
        ]
        towers = tuple(
            f"{name}."
            for name, module in self.model.named_modules()
            if name
            and isinstance(module, PreTrainedModel)
            and not name.startswith(self._language_model())
            and name not in ("model",)
        )
        seen = {name for name in by_image if owners[name] not in language}
        if not seen:
            raise Unsupported("a loss on an image reaches no weights but the language model's")
        groups = {
            "vision_prefixes": {name for name in seen if name.startswith(towers)},
            "projector_prefixes": {name for name in seen if not name.startswith(towers)},
            "language_prefixes": {name for name in names if owners[name] in language},
        }
        groups["untrained_prefixes"] = set(names).difference(*groups.values())
        prefixes = {kind: _covering(group, names) for kind, group in groups.items()}
        prefixes["language_prefixes"] += [
            name for name in head if not name.startswith(tuple(prefixes["language_prefixes"]))
        ]
        return prefixes


def _blank_tensor(tensor: torch.Tensor) -> BlankTensor:
    listed = None if tensor.is_floating_point() else [int(value) for value in tensor.flatten()]
    return BlankTensor(dtype=str(tensor.dtype).removeprefix("torch."), shape=list(tensor.shape), integers=listed)


def _owner(model: PreTrainedModel, name: str) -> str:
    """Return the part of the model that a weight belongs to: a child of its inner model, or of the model itself."""
    parts = name.split(".")
    return ".".join(parts[: 2 if parts[0] == "model" else 1])


def _covering(wanted: Iterable[str], names: Sequence[str]) -> list[str]:
    """Return the shortest prefixes that cover the wanted names and no others."""
    wanted = set(wanted)
    others = [name for name in names if name not in wanted]
    found: list[str] = []
    for name in sorted(wanted):
        if name.startswith(tuple(found)):
            continue
        parts = name.split(".")
        prefixes = [".".join(parts[:count]) + "." for count in range(1, len(parts))] + [name]
        # Not "model.", which holds whatever a larger model has more.
        found.append(next(p for p in prefixes if p != "model." and not any(other.startswith(p) for other in others)))
    return found
