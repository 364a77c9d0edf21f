"""How weights are put into buckets, and in which order trainer and engines are called for them."""

import queue
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ray.util import collective
from torch.nn import Parameter

from lmm_r1 import dotted
from lmm_r1.config import PPOConfig
from lmm_r1.generation import weight_sync
from lmm_r1.generation.weight_bucket import weights_in
from lmm_r1.generation.weight_sync import BroadcastChannel, SharedMemoryChannel, StoredWeights, buckets, join_engines
from lmm_r1.generation.worker_extension import BucketWeights

SENT = {"a": torch.ones(2), "b": torch.arange(3.0)}


def group(*names: str) -> StoredWeights:
    return StoredWeights(names=names, stored_name=names[0] if len(names) == 1 else None)


def test_groups_fill_a_bucket_up_to_its_limit_and_a_large_one_is_by_itself():
    groups = [group("a"), group("b"), group("c", "d"), group("e"), group("f"), group("g")]
    floats = {"a": 1, "b": 2, "c": 1, "d": 1, "e": 9, "f": 1, "g": 0}
    weights = {name: Parameter(torch.zeros(count)) for name, count in floats.items()}
    # 4 + 8 bytes, 8, 36 and 4 + 0.
    assert buckets(groups, weights, limit=12) == [groups[:2], [groups[2]], [groups[3]], groups[4:]]
    assert buckets(groups, weights, limit=10**9) == [groups]
    assert buckets([], weights, limit=12) == []


def test_weights_are_written_to_memory_where_they_fit_and_else_among_the_temporary_files(tmp_path, monkeypatch):
    (tmp_path / "shm").mkdir()
    monkeypatch.setattr(weight_sync, "MEMORY", tmp_path / "shm")
    monkeypatch.setattr(weight_sync.shutil, "disk_usage", lambda path: SimpleNamespace(free=64 * 2**20))
    folders = [Path(weight_sync._folder_for(mebibytes * 2**20)) for mebibytes in (60, 64)]
    monkeypatch.setattr(weight_sync, "MEMORY", tmp_path / "no shm")
    folders.append(Path(weight_sync._folder_for(1)))
    assert [folder.parent for folder in folders] == [tmp_path / "shm", *[Path(tempfile.gettempdir())] * 2]
    for folder in folders:
        folder.rmdir()


