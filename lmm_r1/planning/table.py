"""A plan as people read it: a table by model and part, and in one line."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import Console
from rich.table import Table

from lmm_r1.planning.placement import Device, PlannedModel
from lmm_r1.planning.plan import Plan, gib


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
