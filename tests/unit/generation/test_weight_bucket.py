"""Weights that share one buffer, and the engine worker that loads them out of it."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lmm_r1.generation import weight_bucket, worker_extension
from lmm_r1.generation.weight_bucket import WeightSlot, empty_buffer, handle_of, opened, slots_of, weights_in
from lmm_r1.generation.worker_extension import BucketWeights

WEIGHTS = {
    "first": torch.arange(6, dtype=torch.bfloat16).view(2, 3),
    "scalar": torch.tensor(7.0, dtype=torch.bfloat16),
    "nothing": torch.empty(0, 4, dtype=torch.bfloat16),
    "last": torch.arange(200, dtype=torch.bfloat16).view(100, 2).t(),
}
CPU = torch.device("cpu")


def filled(slots: Iterable[WeightSlot]) -> torch.Tensor:
    buffer = empty_buffer(slots, device=CPU)
    for name, place in weights_in(buffer, slots):
        place.copy_(WEIGHTS[name])
    return buffer


def test_each_weight_begins_at_a_multiple_of_256_bytes():
    slots = slots_of(WEIGHTS)
    # 12 bytes, 2, none and 400.
    assert [(slot.name, slot.start, slot.end) for slot in slots] == [
        ("first", 0, 12),
        ("scalar", 256, 258),
        ("nothing", 512, 512),
        ("last", 512, 912),
    ]
    assert len(empty_buffer(slots, device=CPU)) == 912


def test_what_is_read_from_the_buffer_is_what_was_written():
    slots = slots_of({**WEIGHTS, "whole numbers": torch.arange(5)})
    assert slots[-1] == WeightSlot("whole numbers", "int64", (5,), 1024)
    slots = slots_of(WEIGHTS)
    read = dict(weights_in(filled(slots), slots))
    assert read.keys() == WEIGHTS.keys()
    assert all(torch.equal(read[name], weight) for name, weight in WEIGHTS.items())


def worker() -> tuple[BucketWeights, dict[str, torch.Tensor]]:
    """An engine worker, and the weights that its model loads."""
    loaded: dict[str, torch.Tensor] = {}

    def load_weights(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        loaded.update((name, weight.clone()) for name, weight in weights)

    made = BucketWeights()
    made.model_runner = SimpleNamespace(model=SimpleNamespace(load_weights=load_weights))
    made.model_config = SimpleNamespace(dtype=torch.bfloat16)
    made.device = CPU
    return made, loaded


def test_a_worker_loads_what_the_trainer_broadcasts(monkeypatch):
    made, loaded = worker()
    slots = slots_of(WEIGHTS)

    def broadcast(buffer: torch.Tensor, *, src: int, stream: Any) -> None:
        assert src == 0
        buffer.copy_(filled(slots))

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    made._model_update_with_ray, made._model_update_group = False, SimpleNamespace(broadcast=broadcast)
    made.receive_bucket(slots)
    assert all(torch.equal(loaded[name], weight) for name, weight in WEIGHTS.items())


def test_a_worker_opens_the_buffer_of_its_own_gpu(monkeypatch):
    made, loaded = worker()
    slots = slots_of(WEIGHTS)
    monkeypatch.setattr(worker_extension, "get_physical_gpu_id", lambda: "GPU-1")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    made.open_bucket(slots, {"GPU-0": b"another GPU's, which nobody reads", "GPU-1": handle_of(filled(slots))})
    assert all(torch.equal(loaded[name], weight) for name, weight in WEIGHTS.items())


def named(*arguments: Any) -> tuple[Any, ...]:
    """In the place of PyTorch's function, which needs a GPU."""
    return arguments


def test_a_buffer_on_a_gpu_is_opened_under_the_number_that_the_worker_has_for_it(monkeypatch):
    monkeypatch.setattr(weight_bucket, "rebuild_cuda_tensor", named)
    monkeypatch.setattr(weight_bucket, "reduce_tensor", lambda buffer: (named, ("a", "b", "c", "d", "e", "f", 0, "h")))
    handle = handle_of(torch.empty(1))
    # Where PyTorch has the device's number.
    assert opened(handle, device=torch.device("cuda:3")) == ("a", "b", "c", "d", "e", "f", 3, "h")


def test_weights_of_another_type_than_the_engines_are_not_taken():
    made, loaded = worker()
    weights = {"odd": torch.ones(2)}
    slots = slots_of(weights)
    with pytest.raises(AssertionError, match="computes in torch.bfloat16, and gets {'odd': torch.float32}"):
        made._load(empty_buffer(slots, device=CPU), slots)
    assert not loaded


def test_the_device_stands_at_the_place_that_a_worker_replaces():
    """PyTorch's own order of what a CUDA tensor is rebuilt of."""
    import inspect

    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    assert list(inspect.signature(rebuild_cuda_tensor).parameters)[6] == "storage_device"
