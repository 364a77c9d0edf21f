"""What a kit takes and returns, and what it states about its architecture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

if TYPE_CHECKING:
    import torch
    from PIL import Image
    from transformers import PretrainedConfig, PreTrainedModel, ProcessorMixin

    from lmm_r1.data.images import Video
    from lmm_r1.lmm_kits.assembly import Assembly
    from lmm_r1.lmm_kits.features import FeaturePoint
    from lmm_r1.lmm_kits.tiny_model import TinyTokens

Media: TypeAlias = dict[str, "torch.Tensor"]
"""Media tensors of one prompt or of one batch, with the names of the arguments of the model's forward."""
Config: TypeAlias = Any
"""What `load_config` returns: a `PretrainedConfig` of the kit's `config_class`."""
Processor: TypeAlias = Any
"""What `load_processor` returns: a processor of the kit's `processor_class`, or a plain tokenizer."""
RouterScores = Literal["softmax", "sigmoid"]
"""Whether routers score all experts together or each expert by itself."""


@dataclass(frozen=True, kw_only=True)
class RawMedia:
    """Decoded images and videos of a conversation, in the order of their marks."""

    images: Sequence[Image.Image] = ()
    videos: Sequence[Video] = ()

    def encoded(self, *, token_ids: list[int], engine_token_ids: list[int], media: Media) -> EncodedPrompt:
        """Return these media as an encoded prompt with its ids and media tensors."""
        return EncodedPrompt(
            token_ids=token_ids,
            engine_token_ids=engine_token_ids,
            images=list(self.images),
            media=media,
            videos=list(self.videos),
        )


@dataclass(frozen=True, kw_only=True)
class EncodedPrompt:
    """One prompt, encoded once for its whole group of samples."""

    token_ids: list[int]
    """Ids for training: every image is expanded to its full run of placeholders."""
    engine_token_ids: list[int]
    """Ids for vLLM: with one placeholder per image or video, which vLLM expands itself."""
    images: list[Image.Image]
    """The images in the order of their placeholders, resized to their pixel bounds."""
    media: Media | None
    """Media tensors for the training forward; None for a text prompt."""
    videos: list[Video] = field(default_factory=list)
    """The videos in the order of their placeholders, as both sides cut them into patches."""
    image_scales: tuple[tuple[float, float], ...] = ()
    """For each image, the factors (x, y) that turn coordinates which the model writes into pixels of the stored image.
    Empty if the kit does not define them."""
    image_ids: tuple[str, ...] = ()
    """A name for each image, by which an engine recognises it without comparing pixels; may be empty."""

    @classmethod
    def of_text(cls, token_ids: list[int]) -> EncodedPrompt:
        """Return a prompt without images and videos."""
        return cls(token_ids=token_ids, engine_token_ids=token_ids, images=[], media=None)


