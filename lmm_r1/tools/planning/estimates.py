"""The memory of a machine, and what passes of a run's models take of it, from a few passes run without memory."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path

import torch

from lmm_r1 import cpu
from lmm_r1.data.sample import SampleMedia
from lmm_r1.errors import UserError
from lmm_r1.models.loading import language_layer_list
from lmm_r1.tools.planning.pass_memory import SMALL, ModelSettings, ModelSize, empty_model, ordinary_token, sample_of

GIB = 2**30
MIB = 2**20
# A model's process on a GPU: CUDA's context, NCCL's buffers, workspaces of libraries.
CONTEXT = 900 * MIB
# An engine that sleeps on a GPU: the same, and CUDA graphs.
SLEEPING_ENGINE = 1536 * MIB
# Share of a GPU that PyTorch's allocator cannot fill.
LOST_SHARE = 0.04
# A Ray worker with its libraries: torch, vLLM, DeepSpeed.
PROCESS = 900 * MIB
# The run's own process and Ray's.
DRIVER = 1536 * MIB
_CGROUP = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One of a run's machines, which are assumed to be equal."""

    gpu_bytes: int | None
    """Memory of each GPU; None without GPUs, when models are in host memory."""
    host_bytes: int | None
    """None if it is not known, which is possible only for a machine with GPUs."""

    @property
    def usable(self) -> int:
        """Bytes of a GPU, or of host memory without GPUs, that a run's tensors can take."""
        if self.gpu_bytes is not None:
            return int(self.gpu_bytes * (1 - LOST_SHARE))
        assert self.host_bytes is not None, "models are in it"
        return self.host_bytes


def machine_of(*, gpu_gib: float | None, host_gib: float | None) -> Machine:
    """Return the machine with this much memory; None takes this machine's.

    Args:
        gpu_gib: of each GPU; 0 is a machine without GPUs. The host memory of another machine with GPUs is unknown.

    Raises:
        UserError: this machine's GPUs do not say how much they have.
    """
    if gpu_gib is None:
        gpu = smallest_gpu_bytes() if cpu.has_cuda() else None
    else:
        gpu = int(gpu_gib * GIB) or None
    if host_gib is not None:
        return Machine(gpu_bytes=gpu, host_bytes=int(host_gib * GIB))
    return Machine(gpu_bytes=gpu, host_bytes=None if gpu_gib else host_bytes())


def smallest_gpu_bytes() -> int:
    """Return the memory of this machine's smallest GPU; raises UserError if nvidia-smi does not report it."""
    # CUDA would use some of it.
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
        return min(int(line) for line in said.split()) * MIB
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise UserError(
            f"the memory of this machine's GPUs is not known, as nvidia-smi gives no answer ({error}); give "
            "--gpu_memory_gib to lmm-r1 plan"
        ) from error


def host_bytes() -> int:
    """Return the memory that processes of this machine, or of this container, may take."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for file in _CGROUP:
        with suppress(OSError):
            text = file.read_text(encoding="ascii").strip()
            limits += [int(text)] if text.isdecimal() else []
    return min(limits)


# Bytes of a number, by `--ds.param_dtype`.
WIDTHS = {"bf16": 2, "fp16": 2, "fp32": 4}
# Tokens of the passes that are run, of models whose kernels are, and of others. Between the last two memory grows evenly:
# a pass's activations are more than what the largest weight's gradient takes when they are gone.
RUN = (512, 1024, 1536)
NOT_RUN = (512, 8192, 16384)
PROMPT = 256
# Layers over which passes are run for deeper models: every layer holds the same amount.
FEW, MORE = 2, 4


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
        mixed = ("floor", "base", "per_token")
        return replace(other, **{one: (1 - share) * getattr(self, one) + share * getattr(other, one) for one in mixed})

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


@lru_cache(maxsize=64)
def size_of(settings: ModelSettings) -> ModelSize:
    """Return what a model's weights take."""
    model = _built(_alike(settings))
    return model.size_in_4bit if settings.load.load_in_4bit else model.size


