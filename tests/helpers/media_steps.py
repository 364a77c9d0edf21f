"""The way of the media through a step, without models: engine, driver and workers as in a run, and the driver's bytes."""

from __future__ import annotations

import sys
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import ray
import torch
from helpers.conversations import message, row
from helpers.rl_steps import StepParts, small_run, trained
from openrlhf.trainer.ray.launcher import BaseModelActor
from ray import cloudpickle
from ray._private.serialization import SerializationContext

from lmm_r1 import cpu
from lmm_r1.data.messages import Row
from lmm_r1.data.sample import Sample, Segment, SentMedia, placed
from lmm_r1.data.training_rows import PromptStream
from lmm_r1.generation import media_store
from lmm_r1.generation.engine import SamplingSettings
from lmm_r1.generation.group import GroupSettings, SampledGroup
from lmm_r1.host.workers import WorkerGroup
from lmm_r1.rl.batching import Pass
from lmm_r1.rl.model_groups import hand_out
from lmm_r1.rl.rollouts import KitSamplesGenerator

# Of Qwen2.5-VL: two frames of 14 x 14 pixels in three colours.
PATCH = 3 * 2 * 14 * 14
RESPONSE = tuple(range(50, 66))


def pickle_helpers() -> None:
    """Let workers have what stands beside the tests, and what they can't import."""
    for name in ("helpers.media_steps", "helpers.rl_steps", "helpers.samples", "helpers.conversations"):
        cloudpickle.register_pickle_by_value(sys.modules[name])


def start_cluster() -> None:
    """Start Ray on this machine alone, with GPUs that are only counted."""
    pickle_helpers()
    ray.init(
        address="local", num_cpus=4, num_gpus=4, include_dashboard=False, logging_level="warning", log_to_driver=False
    )


@dataclass
class DriverBytes:
    """What this process writes for others, and reads of what they write."""

    sent: int = 0
    received: int = 0


@contextmanager
def counted_bytes() -> Iterator[DriverBytes]:
    """Count the bytes that pass through this process, which is Ray's driver."""
    count = DriverBytes()
    serialize, deserialize = SerializationContext.serialize, SerializationContext.deserialize_objects

    def sent(self: SerializationContext, value: Any) -> Any:
        written = serialize(self, value)
        count.sent += written.total_bytes
        return written

    def received(self: SerializationContext, objects: Sequence[Any], *rest: Any) -> Any:
        count.received += sum(memoryview(item[0]).nbytes for item in objects if item[0] is not None)
        return deserialize(self, objects, *rest)

    SerializationContext.serialize, SerializationContext.deserialize_objects = sent, received
    try:
        yield count
    finally:
        SerializationContext.serialize, SerializationContext.deserialize_objects = serialize, deserialize