class Calls:
    """Notes what is called, in order; two engines and everything of Ray, PyTorch and CUDA around them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, rank: int) -> None:
        self.made: list[Any] = []
        self.engines = [self._engine("first"), self._engine("second")]
        monkeypatch.setattr(weight_sync.ray, "get", lambda refs: self.made.append(("get", list(refs))))
        monkeypatch.setattr(weight_sync.dist, "get_rank", lambda: rank)
        monkeypatch.setattr(weight_sync.dist, "get_world_size", lambda: 2)
        monkeypatch.setattr(weight_sync.dist, "all_gather_object", self._gather)
        monkeypatch.setattr(weight_sync, "get_physical_gpu_id", lambda: f"GPU-{rank}")
        monkeypatch.setattr(weight_sync, "handle_of", lambda buffer: ("handle", buffer))
        monkeypatch.setattr(weight_sync, "torch_dist_barrier_and_cuda_sync", lambda: self.made.append("barrier"))

    def _engine(self, name: str) -> SimpleNamespace:
        def remote(method: str) -> SimpleNamespace:
            def call(*arguments: Any) -> str:
                self.made.append((name, method, *arguments))
                return name

            return SimpleNamespace(remote=call)

        return SimpleNamespace(receive_bucket=remote("receive_bucket"), open_bucket=remote("open_bucket"))

    def _gather(self, handles: list[Any], own: Any) -> None:
        self.made.append(("gather", own))
        handles[:] = [("GPU-0", "handle of 0"), ("GPU-1", "handle of 1")]


def test_the_engines_wait_before_rank_0_broadcasts_and_it_waits_for_them_after(monkeypatch):
    calls = Calls(monkeypatch, rank=0)
    BroadcastChannel(calls.engines, lambda buffer: calls.made.append(("broadcast", buffer))).send(SENT)
    (first, one, slots), (second, two, same), (broadcast, buffer), got = calls.made
    assert (first, second) == ("first", "second")
    assert (one, two, broadcast) == ("receive_bucket", "receive_bucket", "broadcast")
    assert got == ("get", ["first", "second"])
    assert slots == same
    assert all(torch.equal(weight, SENT[name]) for name, weight in weights_in(buffer, slots))


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_shares_its_buffer_and_keeps_it_until_the_engines_have_read_it(monkeypatch, rank):
    calls = Calls(monkeypatch, rank=rank)
    SharedMemoryChannel(calls.engines).send(SENT)
    (gather, (own, (handle, buffer))), *between, barrier = calls.made
    assert (gather, own, handle, barrier) == ("gather", f"GPU-{rank}", "handle", "barrier")
    if rank:
        assert between == [], "rank 0 calls the engines"
        return
    (first, one, slots, handles), (second, two, _, _), got = between
    assert (first, second, one, two) == ("first", "second", "open_bucket", "open_bucket")
    assert handles == {"GPU-0": "handle of 0", "GPU-1": "handle of 1"}
    assert got == ("get", ["first", "second"])
    assert all(torch.equal(weight, SENT[name]) for name, weight in weights_in(buffer, slots))


class RayCollective:
    """Plays Ray's collective groups between the threads of this process: who joins as which rank, and broadcasts of rank 0."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.joined: list[tuple[int, int, str, str]] = []
        self.calls: list[str] = []
        self.sent: queue.Queue[torch.Tensor] = queue.Queue()
        self.waiting = threading.Semaphore(0)
        self.receivers = 0
        monkeypatch.setattr(collective, "init_collective_group", self._init)
        monkeypatch.setattr(collective, "broadcast", self._broadcast)

    def _init(self, *, world_size: int, rank: int, backend: str, group_name: str) -> None:
        self.joined.append((world_size, rank, backend, group_name))

    def _broadcast(self, buffer: torch.Tensor, source: int, *, group_name: str) -> None:
        assert (source, group_name) == (0, "openrlhf")
        if threading.current_thread() is not threading.main_thread():
            self.waiting.release()
            buffer.copy_(self.sent.get(timeout=10))
            return
        # As NCCL's: it goes on when all others have come.
        assert all(self.waiting.acquire(timeout=10) for _ in range(self.receivers)), "all engines take part"
        self.calls.append("broadcast")
        for _ in range(self.receivers):
            self.sent.put(buffer.clone())


THROUGH_RAY = dotted.replace(PPOConfig(), {"vllm.tensor_parallel_size": 2, "vllm.sync_with_ray": True})


def test_weights_through_ray_reach_every_engine_bit_by_bit(monkeypatch):
    played = RayCollective(monkeypatch)
    weights = {
        "a": torch.randn(3, 5).bfloat16(),
        "b": torch.tensor(-0.0).bfloat16(),
        "c": torch.randn(4, 2).bfloat16().t(),
    }
    loaded: list[dict[str, torch.Tensor]] = []

    def engine(number: int) -> SimpleNamespace:
        worker = BucketWeights()
        worker._model_update_with_ray, worker._model_update_group = True, "openrlhf"
        worker.device, worker.model_config = torch.device("cpu"), SimpleNamespace(dtype=torch.bfloat16)
        loaded.append({})

        def load(weights: Any) -> None:
            loaded[number].update((name, value.clone()) for name, value in weights)

        worker.model_runner = SimpleNamespace(model=SimpleNamespace(load_weights=load))

        def remote(slots: Any) -> threading.Thread:
            played.calls.append(f"engine {number}")
            thread = threading.Thread(target=worker.receive_bucket, args=(slots,))
            thread.start()
            return thread

        joins = SimpleNamespace(remote=lambda *given, **settings: None)
        return SimpleNamespace(receive_bucket=SimpleNamespace(remote=remote), init_process_group=joins)

    def get(threads: list[threading.Thread]) -> None:
        played.calls.append("get")
        for thread in threads:
            thread.join(timeout=10)

    engines = [engine(number) for number in range(2)]
    played.receivers = len(engines)
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setattr("ray.get", lambda refs: refs)
    channel = BroadcastChannel(engines, join_engines(engines, THROUGH_RAY))
    monkeypatch.setattr("ray.get", get)
    channel.send(weights)
    assert played.calls == ["engine 0", "engine 1", "broadcast", "get"]
    for received in loaded:
        assert received.keys() == weights.keys()
        for name, weight in weights.items():
            assert torch.equal(received[name].view(torch.int16), weight.contiguous().view(torch.int16)), name
