"""The memory plan of a run: models, engines and phases on each GPU and machine, and whether they fit."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from rich import box
from rich.console import Console
from rich.table import Table

from lmm_r1.generation.engine_arguments import WORKSPACE, engine_bytes, kv_bytes_per_token, share_of
from lmm_r1.tools.planning.estimates import (
    CONTEXT,
    GIB,
    PROCESS,
    SLEEPING_ENGINE,
    WIDTHS,
    Machine,
    ModelEstimate,
    ModelSettings,
    PassEstimate,
    PlanImage,
    estimate,
    kept_bytes,
    size_of,
)
from lmm_r1.tools.planning.pass_memory import (
    MASTER_BYTES,
    Role,
    TrainedStates,
    ZeroSettings,
    gathered_bytes,
    trained_states,
)


@dataclass(frozen=True, kw_only=True)
class PlannedModel:
    """One model's process on one GPU, or on a machine without."""

    role: Role
    estimate: ModelEstimate
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
        passing = self.estimate.passes.pass_bytes(self.pass_tokens if tokens is None else tokens)
        if self.states is None:
            return self.context + self.resident + self.gathered + passing
        return self.context + self.states.peak(passing)

    @property
    def passes(self) -> PassEstimate:
        return self.estimate.passes


def planned_model(
    settings: ModelSettings,
    zero: ZeroSettings,
    *,
    image: PlanImage | None,
    ranks: int,
    gpus: int,
    offload: bool = False,
    sleeps: bool = False,
    averages: bool = False,
) -> PlannedModel:
    """Return one model's process; what it takes of a pass of no tokens.

    Args:
        ranks: its processes on one machine.
        gpus: those of all machines.
        offload: whether a frozen model's weights are in host memory.
        sleeps: whether the states of a trained one wait there.
        averages: whether a moving average of its weights is there.
    """
    estimated, kept = estimate(settings, image), kept_bytes(settings, image)
    size, shared = estimated.size, zero.stage == 3
    model = PlannedModel(
        role=settings.role,
        estimate=estimated,
        gathered=gathered_bytes(size) if shared else 0,
        context=CONTEXT if zero.on_gpu else PROCESS + kept,
        ranks=ranks,
        gpus=gpus,
        kept=kept,
    )
    if settings.role not in ("policy", "critic"):
        shard = -(-size.weight_bytes // zero.ranks) if shared else size.weight_bytes
        away = shared and zero.on_gpu and offload
        return replace(model, resident=0 if away else shard, host=shard if away else 0)
    states = trained_states(size, zero)
    # Of adapters, rank 0 averages the merged weights.
    averaged = size.parameters if settings.load.lora.rank else -(-size.trained // zero.ranks)
    average = MASTER_BYTES * averaged if averages else 0
    host = states.host + (states.asleep_in_host if sleeps else 0)
    model = replace(model, states=states, estimate=estimated.holding(states.per_gradient * size.trained))
    if not zero.on_gpu:
        # There the models are in host memory.
        return replace(model, host=host, context=model.context + average)
    return replace(model, host=host + average, sleeps=sleeps)


@dataclass(frozen=True, kw_only=True)
class PlannedEngine:
    """One engine's process on one GPU, or on a machine without."""

    weights: int
    utilization: float | None
    """Its share of the GPU's memory; None without a GPU."""
    share: int
    """All that it holds while it generates."""
    asleep: int
    """While others work; the whole share if it does not sleep."""
    least: int
    """That it needs to generate one response of the longest length."""
    host: int
    ranks: int


@dataclass(frozen=True, kw_only=True)
class Phase:
    """What a device holds while one thing is done."""

    name: str
    size: int


@dataclass(frozen=True, kw_only=True)
class Device:
    """A GPU with the processes that share it, or the memory of a machine without GPUs."""

    name: str
    models: Sequence[PlannedModel]
    engine: PlannedEngine | None = None
    bucket: int = 0
    """That carries new weights to the engines."""

    def phases(self) -> list[Phase]:
        """Return what is done one after the other, and what the device holds at most in each."""
        idle, asleep = sum(model.idle for model in self.models), self.asleep
        phases = []
        if self.engine is not None:
            phases.append(Phase(name="generation", size=idle + self.engine.share))
        for role in dict.fromkeys(model.role for model in self.models):
            # On a machine without GPUs there may be several of them.
            members = [model for model in self.models if model.role == role]
            name = f"update of the {role}" if members[0].states is not None else f"passes of the {role}"
            more = sum(model.busy() - model.idle for model in members)
            phases.append(Phase(name=name, size=idle + more + asleep))
        policy = next((model for model in self.models if model.role == "policy"), None)
        if policy is not None and self.bucket:
            # An engine that does not sleep already holds its weights.
            awake = 0 if self.engine is None else min(self.engine.share, self.engine.weights + asleep)
            gathered = gathered_bytes(policy.estimate.size) if policy.gathered else 0
            own = policy.idle + min(gathered, self.bucket) + policy.estimate.size.merging_bytes
            phases.append(Phase(name="new weights", size=idle - policy.idle + own + self.bucket + awake))
        return phases

    @property
    def asleep(self) -> int:
        """What the engine holds while models work."""
        return 0 if self.engine is None else self.engine.asleep

    @property
    def peak(self) -> Phase:
        return max(self.phases(), key=lambda phase: phase.size)

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


def stored_phases(models: Sequence[PlannedModel], *, kept: int, stage: int) -> list[Phase]:
    """Return what a machine's memory holds of a run's models, the policy first, in addition to their processes.

    Args:
        kept: bytes of features of images.
    """
    parts = [Phase(name=f"{one.role}, offloaded", size=one.host * one.ranks) for one in models if one.host]
    if kept:
        parts.append(Phase(name="features of images", size=kept))
    # Rank 0 gathers the weights whole to write them; before ZeRO-3 every rank has read them.
    copies = 1 if stage == 3 else models[0].ranks
    size = models[0].estimate.size.read_bytes * copies
    return [*parts, Phase(name="weights that are read or written", size=size)]


# On CPUs vLLM keeps its linear layers' weights once more, packed for its kernels.
CPU_COPIES = 2


def planned_engine(
    settings: ModelSettings,
    machine: Machine,
    *,
    utilization: float | None,
    room: int,
    responses: int,
    ranks: int,
    process: int = 0,
    gpus: int = 1,
    sleeps: bool = False,
) -> PlannedEngine:
    """Return an engine on one of the `gpus` that it is split over, or its copies in a memory without GPUs.

    Args:
        settings: of its model, as one that is not trained.
        utilization: its share of a GPU; None takes what it needs of its room.
        room: bytes of a GPU that it may take if no flag sets its share.
        responses: that it makes at a time, at most.
        ranks: engines on one machine; in a memory without GPUs, each has `process` bytes of its own.
        sleeps: whether it gives its memory back while models work.
    """
    whole = size_of(settings).weight_bytes
    if machine.gpu_bytes is None:
        cache = int(float(os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1")) * GIB)
        share = ranks * (CPU_COPIES * whole + cache + process)
        return PlannedEngine(weights=whole, utilization=None, share=share, asleep=share, least=0, host=0, ranks=ranks)
    load, config = settings.load, settings.checkpoint.config
    assert load.max_len is not None, "a run has a longest sample"
    width, gpu_bytes = WIDTHS[load.param_dtype], machine.gpu_bytes
    weights, cached = whole // gpus, kv_bytes_per_token(config, width=width) // gpus
    least = weights + WORKSPACE + cached * load.max_len
    if utilization is None:
        needed = engine_bytes(
            config,
            weights=whole,
            width=width,
            max_len=load.max_len,
            responses=responses,
            gpu_bytes=gpu_bytes,
            gpus=gpus,
        )
        # With too little room it asks for the least, and the plan says what is missing.
        utilization = share_of(needed, room=max(room, least + gpu_bytes // 100), gpu_bytes=gpu_bytes)
    share = int(gpu_bytes * utilization)
    return PlannedEngine(
        weights=weights,
        utilization=utilization,
        share=share,
        asleep=SLEEPING_ENGINE if sleeps else share,
        least=least,
        host=weights if sleeps else 0,
        ranks=ranks,
    )


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The predicted memory of a run."""

    machine: Machine
    devices: Sequence[Device]
    host: Sequence[Phase]
    """What one machine's host memory holds; without GPUs, only what its processes take themselves."""
    pass_tokens: int | None
    """Tokens of the update's passes; None if passes are counted in samples."""
    fitting_tokens: int | None
    """Tokens of the largest pass that fits; None if it depends on values and cannot be predicted."""
    longest: int
    """Tokens of the longest sample, which must always fit."""
    engine_share: float | None = None
    """Share of a GPU's memory that the engines take; None without GPU or engine."""
    log_prob_tokens: int | None = None
    """Tokens of passes without gradients; None if they equal those of the update."""

    @property
    def host_peak(self) -> int:
        """Return the most that one machine's memory holds."""
        devices = self.devices if self.machine.gpu_bytes is None else ()
        return sum(part.size for part in self.host) + sum(device.peak.size for device in devices)

    def _missing(self) -> Iterator[tuple[int, str]]:
        """Yield how many bytes each memory lacks, and a phrase about it."""
        gpu, host = self.machine.gpu_bytes, self.machine.host_bytes
        for device in self.devices if gpu is not None else ():
            peak, engine = device.peak, device.engine
            said = f"{device.name} would hold {gib(peak.size)} ({peak.name}) of {gib(gpu or 0)}"
            yield peak.size - self.machine.usable, said
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
        table(("while", "all of it, GiB"), ((phase.name, phase.size) for phase in device.phases()))
    if plan.host:
        table(("what", "GiB"), ((part.name, part.size) for part in plan.host), "each machine's memory")
    for line in summary(plan):
        console.print(line)


def summary(plan: Plan) -> list[str]:
    """Return a plan in one to three lines: the memory peaks and the passes."""
    machine = plan.machine
    peaks = {} if machine.gpu_bytes is None else {device.name: device.peak for device in plan.devices}
    parts = [f"{name} {gib(peak.size)} of {gib(machine.gpu_bytes or 0)} ({peak.name})" for name, peak in peaks.items()]
    # Only `lmm-r1 plan` does not know it.
    host = " (give --host_memory_gib to check it)" if machine.host_bytes is None else f" of {gib(machine.host_bytes)}"
    parts.append(f"a machine's memory {gib(plan.host_peak)}{host}")
    lines = [f"memory, predicted: {'; '.join(parts)}"]
    if plan.pass_tokens is not None:
        lines.append(f"passes of the update: {plan.pass_tokens:,} tokens")
    elif plan.fitting_tokens is not None:
        lines.append(f"passes of up to {plan.fitting_tokens:,} tokens fit; the longest sample has {plan.longest:,}")
    return lines


def _rows(device: Device) -> Iterator[tuple[str, str, int]]:
    for model in device.models:
        size, states = model.estimate.size, model.states
        billions = f"{size.parameters / 1e9:.2f} B parameters"
        passing = model.passes.pass_bytes(model.pass_tokens) + model.gathered * (states is None)
        yield model.role, f"weights ({billions})", model.resident if states is None else states.weights
        if states is not None:
            kept = states.master + states.moments + states.sums
            yield model.role, "gradients, single-precision copy, AdamW's moments", kept
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
