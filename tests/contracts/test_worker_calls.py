"""What engines call on vLLM's workers, with arguments that pass vLLM's msgpack as on GPUs, where the engine is a process.

The caller's side is the trainer's channels and the rollout actor, the other side the worker's own methods.
"""

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from openrlhf.utils import distributed_util
from safetensors.torch import load_file
from vllm.v1.engine.core import EngineCore, EngineCoreProc
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from lmm_r1.generation import weight_sync, worker_extension
from lmm_r1.generation.ray_engines import KitRolloutActor
from lmm_r1.generation.weight_sync import BroadcastChannel, SharedMemoryChannel
from lmm_r1.generation.worker_extension import BucketWeights, FileWeights

CPU = torch.device("cpu")


class EngineProcess:
    """Stands for `AsyncLLM`: what is called on it reaches the worker as vLLM's engine process decodes it."""

    def __init__(self, worker: Any) -> None:
        self.worker = worker

    async def collective_rpc(
        self, method: str, timeout: float | None = None, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> list[Any]:
        # As `AsyncMPClient._call_utility_async` sends a call, and as `EngineCoreProc` reads it.
        sent = MsgpackEncoder().encode((0, 1, "collective_rpc", (method, timeout, args, kwargs)))
        _, _, name, decoded = MsgpackDecoder().decode([bytes(part) for part in sent])
        rpc = EngineCore.collective_rpc.__get__(object())
        assert name == "collective_rpc"
        called, _, arguments, keywords = EngineCoreProc._convert_msgspec_args(rpc, decoded)
        return [getattr(self.worker, called)(*arguments, **(keywords or {}))]


class ActorHandle:
    """A rollout actor as the trainer has it: each method's `remote` runs it."""

    def __init__(self, worker: Any) -> None:
        self.actor = object.__new__(KitRolloutActor)
        self.actor.llm = EngineProcess(worker)

    def __getattr__(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(remote=lambda *arguments: asyncio.run(getattr(self.actor, name)(*arguments)))


class Loading:
    """A worker that notes what its model loads."""

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.worker = BucketWeights()
        self.worker.device, self.worker.model_config = CPU, SimpleNamespace(dtype=torch.bfloat16)
        self.worker.model_runner = SimpleNamespace(model=SimpleNamespace(load_weights=self._load))

    def _load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.weights.update((name, weight.clone()) for name, weight in weights)


@pytest.fixture(params=["0", "1"], ids=["plain", "with pickle allowed"])
def serialization(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As outside of training, and as OpenRLHF sets it in a run's actors."""
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", request.param)


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer of one rank, on a machine that has a GPU for the one and the other."""
    monkeypatch.setattr(weight_sync.ray, "get", lambda answers: answers)
    monkeypatch.setattr(weight_sync.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(weight_sync.dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(weight_sync.dist, "all_gather_object", lambda handles, own: handles.__setitem__(0, own))
    monkeypatch.setattr(weight_sync, "torch_dist_barrier_and_cuda_sync", lambda: None)
    for module in (weight_sync, worker_extension):
        monkeypatch.setattr(module, "get_physical_gpu_id", lambda: "GPU-7")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: None)


@pytest.fixture
def weights(tiny_checkpoint: Callable[[str], Path]) -> dict[str, torch.Tensor]:
    """All of a checkpoint, and one that has no dimensions."""
    stored = load_file(tiny_checkpoint("qwen2_5_vl") / "model.safetensors")
    return {name: weight.bfloat16() for name, weight in stored.items()} | {"scale": torch.tensor(7.0).bfloat16()}


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def receive_bucket(weights: dict[str, torch.Tensor]) -> None:
    loading = Loading()
    on_its_way: list[torch.Tensor] = []

    class Handle(ActorHandle):
        # The engine waits until the trainer broadcasts: here it is called once the buffer is there.
        def __getattr__(self, name: str) -> SimpleNamespace:
            call = super().__getattr__(name).remote
            return SimpleNamespace(remote=lambda *arguments: waiting.append(lambda: call(*arguments)))

    waiting: list[Callable[[], None]] = []
    loading.worker._model_update_with_ray = False
    loading.worker._model_update_group = SimpleNamespace(
        broadcast=lambda buffer, src, stream: buffer.copy_(on_its_way[0])
    )
    BroadcastChannel([Handle(loading.worker)], on_its_way.append).send(weights)
    waiting[0]()
    assert same(loading.weights, weights)


def open_bucket(weights: dict[str, torch.Tensor]) -> None:
    loading = Loading()
    SharedMemoryChannel([ActorHandle(loading.worker)]).send(weights)
    assert same(loading.weights, weights)


def init_process_group(weights: dict[str, torch.Tensor]) -> None:
    joined: list[tuple[Any, ...]] = []
    worker = BucketWeights()
    worker.device = CPU
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "is_initialized", lambda: True)
        patch.setattr(torch.distributed, "get_rank", lambda: 2)
        patch.setattr(distributed_util, "stateless_init_process_group", lambda *given: joined.append(given))
        ActorHandle(worker).init_process_group.remote("10.0.0.1", 29500, 1, 5, "openrlhf", "nccl", False)
    assert joined == [("10.0.0.1", 29500, 3, 5, CPU)]


def ban_tokens(weights: dict[str, torch.Tensor]) -> None:
    # As many as a vocabulary has that is padded by 150,000 ids.
    banned = tuple(range(3, 150_003))
    worker = FileWeights()

    class Model(torch.nn.Module):
        def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return hidden_states.clone()

    model = Model()
    worker.device, worker.model_runner = CPU, SimpleNamespace(get_model=lambda: model)
    asyncio.run(EngineProcess(worker).collective_rpc("ban_tokens", args=(banned,)))
    logits = model.compute_logits(torch.zeros(2, 150_005))
    assert logits.isfinite().nonzero()[:, 1].tolist() == [0, 1, 2, 150_003, 150_004] * 2


def load_weights_from(weights: dict[str, torch.Tensor]) -> None:
    read: list[str] = []
    worker = FileWeights()
    worker.model_runner = SimpleNamespace(
        model_config=SimpleNamespace(model="name", revision=None), encoder_cache={}, model=torch.nn.Module()
    )
    worker.reload_weights = lambda *, weights_path: read.append(weights_path)
    ActorHandle(worker).load_weights_from.remote("/dev/shm/lmm-r1-weights-0")
    assert read == ["/dev/shm/lmm-r1-weights-0"]


CASES = (ban_tokens, init_process_group, load_weights_from, open_bucket, receive_bucket)


@pytest.mark.usefixtures("serialization", "trainer")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_workers_method_gets_from_an_engine_process_what_was_sent(case, weights):
    case(weights)