class KitFacts:
    """What a kit states about its architecture; a subclass sets the attributes without a value."""

    model_type: ClassVar[str]
    """The `model_type` of the checkpoint's config, which is also the registry's key."""
    checkpoints: ClassVar[str]
    """The released checkpoints that it serves, for the table of `lmm-r1 kits`: "Qwen2.5-VL"."""
    config_class: ClassVar[type[PretrainedConfig]]
    """`load_config`, `load_model` and `load_processor` load this class and the next two."""
    model_class: ClassVar[type[PreTrainedModel]]
    processor_class: ClassVar[type[ProcessorMixin]]
    other_processors: ClassVar[tuple[type[ProcessorMixin], ...]] = ()
    """Further classes of processors that checkpoints may have."""

    takes_images: ClassVar[bool] = True
    takes_videos: ClassVar[bool] = False
    media_tokens: ClassVar[tuple[str, ...]] = ()
    """The texts of all media tokens, for kits that do not read them from the processor (`media_marks`)."""
    media_keys: ClassVar[tuple[str, ...]] = ("pixel_values",)
    """Names of the media tensors that the processor makes."""
    padded_media: ClassVar[Mapping[str, int]] = {}
    """Media tensors that differ in their second dimension between prompts, and the value with which they are padded."""
    tokenizer_adds_start: ClassVar[bool] = False
    """Whether the tokenizer adds the start token if the chat template does not write it."""
    writes_thousandths: ClassVar[bool] = False
    """Whether the releases write coordinates from 0 to 1000, whatever the size of the image."""
    spoken_tokens: ClassVar[tuple[str, ...]] = ()
    """Special tokens that the releases read and write as words, such as the marks around a box; in a text they are tokens."""
    engine_wants_times: ClassVar[bool] = False
    """Whether vLLM takes videos as pairs of frames and metadata about their times."""
    engine_architecture: ClassVar[str | None] = None
    """The name in `engine_plugin` of our own class for vLLM, if the kit always needs it."""
    video_engine_architecture: ClassVar[str | None] = None
    """The same, if only rows with videos need it."""
    engine_text_config: ClassVar[Mapping[str, Any]] = {}
    """Settings of the language model's config that vLLM needs and transformers' class does not have."""
    takes_flash_attention: ClassVar[bool] = False
    """Whether `--ds.attn_implementation auto` may choose flash attention, which supports only causal attention."""
    flash_refusal: ClassVar[str | None] = None
    """Why flash attention does not compute what the model does; None if it does."""
    vision_features: ClassVar[tuple[int, str] | None] = None
    """The only supported `vision_feature_layer` and `vision_feature_select_strategy`; None if configs have no such settings."""
    turn_end: ClassVar[str | None] = None
    """The token that ends a turn of the chat template; released tokenizers name another one as their end token."""
    takes_4bit: ClassVar[bool] = True
    """Whether `--ds.load_in_4bit` takes its models: not those whose experts are one tensor a layer."""
    engine_refusal: ClassVar[str | None] = None
    """Why vLLM cannot run this architecture, which can then be trained with SFT but not with RL; None if vLLM can."""
    engine_disagreement: ClassVar[str | None] = None
    """Why vLLM's CPU backend computes other log-probs than the model does of images; None if they agree."""

    refusals: ClassVar[Mapping[str, str]] = {}
    """Why models have no adapters ("lora"), 4-bit weights ("4bit"), value heads ("critic"), frozen towers ("freezing"),
    packed sequences ("packed") or shared prefixes ("shared_prefix"); derived kits list what no check has confirmed."""

    logit_cap: ClassVar[str | None] = None
    """What the text config calls the cap of the logits; None if models of the architecture have none."""
    bidirectional_within_window: ClassVar[bool] = False
    """Whether only layers with a sliding window let `bidirectional_token_ids` attend in both directions."""
    vision_prefixes: ClassVar[tuple[str, ...]] = ()
    """Prefixes of the names of vision tower parameters in `model.named_parameters()`."""
    projector_prefixes: ClassVar[tuple[str, ...]] = ()
    language_prefixes: ClassVar[tuple[str, ...]] = ("model.language_model.", "lm_head.")
    """Prefixes of all other parameters; LoRA adapts their linear layers except the output layer."""
    untrained_prefixes: ClassVar[tuple[str, ...]] = ()
    """Prefixes of parameters that none of our losses reaches (an audio tower, an unused pooling head)."""
    feature_points: ClassVar[tuple[FeaturePoint, ...]] = ()
    """Calls that compute features of images, in the order in which they are tried: with the projector, then the tower."""
    windowed_tower: ClassVar[str | None] = None
    """A vision tower whose patches attend within windows; an attention with "flash" in its name gets them all at once."""
    zero3_leaf_classes: ClassVar[tuple[str, ...]] = ()
    """Classes of modules whose parameters ZeRO-3 must gather together, such as a layer of experts."""
    template_leaves_turn_open: ClassVar[bool] = False
    """Whether the chat template writes the end of an answer only before a further turn."""
    image_types_input: ClassVar[str | None] = None
    """The argument of the forward that marks tokens of an image, if these attend to each other."""
    tiny_tokens: ClassVar[TinyTokens]
    """Special tokens and chat template of its tiny models."""
    tiny_tower_as_released: ClassVar[bool] = False
    """Whether tiny checkpoints name the vision tower's weights as the releases do, with a part that transformers 5 left out."""
    assembly: ClassVar[Assembly | None] = None
    """How `lmm-r1 make_vlm` makes a checkpoint of a language model and a vision tower; None if it cannot."""
