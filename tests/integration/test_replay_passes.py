"""What becomes of planned passes in real workers: media stay one object per group, gradients of a step add up."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import deepspeed
import pytest
import ray
import torch
from helpers import deepspeed_process
from helpers.conversations import message, row
from helpers.experiences import group, trained
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ray.launcher import BaseModelActor, RayActorGroup
from ray import cloudpickle
from torch.utils.data import DataLoader

from lmm_r1 import cpu
from lmm_r1.data.messages import Row
from lmm_r1.data.sample import Sample, Segment
from lmm_r1.generation.group import SampledGroup
from lmm_r1.trainer.replay_buffer import GroupReplayBuffer
from lmm_r1.trainer.samples import KitSamplesGenerator
from lmm_r1.trainer.workers import PassMedia, media_per_row

pytestmark = [pytest.mark.integration, pytest.mark.slow]


@ray.remote
class Worker(BaseModelActor):
    """A worker with a replay buffer and no model."""

    def __init__(self, world_size: int, rank: int, address: str | None, port: int | None) -> None:
        super().__init__(world_size, rank, address, port)
        cpu.prepare_worker()
        self.strategy = self
        self.buffer = GroupReplayBuffer(1, dynamic_batch=True)

    def is_rank_0(self) -> bool:
        """Upstream asks a worker's strategy whether it is to show its progress."""
        return False

    def append(self, experience: Experience) -> None:
        self.buffer.append(experience)

    def replayed_media(self) -> list[list[int]]:
        """Which object each sample of each pass has that the trainer gets."""
        loader = DataLoader(self.buffer, batch_size=1, collate_fn=self.buffer.collate_fn)
        passes = []
        for experience in loader:
            experience.to_device(torch.device("cpu"))
            passes.append(media_per_row(experience.mm_train_inputs, "cpu")["media"])
        return numbered(passes)

    def forward(self, sequences: torch.Tensor, mm_train_inputs_list: PassMedia) -> list[int]:
        """Which object each sample of a pass has."""
        return numbered([media_per_row(mm_train_inputs_list, "cpu")["media"]])[0]


def numbered(passes: list[list[object]]) -> list[list[int]]:
    """Objects as numbers, the same for the same object, in the order in which they come first."""
    known: list[object] = []
    for item in (item for rows in passes for item in rows):
        if not any(item is one for one in known):
            known.append(item)
    return [[next(number for number, one in enumerate(known) if one is item) for item in rows] for rows in passes]


@ray.remote
class Engine:
    """Gives a group as an engine does: the samples of a prompt hold one media object."""

    def get_num_unfinished_requests(self) -> int:
        return 0

    def generate_group(self, row: Row, settings: SimpleNamespace) -> SampledGroup:
        media = {"pixel_values": torch.zeros(2, 3)}
        prompt = Segment(kind="prompt", token_ids=(1, 2), media=media)
        sample = Sample(row=row, segments=(prompt,), response="", finish_reason="stop", weight_version=0)
        return SampledGroup(samples=[replace(sample) for _ in range(settings.sampling.n_samples)])


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    # Workers can't import a test module.
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    ray.init(num_cpus=4, num_gpus=4, include_dashboard=False, logging_level="warning", log_to_driver=False)
    yield
    ray.shutdown()


@pytest.mark.usefixtures("cluster")
def test_media_of_a_group_are_one_object_in_a_worker_and_in_every_pass_of_its_step():
    images = [{"pixel_values": torch.full((2, 3), float(value))} for value in range(3)]
    first = [*group([1], [1, 2], media=images[0]), *group([1], [1, 2], media=images[1])]
    # A group that is divided into two passes.
    second, third = group([2], [3, 3], media=images[2])
    passes = [
        trained(Experience.concat_experiences(samples, 0)) for samples in (first, [second], [third], group([4], [1]))
    ]
    workers = RayActorGroup(1, 2, Worker, num_gpus_per_actor=0.5)
    # Two passes for each of two workers: the divided group has one in each.
    ray.get(workers.async_run_method_batch(method_name="append", experience=passes))
    assert ray.get(workers.async_run_method(method_name="replayed_media")) == [[[0, 0, 1, 1], [2]], [[0], [1]]]
    # All four for one.
    worker = RayActorGroup(1, 1, Worker, num_gpus_per_actor=0.5)
    ray.get(worker.async_run_method_batch(method_name="append", experience=passes))
    assert ray.get(worker.async_run_method(method_name="replayed_media")) == [[[0, 0, 1, 1], [2], [2], [3]]]


@pytest.mark.usefixtures("cluster")
def test_media_of_a_group_are_one_object_in_the_passes_of_a_rollouts_models():
    one, other = {"pixel_values": torch.zeros(2, 3)}, {"pixel_values": torch.zeros(2, 3)}
    media = [PassMedia(rows=[one, one, None]), PassMedia(rows=[other, other, one])]
    worker = RayActorGroup(1, 1, Worker, num_gpus_per_actor=0.5)
    refs = worker.async_run_method_batch(
        method_name="forward", sequences=[torch.zeros(3, 1)] * 2, mm_train_inputs_list=media
    )
    assert ray.get(refs) == [[[0, 0, 1], [0, 0, 1]]]


@pytest.mark.usefixtures("cluster")
def test_media_of_a_group_are_one_object_when_it_comes_from_an_engine():
    generator = KitSamplesGenerator(
        SimpleNamespace(), [Engine.remote()], SimpleNamespace(sampling=SimpleNamespace(n_samples=3))
    )
    rows = [row(message("user", "?"), answer=answer) for answer in ("1", "2")]
    groups = generator.generate(rows, generator.settings)
    assert numbered([[sample.media[0].tensors for sample in one] for one in groups]) == [[0, 0, 0], [1, 1, 1]]


@pytest.fixture
def one_process() -> Iterator[None]:
    """A process group of this process alone, which DeepSpeed takes for its own."""
    with deepspeed_process.one_process():
        deepspeed.init_distributed("gloo")
        yield


def weights_after(passes: int, *, stage: int) -> torch.Tensor:
    """The weights of a linear model after two optimizer steps, each on the same six samples in so many passes."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    engine, *_ = deepspeed.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "zero_optimization": {"stage": stage},
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "zero_allow_untested_optimizer": True,
        },
    )
    buffer = GroupReplayBuffer(1, dynamic_batch=True)
    buffer.dynamic_optimizer_step = [0] * (passes - 1) + [1]
    inputs = torch.arange(24.0).view(6, 4).sin()
    for _ in range(2):
        for step, part in enumerate(inputs.chunk(passes)):
            buffer.announce_pass(engine, step=step)
            engine.backward((engine(part) - 1).square().sum() / len(inputs))
            if buffer.dynamic_optimizer_step[step]:
                engine.step()
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return torch.cat([weight.detach().flatten().clone() for weight in model.parameters()])


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_gradients_of_a_steps_passes_add_up(stage):
    torch.testing.assert_close(weights_after(3, stage=stage), weights_after(1, stage=stage))
