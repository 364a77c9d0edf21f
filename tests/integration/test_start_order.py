"""In which order engines and models start, sleep and wake on shared GPUs, by real Ray with actors that write it down."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
from helpers.conversations import message, row
from helpers.start_actors import Engine, Events, Model

from lmm_r1 import cpu, dotted
from lmm_r1.config import PPOConfig, resolve
from lmm_r1.data.training_rows import PromptStream
from lmm_r1.generation import ray_engines as engines
from lmm_r1.generation.engine import SamplingSettings
from lmm_r1.generation.group import GroupSettings
from lmm_r1.rl import run
from lmm_r1.rl.model_groups import Models, send_weights
from lmm_r1.rl.rollouts import KitSamplesGenerator

GPUS = 2
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


def started(config: PPOConfig, *, then: Callable[..., None] = lambda engines, models: None) -> list[str]:
    """Start the workers of a run, load their models, do something with them, and return what they wrote down."""
    events = Events.options(name="events").remote()
    engines, models = run._start_workers(config, max_images=0, max_videos=0)
    handles = [*engines, *(handle for group in models.all for handle in group._actor_handlers)]
    try:
        run._load_models(config, models, engines, num_rows=1)
        ray.get([handle.__ray_ready__.remote() for handle in handles])
        then(engines, models)
        noted: list[str] = ray.get(events.all.remote())
    finally:
        for handle in (*handles, events):
            ray.kill(handle)
    return noted


@pytest.fixture
def configured(tiny_checkpoint, monkeypatch, cluster) -> Callable[..., PPOConfig]:
    monkeypatch.setattr(engines, "RolloutActor", Engine)
    monkeypatch.setattr(run, "workers_strategy", lambda config: None)
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
            "vllm.gpu_memory_utilization": 0.5,
            "rollout.batch_size": 1024,
            "train.batch_size": 128,
            **{f"{name}.num_gpus_per_node": GPUS for name in ("actor", "ref", "critic", "reward")},
        }
        return resolve(dotted.replace(PPOConfig(), settings))

    return config


@pytest.mark.parametrize("sleep", [True, False])
def test_on_shared_gpus_engines_stand_and_sleep_before_a_model_loads_and_wake_when_they_are_needed(configured, sleep):
    config = configured(has_cuda=True, sleep=sleep)

    def two_steps(engines: list[Any], models: Models) -> None:
        generator = KitSamplesGenerator(config, engines, SETTINGS)
        question = row(message("user", "1+1?"))
        for _ in range(2):
            generator.rollout(PromptStream([question] * GPUS, seed=0, episodes=1), count=GPUS)
            send_weights(models.policy, engines, config)

    events = started(config, then=two_steps)
    # Policy, reference and critic on each GPU: their processes start in any order among the engines'.
    processes = [*["engine starts"] * GPUS, *["engine stands"] * GPUS, *["model"] * 3 * GPUS]
    first = events.index("engine sleeps" if sleep else "model loads")
    loading = [*["engine sleeps"] * GPUS * sleep, *["model loads"] * 3 * GPUS]
    step = [
        *["engine wakes all"] * GPUS * sleep,
        *["engine generates"] * GPUS,
        *["engine sleeps"] * GPUS * sleep,
        *["engine wakes ['weights']"] * GPUS * sleep,
        *["weights are sent"] * GPUS,
    ]
    assert events[:first].count("engine stands") == GPUS
    assert sorted(event for event in events if event in processes) == sorted(processes)
    assert [event for event in events if event not in processes] == loading + 2 * step


def test_on_shared_gpus_models_start_their_processes_while_the_engines_load(configured, monkeypatch):
    # The engines wait for a model's process: with models started after them this would end in the engine's assertion.
    config = configured(has_cuda=True, sleep=True)
    given = engines._engine_arguments
    monkeypatch.setattr(engines, "_engine_arguments", lambda *args, **kwargs: {**given(*args, **kwargs), "awaits_model": True})  # fmt: skip
    events = started(config)
    assert events.index("model") < events.index("engine stands") < events.index("model loads")
