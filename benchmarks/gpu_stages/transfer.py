"""Seconds until another process on the same device has 6 GB of weights: a tensor at a time, and in buckets (CUDA IPC)."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
from gpu_stages.record import Result, Save, Task
from gpu_stages.setting import Setting

from lmm_r1.generation.weight_bucket import empty_buffer, handle_of, opened, slots_of, weights_in

# 800 tensors of some sizes in turn, 6 GB in bf16 together, as large models have them.
TENSORS = 800
SIZES = (1024 * 1024, 2048 * 2048, 2048 * 256, 2048 * 4600)
BUCKET_BYTES = 512 * 2**20
# Seconds in which another process has started, or has read what it was sent.
PATIENCE = 180


def tasks(setting: Setting) -> list[Task]:
    # Tensors are both fewer and smaller.
    bucket_bytes = setting.scaled(setting.scaled(BUCKET_BYTES))
    return [
        Task(name="ipc/tensors", measure=partial(_sent, setting, bucket_bytes=None)),
        Task(name="ipc/buckets", measure=partial(_sent, setting, bucket_bytes=bucket_bytes)),
    ]


def _sent(setting: Setting, save: Save, *, bucket_bytes: int | None) -> Result:
    weights = _weights(setting)
    with _receiver(setting.device.place) as pipe:
        send = partial(_send, pipe, weights, bucket_bytes=bucket_bytes)
        calls = send()
        took = setting.device.median_seconds(send, repeats=setting.repeats)
        pipe.send(None)
        theirs = _answer(pipe)
    mine = float(sum(weight.double().sum() for weight in weights.values()))
    size = sum(weight.nbytes for weight in weights.values())
    assert abs(mine - theirs) <= 1e-6 * abs(mine), f"the other process has other weights: {theirs}, not {mine}"
    return {
        "tensors": len(weights),
        "bytes": size,
        "calls": calls,
        "seconds": round(took, 4),
        "gb_per_s": round(size / took / 1e9, 2),
    }


def _weights(setting: Setting) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for index in range(setting.scaled(TENSORS, least=4)):
        size = setting.scaled(SIZES[index % len(SIZES)])
        weights[f"weight_{index}"] = torch.empty(size, dtype=torch.bfloat16, device=setting.device.place)
        weights[f"weight_{index}"].fill_(1 + float(torch.rand((), generator=generator)))
    return weights


def _send(pipe: Connection, weights: Mapping[str, torch.Tensor], *, bucket_bytes: int | None) -> int:
    """Let the other process copy all weights, and return the number of calls: one per buffer, as the trainer sends them.

    Args:
        bucket_bytes: the size of a buffer; None sends each weight's own memory.
    """
    buckets = list(_buckets(weights, bucket_bytes or 0))
    for bucket in buckets:
        slots, (first, *_) = slots_of(bucket), bucket.values()
        buffer = first.view(torch.uint8)
        if bucket_bytes is not None:
            buffer = empty_buffer(slots, device=first.device)
            for name, place in weights_in(buffer, slots):
                place.copy_(bucket[name])
            if buffer.is_cuda:
                # The other process reads on a stream of its own.
                torch.cuda.synchronize()
        pipe.send((slots, handle_of(buffer)))
        _answer(pipe)
    return len(buckets)


def _buckets(weights: Mapping[str, torch.Tensor], limit: int) -> Iterator[dict[str, torch.Tensor]]:
    bucket: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        if bucket and sum(part.nbytes for part in bucket.values()) + weight.nbytes > limit:
            yield bucket
            bucket = {}
        bucket[name] = weight
    yield bucket


@contextmanager
def _receiver(place: torch.device) -> Iterator[Connection]:
    """Start the other process, and end it."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=receive, args=(theirs, str(place)), daemon=True)
    process.start()
    theirs.close()
    try:
        assert _answer(ours) == "ready"
        yield ours
        process.join(PATIENCE)
    finally:
        ours.close()
        if process.is_alive():
            process.kill()
        process.join()


def _answer(pipe: Connection) -> Any:
    if not pipe.poll(PATIENCE):
        raise TimeoutError(f"the other process has not answered for {PATIENCE} s")
    answer = pipe.recv()
    if isinstance(answer, RuntimeError):
        raise answer
    return answer


def receive(pipe: Connection, place: str) -> None:
    """Copy what comes into weights of this process until None comes, and answer with their sum; runs in the other process.

    If that is impossible, for example without CUDA IPC, the error is the answer.
    """
    weights: dict[str, torch.Tensor] = {}
    pipe.send("ready")
    try:
        while (message := pipe.recv()) is not None:
            slots, handle = message
            for name, tensor in weights_in(opened(handle, device=torch.device(place)), slots):
                if name not in weights:
                    weights[name] = torch.empty_like(tensor)
                weights[name].copy_(tensor)
                del tensor
            if place.startswith("cuda"):
                torch.cuda.synchronize()
            pipe.send("done")
        pipe.send(float(sum(weight.double().sum() for weight in weights.values())))
    except RuntimeError as error:
        pipe.send(RuntimeError(str(error)))
