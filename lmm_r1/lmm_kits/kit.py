"""What a kit is: the class through which the project asks everything that depends on an architecture."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

from lmm_r1.errors import UserError
from lmm_r1.lmm_kits.encoding import (
    any_of,
    collapse_runs,
    ids_beyond_tokenizer,
    load_image_processor,
    text_positions,
)
from lmm_r1.lmm_kits.plain_text import as_bordered_text, as_text
from lmm_r1.lmm_kits.video_frames import channels_first, video_metadata

if TYPE_CHECKING:
    import torch
    from PIL import Image
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

    from lmm_r1.data.messages import ImagePart, Message, VideoPart
    from lmm_r1.data.videos import Video
    from lmm_r1.lmm_kits.features import FeaturePoint

Media: TypeAlias = dict[str, "torch.Tensor"]
"""Media tensors of one prompt or of one batch, under the names that the model's forward takes."""
Config: TypeAlias = Any
"""What `load_config` returns: a `PretrainedConfig` of the architecture's own class, which the kit names."""
Processor: TypeAlias = Any
"""What `load_processor` returns: the architecture's processor, which the kit names, or a plain tokenizer."""
RouterScores = Literal["softmax", "sigmoid"]
"""Over all experts together, or each by itself."""


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
    image_scales: tuple[tuple[float, float], ...] = ()
    """Of each image, (x, y): what coordinates that the model writes are multiplied by to be pixels of the image as it is
    stored; empty where the kit does not say how the model writes them."""
    image_ids: tuple[str, ...] = ()
    """A name for each image, by which an engine knows it again without looking at its pixels; empty where none were given."""

    @classmethod
    def of_text(cls, token_ids: list[int]) -> EncodedPrompt:
        """Return a prompt without images and videos."""
        return cls(token_ids=token_ids, engine_token_ids=token_ids, images=[], media=None)

    @classmethod
    def of_batch(
        cls,
        batch: Mapping[str, Any],
        *,
        images: Sequence[Image.Image],
        media_keys: Sequence[str],
        placeholders: frozenset[int],
    ) -> EncodedPrompt:
        """Return the prompt that a processor made, as a batch of one, of images that it may have scaled itself.

        For vLLM each run of equal placeholders becomes one: something must stand between two images.
        """
        token_ids = batch["input_ids"][0].tolist()
        return cls(
            token_ids=token_ids,
            engine_token_ids=collapse_runs(token_ids, placeholders=placeholders),
            images=list(images),
            media={key: batch[key] for key in media_keys},
        )


@dataclass(frozen=True, kw_only=True)
class TinyModelSpec:
    """The size of a randomly initialised checkpoint."""

    hidden_size: int
    layers: int
    seed: int
    tie_embeddings: bool
    tokens: int | None = None
    """Ordinary tokens that its tokenizer learns at most; None is the kit's own number."""


