"""What becomes of planned passes: workers find the media of their groups, gradients of a step add up under DeepSpeed."""

import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
import torch
from helpers.media_steps import Engine, Step, Worker, counted_bytes, mark_of, start_cluster, stored_objects
from helpers.rl_steps import group
from ray import cloudpickle

from lmm_r1.data.sample import MediaRef, PlacedRef
from lmm_r1.generation import media_store
from lmm_r1.host.workers import WorkerGroup, reserve
from lmm_r1.rl.model_groups import Models, hand_out

pytestmark = pytest.mark.slow


GROUPS, SAMPLES = 3, 4


@pytest.fixture(scope="module")
def workers() -> Iterator[WorkerGroup]:
    """Two workers, which play the policy, the critic and the reference."""
    # Workers can't import a test module.
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    start_cluster()
    yield WorkerGroup(1, 2, Worker, pg=reserve(2), num_gpus_per_actor=0.5)
    ray.shutdown()


@pytest.fixture(scope="module")
def engine(workers: WorkerGroup) -> Any:
    return Engine.remote()


@ray.remote
class Owner:
    """What of an engine owns media."""

    def put(self, media: dict[str, torch.Tensor]) -> MediaRef:
        return media_store.put(media)


def image(value: float) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.full((2, 3), value)}


def seen(workers: WorkerGroup) -> list[list[list[int | None]]]:
    """What each worker has seen since this was called last, pass by pass."""
    return ray.get(workers.start(Worker.__ray_metadata__.modified_class.take_seen))


def soon(condition: Callable[[], bool]) -> bool:
    """Whether it becomes true: the store is told of what nobody holds any more, and frees it later."""
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def made_step(engine: Any, workers: WorkerGroup, *, side: int) -> tuple[Step, list[int]]:
    """A step on images of so many pixels on each side, and their marks."""
    patches = (side // 14) ** 2
    marks = ray.get(engine.prepare.remote(patches=patches, images=GROUPS))
    return Step(engine, patches=patches, groups=GROUPS, samples=SAMPLES, workers=workers), marks


def test_every_pass_of_a_step_has_the_media_of_its_groups_wherever_it_is_computed(workers):
    images = [media_store.put(image(number)) for number in range(3)]
    zero, one, two = (mark_of(image(number)) for number in range(3))
    first = [*group([1], [1, 2], media=images[0]), *group([1], [1, 2], media=images[1])]
    # A group that is divided into two passes, for each of two workers one.
    second, third = group([2], [3, 3], media=images[2])
    steps = [[[first], [[third]]], [[[second]], [group([4], [1])]]]
    (fit,) = hand_out(steps, Models(policy=workers), trains_policy=True, kl_weight=0.0)
    ray.get(fit.start())
    assert seen(workers) == [[[zero, zero, one, one], [two]], [[two], [None]]]


def test_the_drivers_bytes_do_not_grow_with_the_images_and_nothing_stays_behind(engine, workers):
    taken = []
    before = stored_objects()
    for side in (56, 560):
        step, marks = made_step(engine, workers, side=side)
        with counted_bytes() as count:
            step.run()
        taken.append((count.sent, count.received))
        # Reference and critic see every sample, and critic and policy see it again in the update.
        shown = sorted(value for passes in seen(workers) for rows in passes for value in rows)
        assert shown == sorted(4 * SAMPLES * marks)
        assert soon(lambda: stored_objects() <= before), "the media of a step go with it"
    (small_sent, small_received), (sent, received) = taken
    # One image of 560 pixels takes 7.5 MB in fp32, and 1.9 MB in bytes.
    assert abs(sent - small_sent) < 500
    assert abs(received - small_received) < 500
    assert sent + received < 200_000


@pytest.mark.usefixtures("workers")
def test_the_media_of_an_engine_that_died_are_told_as_lost():
    owner = Owner.remote()
    rows = [(PlacedRef(0, ray.get(owner.put.remote(image(1.0)))),)]
    assert media_store.fetched(rows)[0][0].tensors["pixel_values"].tolist() == [[1.0] * 3] * 2
    ray.kill(owner)

    def lost() -> bool:
        """Whether a fetch says so; until Ray knows of the death, it gives what was there."""
        try:
            media_store.fetched(rows)
        except ray.exceptions.OwnerDiedError:
            return True
        return False

    assert soon(lost)