def pixel_values(patches: int, *, seed: int) -> torch.Tensor:
    """Patches of noise as Qwen2.5-VL's processor makes them, (P, 1176)."""
    noise = torch.randint(0, 256, (patches, 3, PATCH // 3), generator=torch.Generator().manual_seed(seed))
    mean = torch.tensor([0.48145466, 0.4578275, 0.40821073]).view(1, 3, 1)
    std = torch.tensor([0.26862954, 0.26130258, 0.27577711]).view(1, 3, 1)
    return ((noise.float() / 255 - mean) / std).view(patches, PATCH)


def settings_of(*, samples: int) -> GroupSettings:
    """How a group of so many samples is generated for training."""
    return GroupSettings(
        sampling=SamplingSettings(n_samples=samples, temperature=1.0, top_p=1.0, max_new_tokens=len(RESPONSE)),
        max_len=512,
        logprobs=True,
        ignore_eos=False,
        overlong_prompts="error",
        media=True,
    )


def mark_of(tensors: Mapping[str, torch.Tensor]) -> int:
    """Return a number that follows from every bit of the pixel values."""
    return zlib.crc32(tensors["pixel_values"].numpy())


def name_of(patches: int, number: int) -> str:
    return f"{patches} patches of image {number}"


@ray.remote
class Engine:
    """Gives groups as an engine does, each with the image that its row's answer names."""

    def __init__(self) -> None:
        self.images: dict[str, dict[str, torch.Tensor]] = {}

    def prepare(self, *, patches: int, images: int) -> list[int]:
        """Make images of so many patches ahead of the step that asks for them; return their marks."""
        marks = []
        for number in range(images):
            pixels = pixel_values(patches, seed=number)
            grid = torch.tensor([[1, 1, patches]])
            self.images[name_of(patches, number)] = {"pixel_values": pixels, "image_grid_thw": grid}
            marks.append(mark_of(self.images[name_of(patches, number)]))
        return marks

    def get_num_unfinished_requests(self) -> int:
        return 0

    def generate_group(self, row: Row, settings: GroupSettings) -> SampledGroup:
        tensors, number = self.images[row.answer], int(row.answer.rpartition(" ")[2])
        media = media_store.put(tensors) if settings.media else None
        prompt = Segment(kind="prompt", token_ids=(1, 2, number), media=media)
        samples = [
            Sample(
                row=row,
                segments=(prompt, Segment(kind="generated", token_ids=RESPONSE, log_probs=(-1.0,) * len(RESPONSE))),
                response="",
                finish_reason="stop",
                weight_version=0,
            )
            for _ in range(settings.sampling.n_samples)
        ]
        return SampledGroup(samples=samples)


@ray.remote
class Worker(BaseModelActor):
    """A worker without a model; what it sees of an image is its mark."""

    def __init__(self, world_size: int, rank: int, address: str | None, port: int | None) -> None:
        super().__init__(world_size, rank, address, port)
        cpu.prepare_worker()
        self.seen: list[list[int | None]] = []

    def forward(self, passes: Sequence[Pass]) -> list[list[torch.Tensor]]:
        for samples in passes:
            self.look_at([sample.media for sample in samples])
        return [[torch.zeros(len(sample.loss_mask)) for sample in samples] for samples in passes]

    def fit(self, steps: Sequence[Sequence[Pass]], kl_weight: float = 0.0) -> dict[str, float]:
        """Go through the passes as policy and critic do."""
        for passes in steps:
            self.forward(passes)
        return {}

    def look_at(self, rows: Sequence[SentMedia]) -> None:
        """Note the marks of the rows' images, None for text; rows of one group have one object."""
        items = [placed(row) for row in media_store.fetched(rows)]
        assert len({id(one[0].tensors) for one in items if one}) == len({one[0].key for one in items if one})
        tensors = [one[0].tensors if one else None for one in items]
        marks = {id(one): mark_of(one) for one in {id(one): one for one in tensors if one is not None}.values()}
        self.seen.append([None if one is None else marks[id(one)] for one in tensors])

    def take_seen(self) -> list[list[int | None]]:
        """Return what was seen since this was called last, pass by pass."""
        seen, self.seen = self.seen, []
        return seen


class Step:
    """A rollout of some groups and all passes over them: of reference and critic, then of the updates of policy and critic."""

    def __init__(self, engine: Any, *, patches: int, groups: int, samples: int, workers: WorkerGroup) -> None:
        """Args: patches: of each image, which the engine has prepared; workers: play policy, critic and reference."""
        self.groups = groups
        kl = {"algo__kl__use_loss": True, "algo__kl__estimator": "k3"}
        passes = {"rollout__micro_batch_size": samples, "train__micro_batch_size": samples}
        config = small_run(prompts=groups, samples=samples, **passes, **kl)
        self.generator = KitSamplesGenerator(config, [engine], settings_of(samples=samples))
        self.parts = StepParts(config, share_prefix=True, policy=workers, critic=workers, reference=workers)
        # As after the first step: the update's own pass gives the old log-probs.
        self.parts.mismatch.checked = True
        self.rows = [row(message("user", "?"), answer=name_of(patches, number)) for number in range(groups)]

    def run(self) -> dict[str, float]:
        """Make the step as the trainer does; return the seconds of its parts."""
        times = [time.perf_counter()]
        rollout = self.generator.rollout(PromptStream(self.rows, seed=0, episodes=1), count=self.groups)
        for sample in rollout.samples:
            sample.reward = 0.0
        times.append(time.perf_counter())
        samples = self.parts.with_outputs(rollout.samples)
        times.append(time.perf_counter())
        steps = self.parts.update_passes([trained(one) for one in samples], step=0).steps
        fits = hand_out(steps, self.parts.models, trains_policy=True, kl_weight=0.0)
        times.append(time.perf_counter())
        for fit in fits:
            ray.get(fit.start())
        times.append(time.perf_counter())
        names = ("rollout", "make_experience", "hand_out", "update")
        return {name: end - begin for name, (begin, end) in zip(names, pairwise(times), strict=True)}


def stored_objects() -> int:
    """Return how many objects the node's object store holds."""
    from ray._private.internal_api import get_memory_info_reply, get_state_from_address

    reply = get_memory_info_reply(get_state_from_address(ray.get_runtime_context().gcs_address))
    return reply.store_stats.num_local_objects
