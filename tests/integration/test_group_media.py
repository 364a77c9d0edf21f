"""A group's media stay one object from the engine to the worker that trains: by it the prompt is computed once."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from helpers.conversations import message, row

from lmm_r1.trainer.samples import KitSamplesGenerator
from lmm_r1.trainer.workers import PassMedia, media_per_row

pytestmark = [pytest.mark.integration, pytest.mark.slow]


@ray.remote
class Engine:
    """Returns groups of three samples with one media object, as the rollout actor does."""

    def get_num_unfinished_requests(self) -> int:
        return 0

    def generate_group(self, row: Any, settings: Any) -> list[dict[str, Any]]:
        media = {"pixel_values": torch.zeros(4, 2)}
        return [{"mm_train_inputs": media} for _ in range(3)]


@ray.remote
def kinds(given: dict[str, list[PassMedia]]) -> list[int]:
    """Return how many media objects a worker finds in each pass, which come as OpenRLHF sends them."""
    return [len({id(one) for one in media_per_row(item, "cpu")["media"]}) for item in given["mm_train_inputs_list"]]


@pytest.fixture
def cluster() -> Iterator[None]:
    ray.init(num_cpus=2, include_dashboard=False, logging_level="warning", log_to_driver=False)
    yield
    ray.shutdown()


def test_samples_of_a_group_share_their_media_in_the_driver_and_in_a_worker(cluster):
    generator = KitSamplesGenerator(SimpleNamespace(), [Engine.remote()], SimpleNamespace(n_samples=3))
    groups = generator.generate([row(message("user", "?")), row(message("user", "!"))], generator.settings)
    media = [[sample["mm_train_inputs"] for sample in group] for group in groups]
    assert [len({id(one) for one in group}) for group in media] == [1, 1]
    assert media[0][0] is not media[1][0]

    passes = [PassMedia(rows=media[0]), PassMedia(rows=[*media[0], *media[1]])]
    assert ray.get(kinds.remote(ray.put({"mm_train_inputs_list": passes}))) == [1, 2]