def _alike(settings: ModelSettings) -> ModelSettings:
    """Return settings with the same passes, without what is counted apart from them or takes no memory."""
    load = replace(
        settings.load,
        # Passes have whole weights, and adapters freeze the vision tower anyway.
        load_in_4bit=False,
        freeze_visual_encoder=settings.load.freeze_visual_encoder and not settings.load.lora.rank,
        lora=replace(settings.load.lora, dropout=0.0),
        use_liger_kernel=True,
        image_cache_gib=0.0,
        checkpointed_layers=None,
        trained=True,
    )
    return replace(settings, load=load)


_built = lru_cache(maxsize=8)(empty_model)


def passes_of(settings: ModelSettings, image: PlanImage | None = None) -> PassEstimate:
    """Return what a model's passes take.

    If only some layers recompute activations, a pass is assumed to hold its share of what it holds without and
    with all of them. It holds a little less: a layer is computed again when the later ones' activations are gone.
    """
    alike, layers = _alike(settings), settings.load.checkpointed_layers
    if layers is None:
        return _measured(alike, image)
    none, every = (_measured(replace(alike, checkpointing=on), image) for on in (False, True))
    return none.between(every, share=min(1.0, layers / settings.checkpoint.config.get_text_config().num_hidden_layers))


@lru_cache(maxsize=64)
def _measured(settings: ModelSettings, image: PlanImage | None) -> PassEstimate:
    """Return what passes of several lengths take; a model with many layers is run with a few of them."""
    checkpoint, model = settings.checkpoint, _built(settings)
    layers = language_layer_list(model.actor.model, checkpoint.kit) or torch.nn.ModuleList()
    ordinary = ordinary_token(checkpoint)

    def text(tokens: int) -> int:
        sample = sample_of([ordinary] * PROMPT, [ordinary] * (tokens - PROMPT), media=None)
        return model.pass_bytes([sample], entropy=settings.entropy)

    lengths = RUN if model.size.parameters <= SMALL else NOT_RUN
    shortest, short, long = (_at_full_depth(layers, partial(text, n)) for n in lengths)
    per_token = (long - short) / (lengths[2] - lengths[1])
    per_image, image_tokens = 0.0, 0
    if image is not None:
        image_tokens = len(image.token_ids)
        # The response's ids are the prompt's last one: an ordinary token.
        response = [image.token_ids[-1]] * lengths[1]
        sample = sample_of(image.token_ids, response, media=image.media)
        with _limited(layers, count=FEW):
            with_image = model.pass_bytes([sample], entropy=settings.entropy)
            per_image = max(0.0, with_image - text(lengths[1] + image_tokens))
    base = short - per_token * lengths[1]
    return PassEstimate(floor=shortest, base=base, per_token=per_token, per_image=per_image, image_tokens=image_tokens)


def _at_full_depth(layers: torch.nn.ModuleList, run: Callable[[], int]) -> float:
    """Return what a run of the whole model takes, from runs with few and with more of its language layers."""
    if len(layers) <= MORE:
        return run()
    with _limited(layers, count=FEW):
        few = run()
    with _limited(layers, count=MORE):
        more = run()
    return few + (more - few) / (MORE - FEW) * (len(layers) - FEW)


@contextmanager
def _limited(layers: torch.nn.ModuleList, *, count: int) -> Iterator[None]:
    """Leave a model only this many language layers inside."""
    every = list(layers)
    del layers[count:]
    try:
        yield
    finally:
        layers.extend(every[len(layers) :])


# Maximum number of images that a process is assumed to see, unless the limit is reached before.
MOST_IMAGES = 10_000


def kept_bytes(settings: ModelSettings, image: PlanImage | None) -> int:
    """Return what a process may keep of images: up to its limit, with a token's width for each token of a prompt.

    A model that is trained is assumed to cache them if some of its weights are frozen by name: only the loaded model
    knows which.
    """
    load = settings.load
    frozen = load.freeze_visual_encoder or load.freeze_prefix or load.lora.rank or not load.trained
    if image is None or not frozen:
        return 0
    width = settings.checkpoint.config.get_text_config().hidden_size * WIDTHS[load.param_dtype]
    return min(int(load.image_cache_gib * GIB), MOST_IMAGES * len(image.token_ids) * width)
