"""Weights that share one buffer, and the engine worker that loads them out of it."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch

from lmm_r1.generation import weight_bucket
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


def named(*arguments: Any) -> tuple[Any, ...]:
    """In the place of PyTorch's function, which needs a GPU."""
    return arguments


def test_a_buffer_on_a_gpu_is_opened_under_the_number_that_the_worker_has_for_it(monkeypatch):
    monkeypatch.setattr(weight_bucket, "rebuild_cuda_tensor", named)
    monkeypatch.setattr(weight_bucket, "reduce_tensor", lambda buffer: (named, ("a", "b", "c", "d", "e", "f", 0, "h")))
    handle = handle_of(torch.empty(1))
    # Where PyTorch has the device's number.
    assert opened(handle, device=torch.device("cuda:3")) == ("a", "b", "c", "d", "e", "f", 3, "h")
