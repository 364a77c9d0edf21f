"""Kits made of data: what `lmm-r1 kits --derive` finds out about an architecture that has no kit of its own."""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_args

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from lmm_r1 import cpu
from lmm_r1.data.messages import Message, to_chat
from lmm_r1.errors import UserError
from lmm_r1.files.json_files import read_json_object
from lmm_r1.lmm_kits.encoding import check_tokens, known_ids, part_lists, text_positions
from lmm_r1.lmm_kits.kit import Config, LmmKit, Media, Processor
from lmm_r1.lmm_kits.tiny_model import TinyModelSpec

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

CONFIG_KEY = "lmm_r1_kit"
"""The key in a checkpoint's config under which a model that was trained with a derived kit stores it."""
Capability = Literal["sft", "freezing", "lora", "packed", "shared_prefix", "rl"]
CAPABILITIES: tuple[Capability, ...] = get_args(Capability)
_STRICT = ConfigDict(extra="forbid", strict=True)


@dataclass(frozen=True, kw_only=True)
class Confirmation:
    """Whether the checks confirm a capability; what they do not confirm is off."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    confirmed: bool
    reason: str


@dataclass(frozen=True, kw_only=True)
class BlankTensor:
    """A media tensor of a blank image: integers are listed, other numbers are zero."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    dtype: str
    shape: list[int]
    integers: list[int] | None = None


@dataclass(frozen=True, kw_only=True)
class KitFile:
    """What a derived kit consists of. Names of classes are looked up in transformers only."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    model_type: str
    config_class: str
    model_class: str
    processor_class: str
    image_token: str
    """What the chat template writes once per image, which the processor replaces."""
    image_mark: str
    """The same with the tokens that the template writes around it."""
    placeholder: str
    """The token that the processor repeats once per feature."""
    placeholder_id: int
    """Its id, by which a checkpoint with another tokenizer is recognised."""
    opening: str | None
    """The token that only begins what the processor writes for an image."""
    closing: str | None
    """The token that only ends it."""
    media_tokens: list[str]
    """All tokens that only images and videos may have in a text."""
    media_keys: list[str]
    """The media tensors of the processor."""
    token_inputs: dict[str, list[int]]
    """Further arguments of the forward, which are 1 at these token ids and 0 elsewhere."""
    positions: Literal["text", "model"]
    """Whether positions count the tokens, or are computed by the model's `get_rope_index`."""
    adds_start: bool
    """Whether the tokenizer adds the start token if the chat template does not write it."""
    text_as_parts: bool
    """Whether the chat template takes text as a list of parts."""
    vision_prefixes: list[str]
    projector_prefixes: list[str]
    language_prefixes: list[str]
    untrained_prefixes: list[str]
    language_model: str
    """The name of the module that runs the language model's layers."""
    blank_ids: list[Annotated[list[int], Field(min_length=2, max_length=2)]]
    """The ids of a small blank image, as pairs of an id and its number of repetitions."""
    blank_media: dict[str, BlankTensor]
    capabilities: dict[str, Confirmation]
    """What the checks found; kits of earlier versions have more."""

    @classmethod
    def parsed(cls, data: object, *, place: str) -> KitFile:
        """Return the data of a kit file; raises UserError, with the place and the key, for anything that does not fit."""
        try:
            kit = TypeAdapter(cls).validate_json(json.dumps(data))
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"])) or "the kit"
            raise UserError(f"{place}: {key}: {first['msg']}; derive the kit again") from None
        if missing := [name for name in CAPABILITIES if name not in kit.capabilities]:
            raise UserError(f"{place}: capabilities.{missing[0]} is missing; derive the kit again")
        return kit

    @property
    def data(self) -> dict[str, object]:
        """The file's JSON object."""
        return asdict(self)


def read_kit(file: str | Path) -> KitFile:
    """Return the kit of a file; raises UserError if it is none."""
    try:
        data = read_json_object(Path(file))
    except OSError as error:
        raise UserError(f"{file}: this kit cannot be read ({error.strerror})") from error
    return KitFile.parsed(data, place=str(file))


def stored_kit(config: Mapping[str, Any], *, path: str) -> KitFile | None:
    """Return the derived kit in a checkpoint's config; None without one. Raises UserError for one of another model."""
    if CONFIG_KEY not in config:
        return None
    place, own = f"{path}: {CONFIG_KEY} in config.json", config.get("model_type")
    found = KitFile.parsed(config[CONFIG_KEY], place=place)
    if found.model_type != own:
        raise UserError(f"{place}: model_type is '{found.model_type}', but the model's is '{own}'")
    return found


def derived_kit(file: KitFile, *, place: str) -> LmmKit:
    """Return the kit of a file; equal files have equal kits.

    Raises UserError if transformers lacks a class of this name, or no model can be trained with the kit.
    """
    if not file.capabilities["sft"].confirmed:
        raise UserError(f"{place}: models of this kit cannot be trained: {file.capabilities['sft'].reason}")
    cpu.prepare()
    import transformers
    from transformers import PretrainedConfig, PreTrainedModel, ProcessorMixin

    refusals = {name: finding.reason for name, finding in file.capabilities.items() if not finding.confirmed}
    refusals |= dict.fromkeys(("4bit", "critic"), "it is not checked for derived kits")
    classes: dict[str, type] = {}
    bases = {"config_class": PretrainedConfig, "model_class": PreTrainedModel, "processor_class": ProcessorMixin}
    for key, base in bases.items():
        # A lazy module has no `vars` of its classes; `getattr` loads the one that is named.
        found = getattr(transformers, name, None) if (name := getattr(file, key)).isidentifier() else None
        if not (isinstance(found, type) and issubclass(found, base)):
            problem = f"transformers {transformers.__version__} has no {base.__name__} called {name}"
            raise UserError(f"{place}: {key}: {problem}")
        classes[key] = found
    members = {
        "file": file,
        "model_type": file.model_type,
        "checkpoints": f"derived for {file.model_type}",
        **classes,
        **{key: tuple(value) for key, value in vars(file).items() if re.fullmatch(r"media_\w+|\w+_prefixes", key)},
        "tokenizer_adds_start": file.adds_start,
        "engine_refusal": refusals.get("rl"),
        "refusals": refusals,
    }
    return type("MadeKit", (DerivedKit,), members)()