class LmmKit(ABC):
    """Everything that depends on one architecture; a folder of `lmm_kits` exports an instance of its subclass as `KIT`.

    Attributes without a value and abstract methods are what every kit states; a kit overrides of the rest what it does
    otherwise. A kit holds no state, so that it pickles and can cross to a Ray worker.
    """

    model_type: ClassVar[str]
    """The `model_type` of the checkpoint's config; also the folder's name and the registry's key."""
    checkpoints: ClassVar[str]
    """The released checkpoints it serves, for the table of `lmm-r1 kits`: "Qwen2.5-VL"."""
    config_class: ClassVar[type[PretrainedConfig]]
    """This and the next two are what `load_config`, `load_model` and `load_processor` load."""
    model_class: ClassVar[type[PreTrainedModel]]
    processor_class: ClassVar[type[ProcessorMixin]]

    takes_images: ClassVar[bool] = True
    takes_videos: ClassVar[bool] = False
    writes_thousandths: ClassVar[bool] = False
    """Whether the releases write coordinates from 0 to 1000, of an image of any size."""
    spoken_tokens: ClassVar[tuple[str, ...]] = ()
    """Special tokens that the releases read and write as words, such as the marks around a box: in a text they are tokens."""
    engine_wants_times: ClassVar[bool] = False
    """Whether vLLM takes videos as pairs of frames and what is known of their times."""
    takes_flash_attention: ClassVar[bool] = False
    """Whether `--ds.attn_implementation auto` may choose flash attention, which takes causal and no masks alone."""
    engine_refusal: ClassVar[str | None] = None
    """Why vLLM cannot run this architecture, so that it trains (SFT) but takes no part in RL; None where it can."""
    engine_disagreement: ClassVar[str | None] = None
    """Why vLLM's CPU backend computes other log-probs than the model itself; None where they agree."""

    vision_prefixes: ClassVar[tuple[str, ...]] = ()
    """Prefixes of the names of vision tower parameters in `model.named_parameters()`."""
    projector_prefixes: ClassVar[tuple[str, ...]] = ()
    language_prefixes: ClassVar[tuple[str, ...]] = ("model.language_model.", "lm_head.")
    """Prefixes of the names of all other parameters; LoRA adapts the linear layers under them, but for the output layer."""
    untrained_prefixes: ClassVar[tuple[str, ...]] = ()
    """Prefixes of parameters that no loss of ours reaches (an audio tower, an unused pooling head)."""
    feature_points: ClassVar[tuple[FeaturePoint, ...]] = ()
    """Where features of images come to be, in the order in which they are tried: that with the projector before the tower's."""
    zero3_leaf_classes: ClassVar[tuple[str, ...]] = ()
    """Classes of modules whose parameters ZeRO-3 must gather together, such as a layer of experts."""

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self)

    def __hash__(self) -> int:
        return hash(type(self))

    def load_config(self, path: str, *, trust_remote_code: bool) -> Config:
        return self.config_class.from_pretrained(path)

    def load_model(
        self, path: str, *, dtype: torch.dtype, attn_implementation: str, trust_remote_code: bool, **kwargs: Any
    ) -> PreTrainedModel:
        """Load the model with its generation cache off; `kwargs` go to `from_pretrained`.

        The text config's setting is the one that counts: a cache would also switch off the detection of packed sequences.
        """
        return self.adapt(
            self.model_class.from_pretrained(path, dtype=dtype, attn_implementation=attn_implementation, **kwargs)
        )

    def adapt(self, model: PreTrainedModel) -> PreTrainedModel:
        """Return a model that was loaded, or built of its config alone, as training takes it: its cache is off."""
        model.config.use_cache = False
        model.config.get_text_config().use_cache = False
        return model

    def model_class_of(self, config: Config) -> type[PreTrainedModel]:
        """Return the class that `load_model` makes of a checkpoint with this config."""
        return self.model_class

    def load_processor(self, path: str, *, trust_remote_code: bool, chat_template: str | None = None) -> Processor:
        """Load what turns messages into ids and media tensors.

        Args:
            chat_template: takes the place of the checkpoint's own.

        Raises:
            UserError: the checkpoint lacks the image processor, the tokenizer or a usable chat template.
        """
        return load_image_processor(path, processor_class=self.processor_class, chat_template=chat_template)

    def save_processor(self, processor: Processor, folder: str | Path) -> None:
        """Write processor, tokenizer and chat template."""
        processor.save_pretrained(folder)

    def tokenizer_of(self, processor: Processor) -> PreTrainedTokenizerBase:
        return processor.tokenizer

    def encode(
        self,
        processor: Processor,
        messages: Sequence[Message],
        *,
        images: Sequence[Image.Image],
        add_generation_prompt: bool,
        videos: Sequence[Video] = (),
    ) -> EncodedPrompt:
        """Encode a conversation with its decoded images; what its texts spell of special tokens stays text.

        Raises UserError when it holds what the processor cannot take.
        """
        processor, messages = as_text(self, processor, messages)
        return self.encode_messages(
            processor, messages, images=images, add_generation_prompt=add_generation_prompt, videos=videos
        )

    def render(
        self,
        processor: Processor,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        videos: Sequence[Video] = (),
    ) -> list[int]:
        """Return the ids that `encode` gives the engine, with one placeholder per image or video, without reading any.

        Args:
            videos: the conversation's and any behind it, for kits that write their times where a placeholder stands.
        """
        processor, messages = as_text(self, processor, messages)
        return self.render_messages(processor, messages, add_generation_prompt=add_generation_prompt, videos=videos)

    def encode_bordered(
        self,
        processor: Processor,
        messages: Sequence[Message],
        *,
        images: Sequence[Image.Image],
        videos: Sequence[Video],
    ) -> tuple[list[int], int]:
        """Return the expanded ids of a conversation with a border around each text next to media in the model's turns.

        The second is the border's id, which is none of the tokenizer's. Next to borders text may have other tokens.
        """
        processor, messages, border = as_bordered_text(self, processor, messages)
        encoded = self.encode_messages(processor, messages, images=images, add_generation_prompt=False, videos=videos)
        return encoded.token_ids, border

    @abstractmethod
    def encode_messages(
        self,
        processor: Processor,
        messages: Sequence[Message],
        *,
        images: Sequence[Image.Image],
        add_generation_prompt: bool,
        videos: Sequence[Video] = (),
    ) -> EncodedPrompt:
        """Do what `encode` does, for messages whose texts spell no special tokens."""

    @abstractmethod
    def render_messages(
        self,
        processor: Processor,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        videos: Sequence[Video] = (),
    ) -> list[int]:
        """Do what `render` does, for messages whose texts spell no special tokens."""

    @abstractmethod
    def chat_text(self, processor: Processor, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        """Return a conversation as the chat template writes it, with its marks of images and videos."""

    def encode_text(
        self, processor: Processor, text: str, *, images: Sequence[Image.Image], opens: bool
    ) -> EncodedPrompt:
        """Encode a text that holds the chat template's marks already, one of them for each of its decoded images.

        What it is a piece of is not looked at: of a conversation cut at an end token, the pieces have the ids of the whole.
        Only a kit that no engine can run goes without it.

        Args:
            opens: the text begins a conversation, so that a start token stands in front where the kit's prompts have one.

        Raises:
            UserError: the marks are other than one per image, a media token stands elsewhere, or the processor cannot
                take the images.
        """
        raise UserError(f"a {self.model_type} takes conversations alone, and no text with the chat template's marks")

    def pixel_limits(self, processor: Processor) -> tuple[int, int] | None:
        """Return the fewest and the most pixels that an image may be scaled to; None where its size is not a choice.

        An image's own bounds count within them, in training and, as the image is scaled before, in the engine.
        """
        return None

    def image_scales(
        self, processor: Processor, encoded: EncodedPrompt, *, sizes: Sequence[tuple[int, int]]
    ) -> tuple[tuple[float, float], ...]:
        """Return what coordinates that the released checkpoints write are multiplied by to be pixels of each stored image.

        Args:
            sizes: width and height of the images as they are stored.

        Returns:
            (x, y) of each image; nothing where the releases were not trained to write coordinates.
        """
        if not self.writes_thousandths:
            return ()
        return tuple((width / 1000, height / 1000) for width, height in sizes)

    def check_size(self, processor: Processor, part: ImagePart | VideoPart, *, width: int, height: int) -> None:
        """Raise UserError for an image, or the frames of a video, of a size that `encode` refuses; most take every size."""
        return None

    def placeholder_ids(self, processor: Processor) -> frozenset[int]:
        """Return the ids that `encode` repeats once per image patch."""
        return frozenset({processor.image_token_id})

    def media_ids(self, processor: Processor) -> frozenset[int]:
        """Return the ids of all tokens that only images and videos have: placeholders, and what `media_texts` matches."""
        texts, added = self.media_texts(processor), self.tokenizer_of(processor).get_added_vocab()
        return self.placeholder_ids(processor) | {number for text, number in added.items() if texts.fullmatch(text)}

    def collapsed(self, processor: Processor, token_ids: Sequence[int]) -> list[int]:
        """Return ids with one placeholder in the place of all that an image or a video was expanded to, as vLLM takes them."""
        return collapse_runs(token_ids, placeholders=self.placeholder_ids(processor))

    def media_texts(self, processor: Processor) -> re.Pattern[str]:
        """Return what stands for an image or a video where a text holds it: by default the tokens of `placeholder_ids`."""
        return any_of(self.tokenizer_of(processor).convert_ids_to_tokens(sorted(self.placeholder_ids(processor))))

    @abstractmethod
    def media_token_ids(self, config: Config, tokenizer: PreTrainedTokenizerBase) -> set[int]:
        """Return the ids of all media tokens: a sampled one would stand for an image that is not there."""

    def banned_token_ids(self, config: Config, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
        """Return the ids that must never be sampled, sorted: media tokens, and ids beyond the tokenizer."""
        return tuple(sorted({*self.media_token_ids(config, tokenizer), *ids_beyond_tokenizer(config, tokenizer)}))

    def spoken_end_ids(self, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
        """Return the ids at which a checkpoint's generation config ends responses and that are words of theirs; most have none."""
        return frozenset()

    def engine_arguments(self, config: Config, *, max_images: int, max_videos: int) -> dict[str, Any]:
        """Return extra arguments for vLLM's engine, `hf_overrides` among them.

        Args:
            max_images, max_videos: the most of a row; vLLM reserves memory for no more of them.
        """
        counts = {"image": (self.takes_images, max_images), "video": (self.takes_videos, max_videos)}
        limits = {kind: most for kind, (taken, most) in counts.items() if taken}
        return {"limit_mm_per_prompt": limits} if limits else {}

    def engine_media(self, encoded: EncodedPrompt) -> dict[str, list[Any]]:
        """Return images, and videos as frames (N, 3, H, W), as vLLM takes them (`multi_modal_data`); nothing for a text prompt."""
        videos: list[Any] = [channels_first(video) for video in encoded.videos]
        if self.engine_wants_times:
            videos = list(zip(videos, map(video_metadata, encoded.videos), strict=True))
        given: dict[str, list[Any]] = {"image": encoded.images, "video": videos}
        return {kind: items for kind, items in given.items() if items}

    def forward_inputs(
        self, config: Config, sequences: torch.Tensor, attention_mask: torch.Tensor, media: Media | None
    ) -> dict[str, torch.Tensor]:
        """Return the arguments of the model's forward beside ids and mask for a padded batch (B, T): positions, media."""
        return {"position_ids": text_positions(attention_mask), **(media or {})}

    def merge_media(self, media: Sequence[Media]) -> Media:
        """Join the media tensors of several prompts in row order: along their first dimension, key by key."""
        import torch

        keys = {key: None for item in media for key in item}
        return {key: torch.cat([item[key] for item in media if key in item]) for key in keys}

    def in_one_tower_run(self, config: Config, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the forward's arguments for a batch or a packed sequence, such that the vision tower runs once.

        In a run of the tower, ZeRO-3's ranks wait for one another: those with images and videos may not run it twice.
        """
        return inputs

    def bidirectional_token_ids(self, config: Config) -> frozenset[int]:
        """Return the ids whose runs attend to each other in both directions in the language model; none for most."""
        return frozenset()

    def filler_media(self, config: Config) -> tuple[list[int], Media] | None:
        """Return ids and media of the smallest legal image sample; None where there is no image tower."""
        return None

    def blank_image(self, config: Config, *, pixels: int) -> tuple[list[int], Media]:
        """Return ids and media of a blank image, made without a processor: of as many smallest images as have its pixels.

        Raises UserError for a model that takes no images.
        """
        filler = self.filler_media(config)
        if filler is None:
            raise UserError(
                f"--image_pixels {pixels}: models of the kit {self.model_type} take no images; leave it out"
            )
        ids, media = filler
        # Of three channels each.
        covered = max(tensor.numel() for tensor in media.values()) // 3
        count = max(1, round(pixels / covered))
        return ids * count, self.merge_media([media] * count)

    def router_scores(self, config: Config) -> RouterScores | None:
        """Return how the routers of a mixture of experts score these; None where it is neither of both ways."""
        return "softmax"

    def backbone_of(self, model: PreTrainedModel) -> torch.nn.Module:
        """Return the module whose `last_hidden_state` the output layer reads, and on which a value head stands."""
        return model.model

    def windowed_tower_of(self, model: PreTrainedModel) -> PreTrainedModel | None:
        """Return the vision tower whose patches attend within windows or within images of one sequence; None without one.

        Its attention takes one with "flash" in its name for one that gets all windows at once, with their borders.
        """
        return None

    def language_model_of(self, model: PreTrainedModel) -> torch.nn.Module:
        """Return the module that runs the language model's layers, whose inputs are cut where ranks share a sequence.

        By default the one beside a vision tower, which gets embeddings with the images merged in.
        """
        return model.model.language_model

    def cut_inputs(self, language_model: PreTrainedModel, inputs: Mapping[str, Any], tokens: slice) -> dict[str, Any]:
        """Return a language model's inputs for some of a sequence's T tokens, images merged in.

        By default those that get ids (1, T) or merged embeddings (1, T, H), and positions.
        """
        parts = {
            name: inputs[name][:, tokens] for name in ("input_ids", "inputs_embeds") if inputs.get(name) is not None
        }
        return {**inputs, **parts, "position_ids": inputs["position_ids"][..., tokens]}

    @abstractmethod
    def build_tiny(self, spec: TinyModelSpec, tokenizer_corpus: Iterable[str], folder: str | Path) -> None:
        """Write a small random checkpoint with the real architecture."""
