"""In which order engines and models start, sleep and wake on shared GPUs, by real Ray with actors that write it down."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from itertools import takewhile
from types import SimpleNamespace

import pytest
import ray
from helpers.conversations import message, row
from openrlhf.trainer.ppo_trainer import BasePPOTrainer
from openrlhf.trainer.ray.vllm_engine import RolloutRayActor

from lmm_r1 import cpu, dotted
from lmm_r1.config import PPOConfig, resolve, to_openrlhf_args
from lmm_r1.data.messages import Row
from lmm_r1.data.sample import Sample, Segment
from lmm_r1.data.training_rows import PromptStream
from lmm_r1.generation import run_engines as engines
from lmm_r1.generation.engine import SamplingSettings
from lmm_r1.generation.group import GroupSettings
from lmm_r1.trainer import run
from lmm_r1.trainer.samples import KitSamplesGenerator

pytestmark = pytest.mark.integration

GPUS = 2
# What an engine that waits for a model gives up after.
PATIENCE = 20


@ray.remote(num_cpus=0)
class Events:
    def __init__(self) -> None:
        self.names: list[str] = []

    def note(self, name: str) -> None:
        self.names.append(name)

    def all(self) -> list[str]:
        return self.names


@ray.remote
class Engine:
    """Takes a while to start, or stands only when a model has started; without upstream's class, which imports vLLM."""

    async def __init__(self, *, model: str, awaits_model: bool = False, **arguments: object) -> None:
        self.events = ray.get_actor("events")
        await self.events.note.remote("engine starts")
        began = time.monotonic()
        while awaits_model and "model" not in await self.events.all.remote():
            assert time.monotonic() - began < PATIENCE, "no model started beside the engine"
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.5)
        await self.events.note.remote("engine stands")

    async def sleep(self) -> None:
        await self.events.note.remote("engine sleeps")

    async def wake_up(self, tags: list[str] | None = None) -> None:
        await self.events.note.remote(f"engine wakes {'all' if tags is None else tags}")

    def get_num_unfinished_requests(self) -> int:
        return 0

    async def generate_group(self, row: Row, settings: object) -> SimpleNamespace:
        await self.events.note.remote("engine generates")
        segments = (Segment(kind="prompt", token_ids=(1,)), Segment(kind="generated", token_ids=(2,)))
        return SimpleNamespace(
            samples=[Sample(row=row, segments=segments, response="", finish_reason="stop", weight_version=0)] * 2
        )


@ray.remote(num_gpus=1)
class Model:
    def __init__(self, world_size: int, rank: int, address: str | None, port: int | None) -> None:
        ray.get(ray.get_actor("events").note.remote("model"))

    def broadcast_to_vllm(self) -> None:
        ray.get(ray.get_actor("events").note.remote("weights are sent"))

    def get_master_addr_port(self) -> tuple[str, int]:
        return "127.0.0.1", 1


