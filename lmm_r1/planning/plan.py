"""The memory of a run: what each GPU and each machine will hold, the passes that fit, and whether all of it does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table

from lmm_r1.planning.machine import Machine
from lmm_r1.planning.placement import Device, Phase, PlannedModel


@dataclass(frozen=True, kw_only=True)
class GroupLimit:
    """The largest groups that one pass of the update holds; larger ones are divided, and repeat their prompt."""

    tokens: int
    """Of the pass."""
    prompt: int
    samples: int
    """Of a group, as the run has them."""
    response: int
    """The longest that all of them may have."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run is predicted to take."""

    machine: Machine
    devices: Sequence[Device]
    host: Sequence[Phase]
    """What one machine's memory holds beside GPUs; of a machine without, all that its processes take themselves."""
    pass_tokens: int | None
    """Tokens of the update's passes; None where samples are counted and not tokens."""
    fitting_tokens: int | None
    """Tokens of the largest pass that fits; None where what the model computes depends on values, and nobody can say."""
    longest: int
    """Tokens of the longest sample, which must fit in any case."""
    group: GroupLimit | None
    engine_share: float | None = None
    """Of a GPU's memory, that the engines take; None where there is no GPU, or no engine."""
    log_prob_tokens: int | None = None
    """Tokens of passes without gradients; None where they are as those of the update."""

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
    return f"{size / 2**30:.1f} GiB"


def print_plan(plan: Plan, console: Console) -> None:
    """Print what each process holds on each kind of device, what is done there, and what of all that fits."""
    for device in plan.devices:
        table = Table(title=device.name, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        for column in ("who", "what", "GiB"):
            table.add_column(column, justify="right" if column == "GiB" else "left")
        for who, what, size in _rows(device):
            table.add_row(who, what, f"{size / 2**30:.2f}")
        console.print(table)
        phases = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        phases.add_column("while")
        phases.add_column("all of it, GiB", justify="right")
        for phase in device.phases():
            phases.add_row(phase.name, f"{phase.size / 2**30:.2f}")
        console.print(phases)
    if plan.host:
        table = Table(title="each machine's memory", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("what")
        table.add_column("GiB", justify="right")
        for part in plan.host:
            table.add_row(part.name, f"{part.size / 2**30:.2f}")
        console.print(table)
    for line in summary(plan):
        console.print(line)


def summary(plan: Plan) -> list[str]:
    """Return a plan in one to three lines: what is held at most, and the passes."""
    machine = plan.machine
    parts = []
    if machine.gpu_bytes is not None:
        for device in plan.devices:
            peak = device.peak
            parts.append(f"{device.name} {gib(peak.size)} of {gib(machine.gpu_bytes)} ({peak.name})")
    host = "" if machine.host_bytes is None else f" of {gib(machine.host_bytes)}"
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
