"""The memory plan of a run: what passes take of a machine's memory, models, engines and phases, and whether they fit."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from lmm_r1 import cpu
from lmm_r1.data.sample import SampleMedia
from lmm_r1.errors import UserError
from lmm_r1.models.loading import language_layer_list
from lmm_r1.tools.planning.pass_memory import (
    SMALL,
    ModelSettings,
    ModelSize,
    PlannedRole,
    TrainedStates,
    empty_model,
    ordinary_token,
    sample_of,
)

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


@dataclass(frozen=True, kw_only=True)
class PlannedModel:
    """One model's process on one GPU, or on a machine without."""

    role: PlannedRole
    size: ModelSize
    passes: PassEstimate
    ranks: int
    """Processes of this model on one machine."""
    gpus: int
    """GPUs that it is on, over all machines."""
    context: int
    """Bytes of the process itself, on the device where it computes."""
    states: TrainedStates | None = None
    """None of a model that is not trained."""
    resident: int = 0
    """Bytes of the weights of a frozen model."""
    gathered: int = 0
    """In addition while it runs, if its weights are sharded or kept in host memory."""
    sleeps: bool = False
    """Whether all but the weights goes to the host's memory while it waits."""
    pass_tokens: int = 0
    """Tokens of its largest pass."""
    host: int = 0
    """In host memory, in addition to the process itself."""
    kept: int = 0
    """In the host's memory, of features of images; without a GPU it is a part of the process itself."""

    @property
    def idle(self) -> int:
        """What it holds while it waits."""
        if self.states is None:
            return self.context + self.resident
        return self.context + (self.states.weights if self.sleeps else self.states.steady)

    def busy(self, tokens: int | None = None) -> int:
        """Return what it holds at most in its own update, or in its own pass; by default in its largest one."""
        passing = self.passes.pass_bytes(self.pass_tokens if tokens is None else tokens)
        if self.states is None:
            return self.context + self.resident + self.gathered + passing
        return self.context + self.states.peak(passing)


@dataclass(frozen=True, kw_only=True)
class PlannedEngine:
    """One engine's process on one GPU, or on a machine without."""

    weights: int
    share: int
    """All that it holds while it generates."""
    asleep: int
    """While others work; the whole share if it does not sleep."""
    ranks: int
    utilization: float | None = None
    """Its share of the GPU's memory; None without a GPU."""
    least: int = 0
    """That it needs to generate one response of the longest length."""
    host: int = 0


@dataclass(frozen=True, kw_only=True)
class Device:
    """A GPU with the processes that share it, or the memory of a machine without GPUs."""

    name: str
    models: Sequence[PlannedModel]
    engine: PlannedEngine | None = None
    bucket: int = 0
    """That carries new weights to the engines."""

    def phases(self) -> dict[str, int]:
        """Return what is done one after the other, and what the device holds at most in each."""
        idle, asleep, phases = sum(model.idle for model in self.models), self.asleep, dict[str, int]()
        if self.engine is not None:
            phases["generation"] = idle + self.engine.share
        for role in dict.fromkeys(model.role for model in self.models):
            # On a machine without GPUs there may be several of them.
            members = [model for model in self.models if model.role == role]
            name = f"update of the {role}" if members[0].states is not None else f"passes of the {role}"
            phases[name] = idle + sum(model.busy() - model.idle for model in members) + asleep
        policy = next((model for model in self.models if model.role == "policy"), None)
        if policy is not None and self.bucket:
            # An engine that does not sleep already holds its weights.
            awake = 0 if self.engine is None else min(self.engine.share, self.engine.weights + asleep)
            more = min(policy.gathered, self.bucket) + policy.size.merging_bytes
            phases["new weights"] = idle + more + self.bucket + awake
        return phases

    @property
    def asleep(self) -> int:
        """What the engine holds while models work."""
        return 0 if self.engine is None else self.engine.asleep

    @property
    def peak(self) -> tuple[str, int]:
        """The phase in which the device holds most, and how much."""
        return max(self.phases().items(), key=lambda phase: phase[1])

    def beside_engine(self, *, usable: int, sleeps: bool, tokens: int) -> int:
        """Return what is left of a device with `usable` bytes for an engine next to the models.

        Args:
            sleeps: whether it gives its memory back while models work.
            tokens: of their passes.
        """
        idle = sum(model.idle for model in self.models)
        busy = 0 if sleeps else max((model.busy(tokens) - model.idle for model in self.models), default=0)
        return usable - idle - max(busy, self.bucket)

    def room(self, model: PlannedModel, *, usable: int) -> int:
        """Return what a pass of the model's update may take of a device with `usable` bytes."""
        assert model.states is not None, "a model that is trained"
        others = sum(other.idle for other in self.models if other.role != model.role)
        alike = sum(other.role == model.role for other in self.models)
        held = model.context + model.states.steady + model.states.backward
        return (usable - others - self.asleep) // alike - held


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The predicted memory of a run."""

    machine: Machine
    devices: Sequence[Device]
    host: Mapping[str, int]
    """What one machine's host memory holds; without GPUs, only what its processes take themselves."""
    pass_tokens: int | None
    """Tokens of the update's passes; None if passes are counted in samples."""
    fitting_tokens: int
    """Tokens of the largest pass that fits."""
    longest: int
    """Tokens of the longest sample, which must always fit."""
    engine_share: float | None = None
    """Share of a GPU's memory that the engines take; None without GPU or engine."""
    wanted_tokens: int = 0
    """Tokens of the passes for which nothing has to be computed twice."""
    log_prob_tokens: int | None = None
    """Tokens of passes without gradients; None if they equal those of the update."""

    @property
    def host_peak(self) -> int:
        """Return the most that one machine's memory holds."""
        devices = self.devices if self.machine.gpu_bytes is None else ()
        return sum(self.host.values()) + sum(device.peak[1] for device in devices)

    def _missing(self) -> Iterator[tuple[int, str]]:
        """Yield how many bytes each memory lacks, and a phrase about it."""
        gpu, host = self.machine.gpu_bytes, self.machine.host_bytes
        for device in self.devices if gpu is not None else ():
            (phase, size), engine = device.peak, device.engine
            yield size - self.machine.usable, f"{device.name} would hold {gib(size)} ({phase}) of {gib(gpu or 0)}"
            if engine is not None:
                said = f"an engine has {gib(engine.share)} of {device.name}, and needs {gib(engine.least)} for its weights"
                yield engine.least - engine.share, f"{said} and one sample of {self.longest} tokens"
        if host is not None:
            yield self.host_peak - host, f"a machine's memory would hold {gib(self.host_peak)} of {gib(host)}"

    def excesses(self) -> list[str]:
        """Return a phrase about each memory that is too small; none for a run that fits."""
        return [said for missing, said in self._missing() if missing > 0]

    @property
    def shortage(self) -> int:
        """Return how many bytes are missing, over all memories."""
        return sum(max(0, missing) for missing, _ in self._missing())

    @property
    def is_roomy(self) -> bool:
        """Whether the run fits with passes of the usual size."""
        return self.shortage == 0 and self.fitting_tokens >= self.wanted_tokens


