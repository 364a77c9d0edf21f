"""What passes of a run's models take for any number of tokens, from a few of them run without memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial

from lmm_r1.config.shared import LoraConfig
from lmm_r1.data.sample import SampleMedia
from lmm_r1.lmm_kits import Checkpoint
from lmm_r1.models.loading import LoadSettings, language_layer_list
from lmm_r1.planning.machine import GIB
from lmm_r1.planning.pass_memory import (
    SMALL,
    EmptyModel,
    ModelSize,
    PassBatch,
    Role,
    empty_model,
    padded_batch,
    text_batch,
)

# Bytes of a number, by `--ds.param_dtype`.
WIDTHS = {"bf16": 2, "fp16": 2, "fp32": 4}
# Tokens of the passes that are run, of models whose kernels are, and of others. Between the last two memory grows evenly:
# a pass's activations are more than what the largest weight's gradient takes when they are gone.
RUN = (512, 1024, 1536)
NOT_RUN = (512, 8192, 16384)
PROMPT = 256
# Layers over which passes are run for deeper models: every layer holds the same amount.
FEW, MORE = 2, 4


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """How a run builds one of its models, as far as that matters to memory."""

    path: str
    role: Role
    param_dtype: str
    packing_samples: bool
    share_prefix: bool
    max_len: int
    attn_implementation: str = "auto"
    experts_implementation: str | None = None
    freeze_visual_encoder: bool = False
    freeze_prefix: tuple[str, ...] = ()
    lora_rank: int = 0
    target_modules: tuple[str, ...] = ("all-linear",)
    use_dora: bool = False
    load_in_4bit: bool = False
    trust_remote_code: bool = False
    checkpointing: bool = False
    checkpointed_layers: int | None = None
    """Layers of the language model that recompute, if not all do."""
    reentrant: bool = False
    entropy: bool = False
    bytes_per_gradient: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class PlanImage:
    """A prompt with one image, as the run's processor encodes it."""

    token_ids: tuple[int, ...]
    media: SampleMedia = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class PassEstimate:
    """Bytes of a pass in addition to weights, accumulated gradients and optimizer state."""

    floor: float
    """Bytes of the shortest pass."""
    base: float
    per_token: float
    per_image: float
    """In addition to the image's tokens; 0 if the run has no images."""
    image_tokens: int

    def pass_bytes(self, tokens: int) -> int:
        """Return the bytes of a pass over this many tokens; with images, half of them are prompts."""
        return int(max(self.floor, self.base + self.per_token * tokens) + self.per_image * self.images(tokens))

    def between(self, other: PassEstimate, *, share: float) -> PassEstimate:
        """Return what a pass takes of which a share is as in `other`, images all of them; more than that it never takes."""
        floor, base, per_token = (
            (1 - share) * ours + share * theirs
            for ours, theirs in (
                (self.floor, other.floor),
                (self.base, other.base),
                (self.per_token, other.per_token),
            )
        )
        return replace(other, floor=floor, base=base, per_token=per_token)

    def images(self, tokens: int) -> int:
        """Return the number of images that such a pass is assumed to have."""
        return max(1, tokens // (2 * self.image_tokens)) if self.image_tokens else 0

    def tokens(self, room: int, *, step: int) -> int:
        """Return the most tokens, a multiple of `step`, whose pass takes no more than `room` bytes; 0 if none."""
        per_token = self.per_token + (self.per_image / (2 * self.image_tokens) if self.image_tokens else 0)
        tokens = int(max(0.0, room - self.base) / max(per_token, 1)) // step * step
        while tokens > 0 and self.pass_bytes(tokens) > room:
            tokens -= step
        return tokens


@dataclass(frozen=True, kw_only=True)
class ModelEstimate:
    """A model's weights and passes."""

    size: ModelSize
    passes: PassEstimate


@lru_cache(maxsize=64)
def size_of(settings: ModelSettings) -> ModelSize:
    """Return what a model's weights take."""
    return _built(settings).size


@lru_cache(maxsize=8)
def _built(settings: ModelSettings) -> EmptyModel:
    return empty_model(
        settings.path,
        settings.role,
        settings=LoadSettings(
            attn_implementation=settings.attn_implementation,
            experts_implementation=settings.experts_implementation,
            param_dtype=settings.param_dtype,
            packing_samples=settings.packing_samples,
            share_prefix=settings.share_prefix,
            freeze_visual_encoder=settings.freeze_visual_encoder,
            freeze_prefix=settings.freeze_prefix,
            lora=LoraConfig(
                rank=settings.lora_rank, target_modules=settings.target_modules, use_dora=settings.use_dora
            ),
            load_in_4bit=settings.load_in_4bit,
            max_len=settings.max_len,
            trust_remote_code=settings.trust_remote_code,
        ),
        checkpointing=settings.checkpointing,
        reentrant=settings.reentrant,
    )


@lru_cache(maxsize=64)
def estimate(settings: ModelSettings, image: PlanImage | None = None) -> ModelEstimate:
    """Return what a model and its passes take; one with many layers is run with a few of them.

    If only some layers recompute activations, a pass is assumed to hold its share of what it holds without and
    with all of them. It holds a little less: a layer is computed again when the later ones' activations are gone.
    """
    checkpoint = Checkpoint(settings.path, trust_remote_code=settings.trust_remote_code)
    if settings.checkpointed_layers is not None:
        none, every = (
            estimate(replace(settings, checkpointing=on, checkpointed_layers=None), image) for on in (False, True)
        )
        share = min(1.0, settings.checkpointed_layers / checkpoint.config.get_text_config().num_hidden_layers)
        return replace(none, passes=none.passes.between(every.passes, share=share))
    model = _built(settings)

    def text(tokens: int) -> int:
        batch = text_batch(checkpoint, prompt=PROMPT, responses=[tokens - PROMPT])
        return model.pass_bytes(batch, entropy=settings.entropy)

    lengths = RUN if model.size.parameters <= SMALL else NOT_RUN
    shortest, short, long = (_at_full_depth(model, checkpoint, run=partial(text, n)) for n in lengths)
    per_token = (long - short) / (lengths[2] - lengths[1])
    per_image, image_tokens = 0.0, 0
    if image is not None:
        image_tokens = len(image.token_ids)
        batch = _image_batch(image, response=lengths[1])
        with _few_layers(model, checkpoint, count=FEW):
            with_image = model.pass_bytes(batch, entropy=settings.entropy)
            per_image = max(0.0, with_image - text(lengths[1] + image_tokens))
    held = settings.bytes_per_gradient * model.size.trained
    passes = PassEstimate(
        floor=shortest + held,
        base=short - per_token * lengths[1] + held,
        per_token=per_token,
        per_image=per_image,
        image_tokens=image_tokens,
    )
    return ModelEstimate(size=model.size, passes=passes)


def _image_batch(image: PlanImage, *, response: int) -> PassBatch:
    # The response's ids are the prompt's last one: an ordinary token.
    return padded_batch(image.token_ids, [[image.token_ids[-1]] * response], media=image.media)


def _at_full_depth(model: EmptyModel, checkpoint: Checkpoint, *, run: Callable[[], int]) -> float:
    """Return what a run of the whole model takes, from runs with few and with more of its language layers."""
    layers = language_layer_list(model.actor.model, checkpoint.kit)
    if layers is None or len(layers) <= MORE:
        return run()
    found = []
    for count in (FEW, MORE):
        with _few_layers(model, checkpoint, count=count):
            found.append(run())
    return found[0] + (found[1] - found[0]) / (MORE - FEW) * (len(layers) - FEW)


@contextmanager
def _few_layers(model: EmptyModel, checkpoint: Checkpoint, *, count: int) -> Iterator[None]:
    """Limit a model to this many language layers inside."""
    layers = language_layer_list(model.actor.model, checkpoint.kit)
    if layers is None:
        yield
        return
    every = list(layers)
    del layers[count:]
    try:
        yield
    finally:
        layers.extend(every[len(layers) :])


# Maximum number of images that a process is assumed to see, unless the limit is reached before.
MOST_IMAGES = 10_000


def kept_bytes(settings: ModelSettings, image: PlanImage | None, *, limit_gib: float, keeps: bool) -> int:
    """Return what a process may keep of images: up to the limit, with a token's width for each token of a prompt.

    A model is assumed to cache them if some of its weights are frozen by name: only the loaded model knows which.

    Args:
        keeps: whether it keeps them whatever is frozen, as one that is not trained.
    """
    frozen = settings.freeze_visual_encoder or settings.freeze_prefix or settings.lora_rank
    if image is None or not (frozen or keeps):
        return 0
    checkpoint = Checkpoint(settings.path, trust_remote_code=settings.trust_remote_code)
    width = checkpoint.config.get_text_config().hidden_size * WIDTHS[settings.param_dtype]
    return min(int(limit_gib * GIB), MOST_IMAGES * len(image.token_ids) * width)
