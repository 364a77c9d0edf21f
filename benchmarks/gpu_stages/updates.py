"""Seconds, use and memory of an update of Qwen2.5-VL-3B's shape, by how its batch, logits and images are computed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from gpu_stages.device import gib
from gpu_stages.kernels import kernel_shares
from gpu_stages.policy import LAYOUTS, LOGITS
from gpu_stages.record import Result, Save, Task
from gpu_stages.setting import Once, Setting
from gpu_stages.subject import GroupShape, Shape, Subject, make_subject
from gpu_stages.vision import LOOP, vision_ways
from train_batches import GroupBatch

GROUP = GroupShape(image_tokens=1024, responses=(1024, 1024), samples=16)


@dataclass(frozen=True, kw_only=True)
class Bench:
    """The model and its one group."""

    subject: Subject
    batch: GroupBatch
    samples: int

    @classmethod
    def of(cls, setting: Setting) -> Bench:
        subject = checkpointing_subject(setting)
        shape = GROUP.scaled(setting.scale)
        return cls(subject=subject, batch=subject.batch(shape), samples=shape.samples)


def checkpointing_subject(setting: Setting) -> Subject:
    """Return the whole shape in bf16, whose activations are computed again in the backward pass."""
    folder, shape = setting.folder / "subject", Shape().scaled(setting.scale)
    return make_subject(shape, folder, setting.device, dtype=torch.bfloat16, checkpointing=True)


def tasks(setting: Setting) -> list[Task]:
    """Return all ways, what training takes first."""
    bench = Once(partial(Bench.of, setting))
    # The fastest of what is installed comes first: names other than the loop's take all windows in one call.
    vision = sorted(vision_ways(), key=lambda name: name == LOOP)
    return [
        Task(name=f"{layout}/{logits}/{way}", measure=partial(_measured, setting, bench, layout, logits, way))
        for logits in LOGITS
        for layout in reversed(LAYOUTS)
        for way in vision
    ]


def _measured(setting: Setting, bench_of: Once[Bench], layout: str, logits: str, way: str, save: Save) -> Result:
    bench, device = bench_of(), setting.device
    vision_ways()[way](bench.subject.policy.model)
    update = partial(bench.subject.update, bench.batch, layout=layout, logits=logits)
    # Kernels are chosen and compiled in the first.
    first = device.seconds(update)
    held = device.held_bytes()
    peak = device.peak_bytes(update)
    found: Result = {"first_s": round(first, 3), "held_gib": gib(held), "peak_gib": gib(peak)}
    save(found)
    took = device.median_seconds(update, repeats=setting.repeats)
    useful = bench.subject.operations(bench.batch, samples=bench.samples)
    batch = bench.batch
    found |= {
        "seconds": round(took, 4),
        "useful_tflop": round(useful / 1e12, 3),
        "utilisation": None if device.peak is None else round(useful / took / device.peak, 4),
        "unique_tokens": batch.unique_tokens,
        "unique_tokens_per_s": round(batch.unique_tokens / took),
        "prompt_tokens": batch.prompt_lengths[0],
        "response_tokens": [min(batch.response_lengths), max(batch.response_lengths)],
        "samples": bench.samples,
    }
    save(found)
    return {**found, "kernels": kernel_shares(update, device)}