SETTINGS = GroupSettings(
    sampling=SamplingSettings(n_samples=2, temperature=1.0, top_p=1.0, max_new_tokens=1),
    max_len=2,
    logprobs=False,
    ignore_eos=False,
    overlong_prompts="error",
    media=False,
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    # Every test reserves GPUs of its own, which stay reserved.
    ray.init(
        address="local", num_gpus=8 * GPUS, num_cpus=8 * GPUS, include_dashboard=False, logging_level=logging.WARNING
    )
    yield
    ray.shutdown()


def started(config: PPOConfig, *, then: Callable[..., None] = lambda workers: None) -> list[str]:
    """Start the workers of a run, do something with them, and return what they wrote down."""
    events = Events.options(name="events").remote()
    workers = run._start_workers(config, max_images=0, max_videos=0)
    groups = (workers.actor, workers.reference, workers.critic)
    handles = [*workers.engines, *(handle for group in groups for handle in group._actor_handlers)]
    try:
        ray.get([handle.__ray_ready__.remote() for handle in handles])
        then(workers)
        noted: list[str] = ray.get(events.all.remote())
    finally:
        for handle in (*handles, events):
            ray.kill(handle)
    # Engines start side by side: on a busy machine one may stand before the process of another has started.
    first = list(takewhile(lambda event: event in ("engine starts", "engine stands"), noted))
    return [*sorted(first, reverse=True), *noted[len(first) :]]


@pytest.fixture
def configured(tiny_checkpoint, monkeypatch, cluster) -> Callable[..., PPOConfig]:
    monkeypatch.setattr(engines, "RolloutActor", Engine)
    for name in ("PolicyWorker", "ReferenceWorker", "CriticWorker"):
        monkeypatch.setattr(run, name, Model)

    def config(*, has_cuda: bool, sleep: bool) -> PPOConfig:
        monkeypatch.setattr(cpu, "has_cuda", lambda: has_cuda)
        settings = {
            "actor.model_name_or_path": str(tiny_checkpoint("llm")),
            "data.prompt_dataset": "rows.jsonl",
            "reward.remote_url": "reward.py",
            "algo.advantage.estimator": "gae",
            "train.colocate_all": True,
            "vllm.num_engines": GPUS,
            "vllm.enable_sleep": sleep,
            **{f"{name}.num_gpus_per_node": GPUS for name in ("actor", "ref", "critic", "reward")},
        }
        return resolve(dotted.replace(PPOConfig(), settings))

    return config


@pytest.mark.parametrize("sleep", [True, False])
def test_on_shared_gpus_engines_stand_and_sleep_before_a_model_starts_and_wake_when_they_are_needed(configured, sleep):
    config = configured(has_cuda=True, sleep=sleep)
    args = to_openrlhf_args(config)

    def two_steps(workers: run._Workers) -> None:
        generator = KitSamplesGenerator(args, workers.engines, SETTINGS)
        # What upstream's trainer does between two rollouts.
        trainer = SimpleNamespace(args=args, vllm_engines=workers.engines, actor_model_group=workers.actor)
        question = row(message("user", "1+1?"))
        for _ in range(2):
            generator.rollout(PromptStream([question] * GPUS, seed=0, episodes=1), count=GPUS)
            BasePPOTrainer.broadcast_to_vllm(trainer)

    # Policy, reference and critic on each GPU.
    start = [
        *["engine starts"] * GPUS,
        *["engine stands"] * GPUS,
        *["engine sleeps"] * GPUS * sleep,
        *["model"] * 3 * GPUS,
    ]
    step = [
        *["engine wakes all"] * GPUS * sleep,
        *["engine generates"] * GPUS,
        *["engine sleeps"] * GPUS * sleep,
        *["engine wakes ['weights']"] * GPUS * sleep,
        *["weights are sent"] * GPUS,
    ]
    assert started(config, then=two_steps) == start + 2 * step


def test_upstreams_engine_wakes_weights_and_then_the_cache_and_keeps_its_weights_asleep():
    calls = []

    class Vllm:
        async def sleep(self, level: int) -> None:
            calls.append(level)

        async def wake_up(self, tags: list[str]) -> None:
            calls.append(tags)

    upstream, engine = RolloutRayActor.__ray_metadata__.modified_class, SimpleNamespace(llm=Vllm())
    for call in (upstream.sleep(engine), upstream.wake_up(engine, tags=["weights"]), upstream.wake_up(engine)):
        asyncio.run(call)
    # Where the weights are awake, vLLM warns and goes on. Level 1 keeps them in the machine's memory.
    assert calls == [1, ["weights"], ["weights"], ["kv_cache"]]


def test_without_cuda_engines_and_models_start_at_the_same_time(configured, monkeypatch):
    config = configured(has_cuda=False, sleep=False)
    given = engines._engine_arguments
    monkeypatch.setattr(engines, "_engine_arguments", lambda *args, **kwargs: {**given(*args, **kwargs), "awaits_model": True})  # fmt: skip
    events = started(config)
    assert sorted(events) == sorted([*["engine starts"] * GPUS, *["engine stands"] * GPUS, *["model"] * 3 * GPUS])
    assert events.index("model") < events.index("engine stands")


def test_sleep_is_off_where_there_is_no_gpu_to_free(configured, caplog):
    config = configured(has_cuda=True, sleep=True)
    assert engines.without_sleep(config) is config
    without = configured(has_cuda=False, sleep=True)
    assert engines.without_sleep(without).vllm.enable_sleep is False
    assert "--vllm.enable_sleep is off: without CUDA" in caplog.text
