"""A run that loses a worker goes on by itself, as often as it may; everything else ends it as before."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import ray
import torch.distributed as dist
from ray.core.generated.common_pb2 import ActorDiedErrorContext
from ray.exceptions import ActorDiedError, GetTimeoutError, NodeDiedError, RayTaskError
from vllm.v1.engine.exceptions import EngineDeadError

from lmm_r1.errors import UserError
from lmm_r1.records.run_folder import RESTARTS_FILE, RunFolder
from lmm_r1.train.restarts import Restarts, loss
from lmm_r1.train.stopping import Progress, StopRequests


def died(name: str = "KitPolicyActor", *, pid: int = 7) -> ActorDiedError:
    context = ActorDiedErrorContext(
        class_name=name,
        actor_id=bytes([pid]) * 16,
        pid=pid,
        node_ip_address="10.0.0.2",
        error_message="It was killed.",
    )
    return ActorDiedError(context)


def in_worker(cause: Exception) -> RayTaskError:
    """What `ray.get` raises for an exception of an actor's method."""
    return RayTaskError("fit", "a traceback", cause).as_instanceof_cause()


def chained(outer: Exception, inner: Exception) -> Exception:
    outer.__cause__ = inner
    return outer


class Lived:
    """The handle of an actor: `ray.get` of its answer gives nothing, or raises how it died."""

    def __init__(self, death: Exception | None = None) -> None:
        self.death = death
        self.__ray_ready__ = self

    def remote(self) -> "Lived":
        return self


@pytest.fixture
def played_ray(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ray as far as restarts use it; what they end is in the list."""
    calls: list[str] = []

    def get(refs: list[Lived]) -> None:
        for ref in refs:
            if ref.death is not None:
                raise ref.death

    def shutdown() -> None:
        calls.append("shutdown")

    monkeypatch.setattr(ray, "wait", lambda refs, timeout: (refs[:1], refs[1:]))
    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "kill", lambda worker: calls.append("kill"))
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "shutdown", shutdown)
    return calls


@pytest.fixture
def make(tmp_path: Path, played_ray: list[str]) -> Callable[[int], Restarts]:
    def made(limit: int) -> Restarts:
        stops = StopRequests()

        def saved_step() -> int:
            reached = stops.progress()
            return 0 if reached is None or reached.saved is None else reached.saved

        folder = RunFolder(path=tmp_path, name="rl", kind="rl")
        return Restarts(limit=limit, folder=folder, stops=stops, saved_step=saved_step)

    return made


class Played:
    """Sessions of a run of six steps, each with the step that it reaches and what ends it there."""

    def __init__(self, run: Restarts, *ends: tuple[int | None, Exception | None]) -> None:
        self.run, self.ends, self.sessions = run, list(ends), 0

    def __call__(self) -> None:
        step, error = self.ends[self.sessions]
        self.sessions += 1
        if step is not None:
            reached = Progress(
                name="rl",
                step=step,
                total=6,
                saved=step - 1 or None,
                checkpoints=Path("c"),
                disabled=False,
                overwrite=False,
            )
            self.run.stops.progress = lambda: reached
        self.run.watch([Lived(), Lived()])
        if error is not None:
            raise error


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (died(), "ActorDiedError: KitPolicyActor: The actor died unexpectedly before finishing this task."),
        (
            chained(RuntimeError("no answer"), in_worker(NodeDiedError("node 10.0.0.3"))),
            "NodeDiedError: node 10.0.0.3",
        ),
        (in_worker(dist.DistBackendError("NCCL error: remote process exited")), "DistBackendError: NCCL error"),
        (in_worker(EngineDeadError()), "EngineDeadError: EngineCore encountered an issue"),
        (GetTimeoutError("Get timed out: some object(s) not ready."), "GetTimeoutError"),
    ],
)
def test_the_loss_of_a_process_or_a_machine_is_one_wherever_it_is_found(error, words, played_ray):
    assert loss(error, []).startswith(words)


@pytest.mark.parametrize(
    "error",
    [
        UserError("--adam.lr: too high"),
        in_worker(UserError("step 3: loss is nan")),
        chained(UserError("the checkpoint is torn"), died()),
        RuntimeError("CUDA out of memory"),
        in_worker(ValueError("shapes")),
        # A constructor raised, as it would again.
        ActorDiedError(RayTaskError("__init__", "a traceback", ValueError("no room for the cache"))),
    ],
)
def test_what_would_come_again_is_no_loss(error, played_ray):
    assert loss(error, [Lived(), Lived()]) is None


def test_a_run_goes_on_from_its_last_saved_step_and_tells_and_keeps_each_restart(make, played_ray, tmp_path, capsys):
    run = make(2)
    sessions = Played(run, (2, died(pid=7)), (4, died(pid=8)), (6, None))
    run.run(sessions)
    assert (sessions.sessions, run.made) == (3, 2)
    assert played_ray == ["kill", "kill", "shutdown"] * 2
    said = capsys.readouterr().out.splitlines()
    lost = "ActorDiedError: KitPolicyActor: The actor died unexpectedly before finishing this task."
    assert said == [
        f"rl lost a worker after step 2 ({lost}); restart 1 of 2 from step 1",
        f"rl lost a worker after step 4 ({lost}); restart 2 of 2 from step 3",
    ]
    kept = [json.loads(line) for line in (tmp_path / RESTARTS_FILE).read_text().splitlines()]
    assert [{name: line[name] for name in ("restart", "step", "saved", "lost")} for line in kept] == [
        {"restart": 1, "step": 2, "saved": 1, "lost": lost},
        {"restart": 2, "step": 4, "saved": 3, "lost": lost},
    ]


def test_beyond_the_limit_a_loss_ends_the_run(make, played_ray):
    run = make(1)
    last = died(pid=9)
    with pytest.raises(ActorDiedError) as ended:
        run.run(Played(run, (2, died()), (3, last)))
    assert ended.value is last
    assert played_ray == ["kill", "kill", "shutdown"]


def test_the_same_loss_at_the_same_step_twice_in_a_row_ends_the_run(make, capsys):
    run = make(9)
    sessions = Played(run, (2, died(pid=7)), (2, died("KitRolloutActor")), (2, died(pid=8)), (2, died(pid=9)))
    with pytest.raises(ActorDiedError, match="pid: 9"):
        run.run(sessions)
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("rl lost the same twice in a row after step 2 (ActorDiedError: KitPolicyActor")
    assert sessions.sessions == 4


@pytest.mark.parametrize("error", [UserError("wrong"), RuntimeError("a fault"), KeyboardInterrupt()])
def test_what_is_no_loss_ends_the_run_at_once(make, error, played_ray):
    run = make(9)
    sessions = Played(run, (2, error))
    with pytest.raises(type(error)) as ended:
        run.run(sessions)
    assert ended.value is error
    assert (sessions.sessions, played_ray) == (1, [])