def gib(size: float) -> str:
    """Return a number of bytes for people."""
    return f"{size / GIB:.1f} GiB"


def print_plan(plan: Plan, console: Console) -> None:
    """Print what each process holds on each kind of device, the phases there, and whether they fit."""

    def table(columns: Sequence[str], rows: Iterable[tuple[str | int, ...]], title: str | None = None) -> None:
        made = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        for column in columns:
            made.add_column(column, justify="right" if column.endswith("GiB") else "left")
        for *words, size in rows:
            made.add_row(*map(str, words), f"{float(size) / GIB:.2f}")
        console.print(made)

    for device in plan.devices:
        table(("who", "what", "GiB"), _rows(device), device.name)
        table(("while", "all of it, GiB"), device.phases().items())
    if plan.host:
        table(("what", "GiB"), plan.host.items(), "each machine's memory")
    for line in summary(plan):
        console.print(line)


def summary(plan: Plan) -> list[str]:
    """Return a plan in one to three lines: the memory peaks and the passes."""
    machine = plan.machine
    peaks = {} if machine.gpu_bytes is None else {device.name: device.peak for device in plan.devices}
    parts = [f"{name} {gib(size)} of {gib(machine.gpu_bytes or 0)} ({phase})" for name, (phase, size) in peaks.items()]
    # Only `lmm-r1 plan` does not know it.
    host = " (give --host_memory_gib to check it)" if machine.host_bytes is None else f" of {gib(machine.host_bytes)}"
    parts.append(f"a machine's memory {gib(plan.host_peak)}{host}")
    lines = [f"memory, predicted: {'; '.join(parts)}"]
    if plan.pass_tokens is not None:
        lines.append(f"passes of the update: {plan.pass_tokens:,} tokens")
    else:
        lines.append(f"passes of up to {plan.fitting_tokens:,} tokens fit; the longest sample has {plan.longest:,}")
    return lines


def _rows(device: Device) -> Iterator[tuple[str, str, int]]:
    for model in device.models:
        states, weights = model.states, f"weights ({model.size.parameters / 1e9:.2f} B parameters)"
        passing = model.passes.pass_bytes(model.pass_tokens) + model.gathered * (states is None)
        yield model.role, weights, model.resident if states is None else states.weights
        if states is not None:
            yield model.role, "gradients, single-precision copy, AdamW's moments", states.asleep_in_host
            yield model.role, "gradients and gathered weights in a backward pass", states.backward
            yield model.role, "optimizer step", states.step
        yield model.role, f"activations of a pass of {model.pass_tokens:,} tokens", passing
        yield model.role, "process", model.context
        if model.host:
            yield model.role, "offloaded to the machine's memory", model.host
    if (engine := device.engine) is not None:
        yield "engine", "weights", engine.weights
        yield "engine", "all that it holds, with its cache", engine.share
        yield "engine", "while models work", engine.asleep
    if device.bucket:
        yield "policy", "new weights on their way to the engines", device.bucket