class DerivedKit(LmmKit):
    """A kit whose class is made of a `KitFile`; it knows neither coordinates nor videos."""

    file: ClassVar[KitFile]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DerivedKit) and other.file == self.file

    def __hash__(self) -> int:
        return hash((DerivedKit, self.model_type))

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(derived_kit, place=self.model_type), (self.file,)

    def adapt(self, model: PreTrainedModel) -> PreTrainedModel:
        """Return the model with its cache off, and with this kit in its config, so that every saved copy has it."""
        setattr(model.config, CONFIG_KEY, self.file.data)
        return super().adapt(model)

    def prepare_processor(self, processor: Processor, path: str) -> None:
        """Raise UserError if the tokenizer has not the tokens of the kit."""
        check_tokens(processor.tokenizer, self.file.media_tokens, path=path)
        if processor.tokenizer.convert_tokens_to_ids(self.file.placeholder) != self.file.placeholder_id:
            raise UserError(f"{path}: the token ids differ from those of the kit; derive one for this checkpoint")

    def template_turns(self, messages: Sequence[Message]) -> Sequence[Mapping[str, Any]]:
        return part_lists(messages) if self.file.text_as_parts else to_chat(messages)

    def image_token(self, processor: Processor) -> str:
        return self.file.image_token

    def image_mark(self, processor: Processor) -> str:
        return self.file.image_mark

    def placeholder_ids(self, processor: Processor) -> frozenset[int]:
        return frozenset(known_ids(processor.tokenizer, (self.file.image_token, self.file.placeholder)))

    def collapsed(self, processor: Processor, token_ids: Sequence[int]) -> list[int]:
        """Return ids with one image token for each image; images next to each other need an opening or a closing token."""
        file, ids = self.file, processor.tokenizer.convert_tokens_to_ids
        around = set(re.findall("|".join(map(re.escape, file.media_tokens)), file.image_mark)) - {file.image_token}
        written = {ids(token) for token in file.media_tokens if token not in around}
        mark, border = ids(file.image_token), file.opening or file.closing
        result: list[int] = []
        for is_media, tokens in groupby(token_ids, key=written.__contains__):
            run = list(tokens)
            if is_media and not self.placeholder_ids(processor).isdisjoint(run):
                count = run.count(ids(border)) if border else 1
                # Without a border they are image tokens that were not expanded.
                run = [mark] * count if count else run
            result += run
        return result

    def media_token_ids(self, config: Config, tokenizer: PreTrainedTokenizerBase) -> set[int]:
        return known_ids(tokenizer, self.media_tokens)

    def forward_inputs(
        self, config: Config, sequences: torch.Tensor, attention_mask: torch.Tensor, media: Media | None
    ) -> dict[str, torch.Tensor]:
        import torch

        positions = text_positions(attention_mask)
        if self.file.positions == "model":
            positions = self._model_positions(config, sequences, attention_mask, media or {})
        marked = {
            name: torch.isin(sequences, sequences.new_tensor(ids)).long()
            for name, ids in self.file.token_inputs.items()
        }
        return {"position_ids": positions, **marked, **(media or {})}

    def _model_positions(
        self, config: Config, sequences: torch.Tensor, attention_mask: torch.Tensor, media: Media
    ) -> torch.Tensor:
        """Return the positions (3, B, T) that the model's own method computes, which reads nothing but its config."""
        import torch

        if not media:
            return text_positions(attention_mask).expand(3, -1, -1)
        owner = positions_owner(self.model_class)
        stub = owner.__new__(owner)
        stub.__dict__["config"] = config
        types = (sequences == self.file.placeholder_id).int()
        taken = inspect.signature(owner.get_rope_index).parameters
        given = {**media, "mm_token_type_ids": types, "attention_mask": attention_mask}
        positions, _ = stub.get_rope_index(sequences, **{name: one for name, one in given.items() if name in taken})
        assert isinstance(positions, torch.Tensor)
        return positions

    def filler_media(self, config: Config) -> tuple[list[int], Media]:
        import torch

        media = {}
        for name, blank in self.file.blank_media.items():
            zeros = torch.zeros(blank.shape, dtype=getattr(torch, blank.dtype))
            media[name] = zeros if blank.integers is None else zeros.new_tensor(blank.integers).reshape(blank.shape)
        return [token for token, number in self.file.blank_ids for _ in range(number)], media

    def router_scores(self, config: Config) -> None:
        """Return None: how a mixture's routers score experts is not checked."""

    def language_model_of(self, model: PreTrainedModel) -> torch.nn.Module:
        return model.get_submodule(self.file.language_model)

    def tiny_config(self, spec: TinyModelSpec, tokenizer: PreTrainedTokenizerBase) -> Config:
        raise UserError(f"the derived kit of {self.model_type} builds no tiny models")


def positions_owner(model_class: type[PreTrainedModel]) -> Any:
    """Return the class, next to a model's class, with the method `get_rope_index`; None if there is none."""
    named = vars(sys.modules[model_class.__module__]).values()
    return next((value for value in named if isinstance(value, type) and "get_rope_index" in vars(value)), None)
