"""The memory plan of a run: models, engines and phases on each GPU and machine, and whether they fit."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from rich import box
from rich.console import Console
from rich.table import Table

from lmm_r1.config import KDConfig, PPOConfig
from lmm_r1.config.hardware import MOST_PROMPTS
from lmm_r1.generation.engine_arguments import WORKSPACE, engine_bytes, kv_bytes_per_token, share_of
from lmm_r1.models.loading import rl_settings
from lmm_r1.planning.estimates import (
    GIB,
    PROCESS,
    SLEEPING_ENGINE,
    WIDTHS,
    Machine,
    ModelEstimate,
    ModelSettings,
    PassEstimate,
    size_of,
)
from lmm_r1.planning.pass_memory import Role, TrainedStates, gathered_bytes


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
    engine: PlannedEngine | None
    bucket: int
    """That carries new weights to the engines."""
    overlaps: bool = False
    """Whether the engine generates while the models work."""
    ahead_tokens: int = 0
    """Bytes of reference passes during generation; 0 if the reference waits for its end."""

    @property
    def ahead(self) -> int:
        """What the reference's passes take while responses are generated."""
        found = (model for model in self.models if model.role == "reference" and self.ahead_tokens)
        return sum(model.busy(self.ahead_tokens) - model.idle for model in found)

    def phases(self) -> list[Phase]:
        """Return what is done one after the other, and what the device holds at most in each."""
        idle, asleep = sum(model.idle for model in self.models), self._of_engine
        together = ", while responses are generated" if self.overlaps else ""
        phases = []
        if self.engine is not None and not (self.overlaps and self.models):
            phases.append(Phase(name="generation", size=idle + self.ahead + self.engine.share))
        for role in dict.fromkeys(model.role for model in self.models):
            # On a machine without GPUs there may be several of them.
            members = [model for model in self.models if model.role == role]
            name = f"update of the {role}" if members[0].states is not None else f"passes of the {role}"
            more = sum(model.busy() - model.idle for model in members)
            phases.append(Phase(name=name + together, size=idle + more + asleep))
        policy = next((model for model in self.models if model.role == "policy"), None)
        if policy is not None and self.bucket:
            # An engine that does not sleep already holds its weights.
            awake = 0 if self.engine is None else min(self.engine.share, self.engine.weights + asleep)
            # An engine that continues generating also does not sleep.
            awake = max(awake, asleep)
            gathered = gathered_bytes(policy.estimate.size) if policy.gathered else 0
            own = policy.idle + min(gathered, self.bucket) + policy.estimate.size.merging_bytes
            phases.append(Phase(name="new weights", size=idle - policy.idle + own + self.bucket + awake))
        return phases

    @property
    def _of_engine(self) -> int:
        """What the engine holds while models work."""
        if self.engine is None:
            return 0
        return self.engine.share if self.overlaps else self.engine.asleep

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
        return usable - idle - max(busy, self.bucket, self.ahead)

    def room(self, model: PlannedModel, *, usable: int) -> int:
        """Return what a pass of the model's update may take of a device with `usable` bytes."""
        assert model.states is not None, "a model that is trained"
        others = sum(other.idle for other in self.models if other.role != model.role)
        alike = sum(other.role == model.role for other in self.models)
        held = model.context + model.states.steady + model.states.backward
        return (usable - others - self._of_engine) // alike - held


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


