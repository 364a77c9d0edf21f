"""Which of a run's processes share a GPU, and what each of them holds there while another one works."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lmm_r1.planning.estimates import ModelEstimate, PassEstimate
from lmm_r1.planning.pass_memory import Role
from lmm_r1.planning.zero_memory import TrainedStates, gathered_bytes


@dataclass(frozen=True, kw_only=True)
class PlannedModel:
    """One model's process on one GPU, or on a machine without."""

    role: Role
    estimate: ModelEstimate
    states: TrainedStates | None
    """None of a model that is not trained."""
    resident: int
    """Of its weights, where it is not trained."""
    gathered: int
    """Beside them while it runs, where weights are shards, or wait in the host's memory."""
    sleeps: bool
    """Whether all but the weights goes to the host's memory while it waits."""
    context: int
    """Of the process itself, on the device where it computes."""
    pass_tokens: int
    """Of its largest pass."""
    host: int
    """In the host's memory, beside the process itself."""
    ranks: int
    """Processes of this model on one machine."""
    gpus: int
    """GPUs that it is on, over all machines."""
    kept: int = 0
    """In the host's memory, of features of images; without a GPU it is a part of the process itself."""

    @property
    def idle(self) -> int:
        """What it holds while it waits."""
        if self.states is None:
            return self.context + self.resident
        return self.context + (self.states.sleeping if self.sleeps else self.states.steady)

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
    """While others work; the whole share where it does not sleep."""
    kv_bytes_per_token: int
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
    """Of the reference's passes while responses are generated; 0 where it waits for their end."""

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
            # What does not sleep holds its weights already.
            awake = 0 if self.engine is None else min(self.engine.share, self.engine.weights + asleep)
            # Nor does what goes on generating.
            awake = max(awake, asleep)
            gathered = gathered_bytes(policy.estimate.size) if policy.gathered else 0
            own = policy.idle + min(gathered, self.bucket)
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
