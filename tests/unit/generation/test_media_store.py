"""References become tensors in the process of a model: each object fetched once, for the rows that hold it."""

from typing import Any

import pytest
import ray
import torch

from lmm_r1.data.sample import MediaRef, PlacedRef, placed
from lmm_r1.generation import media_store


class Handle(str):
    """Plays Ray's reference."""

    def hex(self) -> str:
        return f"key of {self}"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[Handle]]:
    """What is fetched, call by call, from a store that a dict plays."""
    objects: dict[Handle, Any] = {}
    calls: list[list[Handle]] = []

    def put(value: object) -> Handle:
        handle = Handle(len(objects))
        objects[handle] = value
        return handle

    def get(handles: list[Handle]) -> list[Any]:
        calls.append(handles)
        return [objects[handle] for handle in handles]

    monkeypatch.setattr(ray, "put", put)
    monkeypatch.setattr(ray, "get", get)
    return calls


def put(value: float) -> MediaRef:
    return media_store.put({"pixels": torch.full((2, 3), value), "grid": torch.tensor([[1, 2]])})


def test_a_reference_says_what_the_driver_needs(asked):
    one, other = put(1.0), put(2.0)
    assert (one.key, one.stored) == ("key of 0", "0")
    assert other.key != one.key
    # Six values that bf16 holds, and two whole numbers.
    assert one.nbytes == 6 * 2 + 2 * 8
    assert asked == []


def test_each_object_of_a_pass_is_fetched_once_and_all_of_them_at_once(asked):
    shown, screen, other = put(1.0), put(2.0), put(3.0)
    rows = [
        (PlacedRef(0, shown),),
        None,
        (PlacedRef(0, shown), PlacedRef(7, screen)),
        (PlacedRef(0, other),),
        (PlacedRef(0, shown),),
    ]
    media = media_store.fetched(rows)
    assert asked == [["0", "1", "2"]]
    assert media[1] is None
    numbers = [[(item.start, item.tensors["pixels"][0, 0].item()) for item in placed(row)] for row in media]
    assert numbers == [[(0, 1.0)], [], [(0, 1.0), (7, 2.0)], [(0, 3.0)], [(0, 1.0)]]
    assert media[0][0].tensors is media[2][0].tensors is media[4][0].tensors
    assert [[item.key for item in placed(row)] for row in media] == [[item.key for item in row or ()] for row in rows]
