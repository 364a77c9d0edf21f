"""The memory of a run: what each GPU and each machine will hold, the passes that fit, and whether all of it does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lmm_r1.planning.machine import Machine
from lmm_r1.planning.placement import Device, Phase


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
