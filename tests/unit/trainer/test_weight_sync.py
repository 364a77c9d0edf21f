"""How weights are put into buckets, and in which order trainer and engines are called for them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from lmm_r1.checkpoints.stored_weights import StoredWeights
from lmm_r1.generation.weight_bucket import weights_in
from lmm_r1.trainer import weight_sync
from lmm_r1.trainer.weight_sync import BroadcastChannel, SharedMemoryChannel, buckets

pytestmark = pytest.mark.unit

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


def test_a_weight_of_which_zero_3_left_a_part_here_counts_whole():
    weights = {name: Parameter(torch.zeros(1)) for name in "ab"}
    for weight in weights.values():
        weight.ds_numel = 3
    assert buckets([group("a"), group("b")], weights, limit=23) == [[group("a")], [group("b")]]
    assert buckets([group("a"), group("b")], weights, limit=24) == [[group("a"), group("b")]]


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
        monkeypatch.setattr(weight_sync, "reduce_tensor", lambda buffer: ("rebuild", buffer))
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


def test_other_ranks_broadcast_nothing(monkeypatch):
    calls = Calls(monkeypatch, rank=1)
    BroadcastChannel(calls.engines, lambda buffer: pytest.fail("rank 0 does")).send(SENT)
    assert calls.made == []


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_shares_its_buffer_and_keeps_it_until_the_engines_have_read_it(monkeypatch, rank):
    calls = Calls(monkeypatch, rank=rank)
    SharedMemoryChannel(calls.engines).send(SENT)
    (gather, (own, (rebuild, buffer))), *between, barrier = calls.made
    assert (gather, own, rebuild, barrier) == ("gather", f"GPU-{rank}", "rebuild", "barrier")
    if rank:
        assert between == [], "rank 0 calls the engines"
        return
    (first, one, slots, handles), (second, two, _, _), got = between
    assert (first, second, one, two) == ("first", "second", "open_bucket", "open_bucket")
    assert handles == {"GPU-0": "handle of 0", "GPU-1": "handle of 1"}
    assert got == ("get", ["first", "second"])
    assert all(torch.equal(weight, SENT[name]) for name, weight in weights_in(buffer, slots))
