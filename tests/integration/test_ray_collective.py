"""New weights through Ray's collective groups (`--vllm.sync_with_ray`): a trainer and two engines, with gloo for NCCL."""

import sys
import time
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from ray import cloudpickle
from ray.util import collective

from lmm_r1 import dotted
from lmm_r1.config import PPOConfig
from lmm_r1.generation.weight_bucket import WeightSlot
from lmm_r1.generation.weight_sync import BroadcastChannel, join_engines
from lmm_r1.generation.worker_extension import BucketWeights

pytestmark = pytest.mark.slow


@ray.remote
class Trainer:
    """Rank 0."""

    def send(self, engines: list[Any], buckets: list[dict[str, torch.Tensor]]) -> list[float]:
        """Send the buckets one after the other; return when each was behind it."""
        join = collective.init_collective_group
        collective.init_collective_group = lambda **given: join(**{**given, "backend": "gloo"})
        config = dotted.replace(PPOConfig(), {"vllm.sync_with_ray": True})
        channel = BroadcastChannel(engines, join_engines(engines, config))
        sent = []
        for bucket in buckets:
            channel.send(bucket)
            sent.append(time.monotonic())
        return sent


@ray.remote
class Engine:
    """An engine's worker, and the weights that its model has loaded, with the time of each bucket's begin and end."""

    def __init__(self) -> None:
        self.loaded: dict[str, torch.Tensor] = {}
        self.times: list[tuple[float, float]] = []
        self.worker = BucketWeights()
        self.worker.device = torch.device("cpu")
        self.worker.model_config = SimpleNamespace(dtype=torch.bfloat16)
        self.worker.model_runner = SimpleNamespace(model=SimpleNamespace(load_weights=self._load))

    def init_process_group(
        self, address: str, port: int, rank: int, size: int, name: str, *, backend: str, use_ray: bool
    ) -> None:
        self.worker._model_update_with_ray, self.worker._model_update_group = use_ray, name
        collective.init_collective_group(size, rank, backend="gloo", group_name=name)

    def receive_bucket(self, slots: list[WeightSlot]) -> None:
        began = time.monotonic()
        self.worker.receive_bucket(slots)
        self.times.append((began, time.monotonic()))

    def state(self) -> tuple[dict[str, torch.Tensor], list[tuple[float, float]]]:
        return self.loaded, self.times

    def _load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.loaded.update((name, weight.clone()) for name, weight in weights)


@pytest.fixture
def cluster() -> Iterator[None]:
    # Workers can't import a test module.
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    ray.init(address="local", num_cpus=3, include_dashboard=False, logging_level="warning", log_to_driver=False)
    yield
    ray.shutdown()


@pytest.mark.usefixtures("cluster")
def test_engines_load_bit_by_bit_what_the_trainer_broadcasts_through_ray():
    noise = torch.Generator().manual_seed(0)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=noise).bfloat16()

    buckets = [{"embed": weight(100, 8), "scalar": weight()}, {"head": weight(8, 100).t(), "norm": weight(8)}]
    trainer, engines = Trainer.remote(), [Engine.remote() for _ in range(2)]
    sent = ray.get(trainer.send.remote(engines, buckets), timeout=240)
    for loaded, times in ray.get([engine.state.remote() for engine in engines]):
        expected = buckets[0] | buckets[1]
        assert list(loaded) == list(expected)
        assert all(
            torch.equal(loaded[name].view(torch.int16), expected[name].contiguous().view(torch.int16))
            for name in expected
        )
        # A bucket is loaded before the next one is sent.
        (first_began, first_loaded), (second_began, second_loaded) = times
        assert first_began < first_loaded < sent[0] < second_began < second_loaded < sent[1]
