"""The memory plan of a run: models, engines and phases on each GPU and machine, and whether they fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table

from lmm_r1.tools.planning.estimates import GIB, Machine, PassEstimate
from lmm_r1.tools.planning.pass_memory import ModelSize, PlannedRole, TrainedStates


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
