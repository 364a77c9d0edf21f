"""What a kit is: the class through which the project asks everything that depends on an architecture."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmm_r1.data.messages import images_of, to_chat, videos_of
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits.encoding import (
    adds_special_tokens,
    any_of,
    as_bordered_text,
    as_text,
    bounded_image_size,
    channels_first,
    check_image_marks,
    check_placeholders,
    check_typed_media,
    collapse_runs,
    ids_beyond_tokenizer,
    images_refused,
    known_ids,
    load_image_processor,
    resized,
    text_positions,
    video_metadata,
)
from lmm_r1.lmm_kits.kit_facts import Config, EncodedPrompt, KitFacts, Media, Processor, RawMedia, RouterScores

if TYPE_CHECKING:
    import torch
    from PIL import Image
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from lmm_r1.data.images import Video
    from lmm_r1.data.messages import ImagePart, Message, VideoPart
    from lmm_r1.lmm_kits.tiny_model import TinyModelSpec


class LmmKit(KitFacts, ABC):
    """Everything that depends on one architecture.

    A subclass sets the attributes without a value, implements the abstract methods, and overrides what its architecture
    does differently. A kit has no state, so that it can be pickled for a Ray worker.
    """

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self)

    def __hash__(self) -> int:
        return hash(type(self))

    def load_config(self, path: str, *, trust_remote_code: bool) -> Config:
        """Load the config; raises UserError for features of the vision tower other than those of the releases."""
        config = self.config_class.from_pretrained(path, trust_remote_code=trust_remote_code)
        if self.vision_features is not None:
            given = (config.vision_feature_layer, config.vision_feature_select_strategy)
            if given != self.vision_features:
                raise UserError(
                    f"{path}: vision_feature_layer {given[0]} and vision_feature_select_strategy {given[1]} are not "
                    f"supported; the releases have {self.vision_features[0]} and {self.vision_features[1]}"
                )
        return config

    def load_model(
        self, path: str, *, dtype: torch.dtype, attn_implementation: str, trust_remote_code: bool, **kwargs: Any
    ) -> PreTrainedModel:
        """Load the model with its generation cache off; `kwargs` go to `from_pretrained`.

        Raises UserError if the checkpoint lacks some of its weights, or flash attention cannot be used.
        """
        if self.flash_refusal is not None and "flash" in attn_implementation:
            raise UserError(
                f"--ds.attn_implementation {attn_implementation}: {self.flash_refusal}; give --ds.attn_implementation sdpa"
            )
        model, report = self.model_class.from_pretrained(
            path,
            dtype=dtype,
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            **kwargs,
        )
        # A value model's checkpoint names its head, and has no output layer.
        absent = ("lm_head.",) if hasattr(model.config, "value_head_prefix") else ()
        untrained = (*self.untrained_prefixes, *absent)
        # Transformers initialises missing weights at random.
        if lacking := sorted(name for name in report["missing_keys"] if not name.startswith(untrained)):
            raise UserError(
                f"{path}: {len(lacking)} weights are not in this checkpoint, {lacking[0]} among them; copy the original "
                "model's weight files into it"
            )
        return self.adapt(model)

    def check(self, capability: str, *, flag: str) -> None:
        """Raise UserError, with the flag that asks for it, if models of the kit do not have a capability."""
        if capability in self.refusals:
            raise UserError(
                f"{flag}: {self.model_type} does not support it ({self.refusals[capability]}); leave it out"
            )

    def adapt(self, model: PreTrainedModel) -> PreTrainedModel:
        """Return a loaded or newly built model with its cache off, as training needs it.

        The text config's setting counts: a cache would also switch off the detection of packed sequences.
        """
        model.config.use_cache = False
        model.config.get_text_config().use_cache = False
        return model

    def model_class_of(self, config: Config) -> type[PreTrainedModel]:
        """Return the class that `load_model` makes of a checkpoint with this config."""
        return self.model_class

    def load_processor(self, path: str, *, trust_remote_code: bool, chat_template: str | None = None) -> Processor:
        """Load the object that turns messages into ids and media tensors.

        Args:
            chat_template: replaces the checkpoint's own.

        Raises:
            UserError: the checkpoint lacks the image processor, the tokenizer or a usable chat template.
        """
        classes = (self.processor_class, *self.other_processors)
        processor = load_image_processor(path, processor_classes=classes, chat_template=chat_template)
        self.prepare_processor(processor, path)
        return processor

    def prepare_processor(self, processor: Processor, path: str) -> None:
        """Check and change a loaded processor as the kit needs it; raises UserError if it cannot be used.

        By default, `turn_end` becomes the end token, which training and rollouts need.
        """
        tokenizer = processor.tokenizer
        if self.turn_end and self.turn_end in str(processor.chat_template) and self.turn_end in tokenizer.get_vocab():
            tokenizer.eos_token = self.turn_end

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
        """Encode a conversation with its decoded images; special tokens that its texts spell stay text.

        Raises UserError if it holds something that the processor cannot take.
        """
        processor, messages = as_text(self, processor, messages)
        return self.encode_messages(
            processor, messages, images=images, add_generation_prompt=add_generation_prompt, videos=videos
        )

    def render(self, processor: Processor, messages: Sequence[Message], *, add_generation_prompt: bool) -> list[int]:
        """Return the ids that `encode` gives the engine, with one placeholder per image or video, without reading pixels."""
        processor, messages = as_text(self, processor, messages)
        text = self.chat_text(processor, messages, add_generation_prompt=add_generation_prompt)
        return self.engine_ids(processor, text)

    def encode_bordered(
        self,
        processor: Processor,
        messages: Sequence[Message],
        *,
        images: Sequence[Image.Image],
        videos: Sequence[Video],
    ) -> tuple[list[int], int]:
        """Return the expanded ids of a conversation with a border around each text next to media in the model's turns.

        The second value is the border's id, which the tokenizer itself does not use. Next to borders, text may be split
        into other tokens.
        """
        processor, messages, border = as_bordered_text(self, processor, messages)
        encoded = self.encode_messages(processor, messages, images=images, add_generation_prompt=False, videos=videos)
        return encoded.token_ids, border

    def encode_messages(
        self,
        processor: Processor,
        messages: Sequence[Message],
        *,
        images: Sequence[Image.Image],
        add_generation_prompt: bool,
        videos: Sequence[Video] = (),
    ) -> EncodedPrompt:
        """Do what `encode` does, for messages whose texts spell no special tokens; resize media to their pixel bounds."""
        self.check_taken(RawMedia(images=images, videos=videos))
        shown = [
            resized(image, self.shown_size(processor, part, *image.size))
            for image, part in zip(images, images_of(messages), strict=True)
        ]
        bounded = [
            self.bounded_video(processor, video, part) for video, part in zip(videos, videos_of(messages), strict=True)
        ]
        text = self.chat_text(processor, messages, add_generation_prompt=add_generation_prompt)
        return self.encode_chat(processor, text, RawMedia(images=shown, videos=bounded))

    def encode_text(
        self, processor: Processor, text: str, *, images: Sequence[Image.Image], opens: bool
    ) -> EncodedPrompt:
        """Encode a text that already has the chat template's marks, one for each of its decoded images.

        The text may be a part of a conversation. Parts that are cut after end tokens have the same ids as the whole.

        Args:
            opens: whether the text begins a conversation; then a start token comes first if the kit's prompts have one.

        Raises:
            UserError: there is not one mark per image, a media token is elsewhere, the processor cannot take the images,
                or no engine runs the kit's models.
        """
        if self.engine_refusal is not None:
            raise UserError(
                f"a {self.model_type} takes conversations alone, and no text with the chat template's marks"
            )
        raw = RawMedia(images=images)
        self.check_taken(raw)
        if self.takes_images:
            mark = self.image_mark(processor)
            others = [token for token in self.media_marks(processor) if token != mark]
            check_image_marks(text, mark=mark, media_tokens=others, given=len(images))
        return self.encode_chat(processor, text, raw, opens=opens)

    def check_taken(self, raw: RawMedia) -> None:
        """Raise UserError for media that models of the kit do not take."""
        for items, kind, taken in ((raw.images, "image", self.takes_images), (raw.videos, "video", self.takes_videos)):
            if items and not taken:
                raise UserError(f"models of the kit {self.model_type} cannot take the {len(items)} {kind}(s) given")

    def bounded_video(self, processor: Processor, video: Video, part: VideoPart) -> Video:
        """Return a video resized to the pixel bounds of its part; by default unchanged, for frames of one size."""
        return video

    def chat_text(self, processor: Processor, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        """Return a conversation as the chat template writes it, with its marks of images and videos.

        Raises UserError if a text holds a media token or the template does not write one placeholder per image or video.
        """
        check_typed_media(messages, media_texts=self.media_texts(processor))
        text = self.apply_template(processor, messages, add_generation_prompt=add_generation_prompt)
        if self.takes_images:
            check_placeholders(self.images_written(processor, text), given=len(images_of(messages)), kind="images")
        if self.takes_videos:
            check_placeholders(text.count(processor.video_token), given=len(videos_of(messages)), kind="videos")
        if self.template_leaves_turn_open and not add_generation_prompt and messages[-1].role == "assistant":
            end = processor.tokenizer.eos_token
            text = text.removesuffix(end) + end
        return text

    def images_written(self, processor: Processor, text: str) -> int:
        """Return for how many images the chat template has written marks."""
        return text.count(self.image_token(processor))

    def apply_template(self, processor: Processor, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        """Return the text that the chat template makes of a conversation, without any check."""
        chat = self.template_turns(messages)
        return processor.apply_chat_template(chat, tokenize=False, add_generation_prompt=add_generation_prompt)

    def template_turns(self, messages: Sequence[Message]) -> Sequence[Mapping[str, Any]]:
        """Return the turns in the form that the chat template takes."""
        return to_chat(messages)

    def encode_chat(self, processor: Processor, text: str, raw: RawMedia, *, opens: bool = True) -> EncodedPrompt:
        """Encode a text with the chat template's marks; by default, the processor makes ids and tensors of all media.

        Raises UserError if the processor refuses them.
        """
        if not raw.images and not raw.videos:
            return EncodedPrompt.of_text(self.engine_ids(processor, text, opens=opens))
        media: dict[str, object] = {"images": list(raw.images)} if raw.images else {}
        if raw.videos:
            media["videos"] = [channels_first(video) for video in raw.videos]
            media["video_metadata"] = [video_metadata(video) for video in raw.videos]
            media["do_sample_frames"] = False
        special = self.adds_start(processor, text, opens=opens)
        try:
            batch = processor(text=[text], **media, add_special_tokens=special, return_tensors="pt")
        except ValueError as error:
            sizes = [image.size for image in raw.images]
            sizes += [(video.frames.shape[2], video.frames.shape[1]) for video in raw.videos]
            raise images_refused(sizes, error) from error
        return raw.encoded(
            token_ids=batch["input_ids"][0].tolist(),
            engine_token_ids=self.engine_ids(processor, text, opens=opens),
            media={key: batch[key] for key in self.media_keys if key in batch},
        )

    def engine_ids(self, processor: Processor, text: str, *, opens: bool = True) -> list[int]:
        """Return a rendered chat's ids for vLLM, with one placeholder per image or video; by default it has them already."""
        return self.text_ids(processor, text, opens=opens)

    def text_ids(self, processor: Processor, text: str, *, opens: bool = True) -> list[int]:
        """Return the tokenizer's ids of a text with the chat template's marks."""
        special = self.adds_start(processor, text, opens=opens)
        return self.tokenizer_of(processor)(text, add_special_tokens=special)["input_ids"]

    def adds_start(self, processor: Processor, text: str, *, opens: bool) -> bool:
        """Return whether the tokenizer must add its start token to the text."""
        return opens and self.tokenizer_adds_start and adds_special_tokens(self.tokenizer_of(processor), text=text)

    def pixel_limits(self, processor: Processor) -> tuple[int, int] | None:
        """Return the fewest and the most pixels that an image may be scaled to; None if its size cannot be chosen.

        An image's own bounds apply within these limits, both in training and in the engine.
        """
        return None

    def side_factor(self, processor: Processor) -> int:
        """Return the number of which the sides of a resized image are multiples."""
        return 1

    def tokens_of_size(self, processor: Processor, width: int, height: int) -> int:
        """Return an image's number of tokens, which only kits with `pixel_limits` need; raises ValueError for a refused size."""
        return 0

    def shown_size(
        self, processor: Processor, part: ImagePart | VideoPart, width: int, height: int
    ) -> tuple[int, int]:
        """Return the width and height to which an image is resized because of its pixel bounds."""
        if (limits := self.pixel_limits(processor)) is None:
            return width, height
        return bounded_image_size(part, width=width, height=height, limits=limits, factor=self.side_factor(processor))

    def shown_images(
        self, processor: Processor, images: Sequence[ImagePart], sizes: Sequence[tuple[int, int]]
    ) -> list[tuple[tuple[int, int], int]] | None:
        """Return the size within its bounds and the number of tokens of each image; None if its size cannot be chosen."""
        if self.pixel_limits(processor) is None:
            return None
        shown = [self.shown_size(processor, part, *size) for part, size in zip(images, sizes, strict=True)]
        return [(size, self.tokens_of_size(processor, *size)) for size in shown]

    def image_scales(
        self, processor: Processor, encoded: EncodedPrompt, *, sizes: Sequence[tuple[int, int]]
    ) -> tuple[tuple[float, float], ...]:
        """Return the factors (x, y) that turn coordinates which the releases write into pixels of each stored image.

        The result is empty if the releases were not trained to write coordinates.

        Args:
            sizes: width and height of the stored images.
        """
        return tuple((width / 1000, height / 1000) for width, height in sizes) if self.writes_thousandths else ()

    def check_size(self, processor: Processor, part: ImagePart | VideoPart, *, width: int, height: int) -> None:
        """Raise UserError for an image, or the frames of a video, of a size that `encode` refuses."""
        size = self.shown_size(processor, part, width, height)
        try:
            self.tokens_of_size(processor, *size)
        except ValueError as error:
            raise images_refused([size], error) from error

    def image_token(self, processor: Processor) -> str:
        """Return the token that the chat template writes once per image."""
        return processor.image_token

    def image_mark(self, processor: Processor) -> str:
        """Return all that the chat template writes for an image: its token, with the markers around it if there are any."""
        return self.image_token(processor)

    def media_marks(self, processor: Processor) -> Sequence[str]:
        """Return the tokens that only images and videos may have in a text."""
        return self.media_tokens

    def media_texts(self, processor: Processor) -> re.Pattern[str]:
        """Return a pattern of everything that represents an image or a video in a text."""
        return any_of(self.media_marks(processor))

    def placeholder_ids(self, processor: Processor) -> frozenset[int]:
        """Return the ids that `encode` repeats once per patch of an image or a video."""
        videos = {processor.video_token_id} if self.takes_videos else set()
        return frozenset({processor.image_token_id, *videos})

    def media_ids(self, processor: Processor) -> frozenset[int]:
        """Return the ids of all tokens that only images and videos have: placeholders, and what `media_texts` matches."""
        texts, added = self.media_texts(processor), self.tokenizer_of(processor).get_added_vocab()
        return self.placeholder_ids(processor) | {number for text, number in added.items() if texts.fullmatch(text)}

    def collapsed(self, processor: Processor, token_ids: Sequence[int]) -> list[int]:
        """Return ids with one placeholder instead of all those of an image or a video, as vLLM takes them."""
        return collapse_runs(token_ids, placeholders=self.placeholder_ids(processor))

    def media_token_ids(self, config: Config, tokenizer: PreTrainedTokenizerBase) -> set[int]:
        """Return the ids of all media tokens; a sampled one would refer to an image that does not exist."""
        return {config.image_token_id, *known_ids(tokenizer, self.media_tokens)}

    def banned_token_ids(self, config: Config, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
        """Return the ids that must never be sampled, sorted: media tokens, and ids beyond the tokenizer."""
        return tuple(sorted({*self.media_token_ids(config, tokenizer), *ids_beyond_tokenizer(config, tokenizer)}))

    def spoken_end_ids(self, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
        """Return ids that end a response by the checkpoint's generation config but belong to its text; most have none."""
        return frozenset()

    def engine_arguments(self, config: Config, *, max_images: int, max_videos: int) -> dict[str, dict[str, Any]]:
        """Return extra arguments for vLLM's engine, such as `hf_overrides`.

        Args:
            max_images, max_videos: the most that a row has; vLLM reserves memory only for so many.
        """
        limits = {"image": max_images, "video": max_videos if self.takes_videos else 0}
        arguments: dict[str, dict[str, Any]] = {"limit_mm_per_prompt": limits} if self.takes_images else {}
        overrides: dict[str, Any] = {"text_config": dict(self.engine_text_config)} if self.engine_text_config else {}
        if architecture := self.engine_architecture or (self.video_engine_architecture if max_videos else None):
            overrides["architectures"] = [architecture]
        return {**arguments, "hf_overrides": overrides} if overrides else arguments

    def engine_media(self, encoded: EncodedPrompt) -> dict[str, list[Any]]:
        """Return images, and videos as frames (N, 3, H, W), for vLLM's `multi_modal_data`; empty for a text prompt."""
        videos: list[Any] = [channels_first(video) for video in encoded.videos]
        if self.engine_wants_times:
            videos = list(zip(videos, map(video_metadata, encoded.videos), strict=True))
        given: dict[str, list[Any]] = {"image": encoded.images, "video": videos}
        return {kind: items for kind, items in given.items() if items}

    def forward_inputs(
        self, config: Config, sequences: torch.Tensor, attention_mask: torch.Tensor, media: Media | None
    ) -> dict[str, torch.Tensor]:
        """Return the arguments of the model's forward besides ids and mask for a padded batch (B, T): positions, media."""
        inputs = {"position_ids": text_positions(attention_mask), **(media or {})}
        if media is not None and self.image_types_input is not None and self.bidirectional_token_ids(config):
            inputs[self.image_types_input] = (sequences == config.image_token_id).long()
        return inputs

    def merge_media(self, media: Sequence[Media]) -> Media:
        """Join the media tensors of several prompts in row order: along their first dimension, key by key.

        Tensors whose other sides differ are padded at the ends of these, with `padded_media` or zeros.
        """
        import torch
        from torch.nn.functional import pad

        merged = {}
        for key in {key: None for item in media for key in item}:
            tensors, value = [item[key] for item in media if key in item], self.padded_media.get(key, 0)
            sides = [max(lengths) for lengths in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)]
            for place, tensor in enumerate(tensors):
                missing = [longest - length for longest, length in zip(sides, tensor.shape[1:], strict=True)]
                if any(missing):
                    ends = [number for side in reversed(missing) for number in (0, side)]
                    tensors[place] = pad(tensor, ends, value=value)
            merged[key] = torch.cat(tensors)
        return merged

    def in_one_tower_run(self, config: Config, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the forward's arguments for a batch or a packed sequence, changed so that the vision tower runs once.

        ZeRO-3's ranks wait for each other in every run of the tower, so all ranks must run it equally often.
        """
        return inputs

    def bidirectional_token_ids(self, config: Config) -> frozenset[int]:
        """Return the ids whose runs attend to each other in both directions in the language model; none for most."""
        return frozenset()

    def engine_disagrees(self, config: Config) -> bool:
        """Say whether `engine_disagreement` holds for this checkpoint."""
        return self.engine_disagreement is not None

    def filler_media(self, config: Config) -> tuple[list[int], Media] | None:
        """Return ids and media of the smallest legal image sample; None if there is no image tower."""
        return None

    def blank_image(self, config: Config, *, pixels: int) -> tuple[list[int], Media]:
        """Return ids and media of blank images with about this many pixels in all, made without a processor.

        Raises UserError for a model that takes no images.
        """
        filler = self.filler_media(config)
        if filler is None:
            raise UserError(
                f"--image_pixels {pixels}: models of the kit {self.model_type} take no images; leave it out"
            )
        ids, media = filler
        # A pixel has three channels.
        covered = max(tensor.numel() for tensor in media.values()) // 3
        count = max(1, round(pixels / covered))
        return ids * count, self.merge_media([media] * count)

    def router_scores(self, config: Config) -> RouterScores | None:
        """Return how a mixture's routers score experts; None if in neither of the two ways."""
        return "softmax"

    def backbone_of(self, model: PreTrainedModel) -> torch.nn.Module:
        """Return the module whose `last_hidden_state` is the input of the output layer or of a value head."""
        return model.model

    def language_model_of(self, model: PreTrainedModel) -> torch.nn.Module:
        """Return the module that runs the language model's layers, whose inputs are split if ranks share a sequence.

        By default it gets embeddings in which the images are merged.
        """
        return model.model.language_model

    def cut_inputs(
        self, language_model: PreTrainedModel, inputs: Mapping[str, Any], tokens: slice
    ) -> dict[str, object]:
        """Return a language model's inputs for some of a sequence's T tokens, images merged in.

        By default these are ids (1, T) or merged embeddings (1, T, H), and positions.
        """
        parts = {
            name: inputs[name][:, tokens] for name in ("input_ids", "inputs_embeds") if inputs.get(name) is not None
        }
        return {**inputs, **parts, "position_ids": inputs["position_ids"][..., tokens]}

    def build_tiny(self, spec: TinyModelSpec, tokenizer_corpus: Iterable[str], folder: str | Path) -> None:
        """Write a small random checkpoint with the real architecture, its processor and chat template to `folder`."""
        import torch

        from lmm_r1.lmm_kits.tiny_model import name_tower_as_released

        tokenizer = self.tiny_tokenizer(spec, tokenizer_corpus, folder)
        config = self.tiny_config(spec, tokenizer)
        torch.manual_seed(spec.seed)
        model = self.model_class_of(config)(config)
        self.tune_tiny(model, spec)
        ends = tokenizer.convert_tokens_to_ids(list(self.tiny_tokens.generation_ends))
        model.generation_config.eos_token_id = ends or tokenizer.eos_token_id
        model.generation_config.pad_token_id = tokenizer.pad_token_id
        model.save_pretrained(folder)
        if self.tiny_tower_as_released:
            name_tower_as_released(folder)
        self.tiny_processor(tokenizer).save_pretrained(folder)

    def tiny_tokenizer(
        self, spec: TinyModelSpec, corpus: Iterable[str], folder: str | Path
    ) -> PreTrainedTokenizerBase:
        """Return the tiny model's tokenizer; `folder` is where it may be saved and loaded again."""
        from lmm_r1.lmm_kits.tiny_model import train_named_tokenizer

        return train_named_tokenizer(self.tiny_tokens, corpus, folder, vocab_size=spec.tokens)

    @abstractmethod
    def tiny_config(self, spec: TinyModelSpec, tokenizer: PreTrainedTokenizerBase) -> Config:
        """Return the config of the tiny model."""

    def tune_tiny(self, model: PreTrainedModel, spec: TinyModelSpec) -> None:
        """Change those fresh weights with which the tiny model could not learn."""
        return None

    def tiny_parts(self) -> dict[str, object]:
        """Return the tiny processor's arguments besides tokenizer and chat template."""
        return {}

    def tiny_processor(self, tokenizer: PreTrainedTokenizerBase) -> Processor:
        return self.processor_class(tokenizer=tokenizer, chat_template=tokenizer.chat_template, **self.tiny_parts())