def planned_engine(config: PPOConfig, machine: Machine, *, room: int | None = None) -> PlannedEngine:
    """Return an engine of an RL run, on each of its GPUs.

    Args:
        room: bytes of a GPU that it may take if no flag sets its share.
    """
    path = config.actor.model_name_or_path
    assert path is not None, "resolve_ppo requires it"
    vllm = config.vllm
    # vLLM holds the weights whole and unquantized, whatever the training does with them.
    load = replace(rl_settings(config, "reference"), load_in_4bit=False, freeze_prefix=())
    settings = ModelSettings(path=path, role="reference", load=load)
    ranks = max(1, vllm.gpus // config.actor.nodes)
    if machine.gpu_bytes is None:
        return _engine_on_cpus(settings, ranks=ranks, copies=vllm.engines, process=PROCESS)
    prompts = config.rollout.vllm_generate_batch_size or config.rollout.batch_size or MOST_PROMPTS
    return _engine_on_gpu(
        settings,
        machine.gpu_bytes,
        utilization=vllm.gpu_memory_utilization,
        room=machine.usable if room is None else room,
        responses=-(-prompts * config.rollout.n_samples_per_prompt // vllm.engines),
        gpus=vllm.tensor_parallel_size,
        sleeps=bool(vllm.enable_sleep),
        ranks=ranks,
    )


def student_engine(
    config: KDConfig, machine: Machine, *, settings: ModelSettings, ranks: int, room: int
) -> PlannedEngine:
    """Return the engine that each rank of a distillation has in its own process; it never sleeps.

    Args:
        settings: of the student, as a model that is not trained.
        ranks: on one machine.
        room: bytes of a GPU that it may take if no flag sets its share.
    """
    if machine.gpu_bytes is None:
        return _engine_on_cpus(settings, ranks=ranks, copies=ranks)
    return _engine_on_gpu(
        settings,
        machine.gpu_bytes,
        utilization=config.vllm.gpu_memory_utilization,
        room=room,
        responses=-(-config.train.batch_size // ranks),
        gpus=1,
        sleeps=False,
        ranks=ranks,
    )


def _engine_on_gpu(
    settings: ModelSettings,
    gpu_bytes: int,
    *,
    utilization: float | None,
    room: int,
    responses: int,
    gpus: int,
    sleeps: bool,
    ranks: int,
) -> PlannedEngine:
    """Return an engine on one of the `gpus` that it is split over; with no share given, it takes what it needs of its room.

    Args:
        responses: that it makes at a time, at most.
    """
    load, config = settings.load, settings.checkpoint.config
    assert load.max_len is not None, "a run has a longest sample"
    whole, width = size_of(settings).weight_bytes, WIDTHS[load.param_dtype]
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


def _engine_on_cpus(settings: ModelSettings, *, ranks: int, copies: int, process: int = 0) -> PlannedEngine:
    """Return so many copies of an engine in one memory, each with what its process takes by itself."""
    weights = size_of(settings).weight_bytes
    cache = int(float(os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1")) * GIB)
    share = copies * (CPU_COPIES * weights + cache + process)
    return PlannedEngine(weights=weights, utilization=None, share=share, asleep=share, least=0, host=0, ranks=ranks)


@dataclass(frozen=True, kw_only=True)
class GroupLimit:
    """The largest group that fits into one pass of the update; larger ones are divided and repeat their prompt."""

    samples: int
    """Samples of a group in the run."""
    response: int
    """The longest that all of them may have."""


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
    group: GroupLimit | None
    engine_share: float | None = None
    """Share of a GPU's memory that the engines take; None without GPU or engine."""
    log_prob_tokens: int | None = None
    """Tokens of passes without gradients; None if they equal those of the update."""

    @property
    def host_peak(self) -> int:
        """Return the most that one machine's memory holds."""
        waiting = sum(part.size for part in self.host)
        if self.machine.gpu_bytes is None:
            return waiting + sum(device.peak.size for device in self.devices)
        return waiting

    def excesses(self) -> list[str]:
        """Return a phrase about each memory that is too small; none for a run that fits."""
        found = []
        if self.machine.gpu_bytes is not None:
            for device in self.devices:
                peak = device.peak
                if peak.size > self.machine.usable:
                    found.append(
                        f"{device.name} would hold {gib(peak.size)} ({peak.name}) of {gib(self.machine.gpu_bytes)}"
                    )
                engine = device.engine
                if engine is not None and engine.share < engine.least:
                    found.append(
                        f"an engine has {gib(engine.share)} of {device.name}, and needs {gib(engine.least)} for its "
                        f"weights and one sample of {self.longest} tokens"
                    )
        host = self.machine.host_bytes
        if host is not None and self.host_peak > host:
            found.append(f"a machine's memory would hold {gib(self.host_peak)} of {gib(host)}")
        return found

    @property
    def shortage(self) -> int:
        """Return how many bytes are missing, over all memories."""
        host = self.machine.host_bytes
        missing = 0 if host is None else max(0, self.host_peak - host)
        if self.machine.gpu_bytes is not None:
            for device in self.devices:
                missing += max(0, device.peak.size - self.machine.usable)
                if device.engine is not None:
                    missing += max(0, device.engine.least - device.engine.share)
        return missing


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
    parts = []
    if machine.gpu_bytes is not None:
        for device in plan.devices:
            peak = device.peak
            parts.append(f"{device.name} {gib(peak.size)} of {gib(machine.gpu_bytes)} ({peak.name})")
    # Only `lmm-r1 plan` does not know it.
    host = " (give --host_memory_gib to check it)" if machine.host_bytes is None else f" of {gib(machine.host_bytes)}"
    parts.append(f"a machine's memory {gib(plan.host_peak)}{host}")
    lines = [f"memory, predicted: {'; '.join(parts)}"]
    if plan.pass_tokens is not None:
        line = f"passes of the update: {plan.pass_tokens:,} tokens"
        group = plan.group
        if group is not None and group.response > 0:
            line += f"; a group of {group.samples} x {group.response:,} tokens fits into one"
        lines.append(line)
    elif plan.fitting_tokens is not None:
        lines.append(f"passes of up to {plan.fitting_tokens:,} tokens fit; the longest sample has {plan.longest:,}")
    return lines


def _rows(device: Device) -> Iterator[tuple[str, str, int]]:
    for model in device.models:
        yield from _rows_of_model(model)
    if device.engine is not None:
        engine = device.engine
        yield "engine", "weights", engine.weights
        yield "engine", "all that it holds, with its cache", engine.share
        if engine.asleep != engine.share:
            yield "engine", "asleep", engine.asleep
    if device.bucket:
        yield "policy", "new weights on their way to the engines", device.bucket


def _rows_of_model(model: PlannedModel) -> Iterator[tuple[str, str, int]]:
    role, size = model.role, model.estimate.size
    billions = f"{size.parameters / 1e9:.2f} B parameters"
    if model.states is None:
        yield role, f"weights ({billions})", model.resident
        passing = model.gathered + model.passes.pass_bytes(model.pass_tokens)
    else:
        states = model.states
        trained = "" if size.trained == size.parameters else f", {size.trained / 1e9:.2f} B trained"
        yield role, f"weights ({billions}{trained})", states.weights
        yield role, "sums of gradients", states.sums
        yield role, "single-precision copy and AdamW's moments", states.master + states.moments
        yield role, "gradients and gathered weights in a backward pass", states.backward
        yield role, "optimizer step", states.step
        passing = model.passes.pass_bytes(model.pass_tokens)
    yield role, f"activations of a pass of {model.pass_tokens:,} tokens", passing
    yield role, "process", model.context
    if model.host:
        yield role, "offloaded to the machine's memory", model.host
