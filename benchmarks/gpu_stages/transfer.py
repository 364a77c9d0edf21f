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
from torch.multiprocessing.reductions import reduce_tensor

from lmm_r1.generation.worker_extension import WeightSlot, empty_buffer, slots_of, weights_in

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
        send = partial(_send_tensors, pipe, weights)
        if bucket_bytes is not None:
            send = partial(_send_buckets, pipe, weights, bucket_bytes)
        calls = send()
        took = setting.device.median_seconds(send, repeats=setting.repeats)
        pipe.send(("sum", None))
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


def _send_tensors(pipe: Connection, weights: Mapping[str, torch.Tensor]) -> int:
    """Let the other process copy each tensor, one call each; return the number of calls."""
    for name, weight in weights.items():
        pipe.send(("tensor", (name, reduce_tensor(weight))))
        _answer(pipe)
    return len(weights)


def _send_buckets(pipe: Connection, weights: Mapping[str, torch.Tensor], limit: int) -> int:
    """Let the other process copy buffers of up to `limit` bytes, as the trainer sends them; return their number."""
    buckets = list(_buckets(weights, limit))
    for bucket in buckets:
        slots = slots_of(bucket)
        buffer = empty_buffer(slots, device=next(iter(bucket.values())).device)
        for name, place in weights_in(buffer, slots):
            place.copy_(bucket[name])
        if buffer.is_cuda:
            # The other process reads on a stream of its own.
            torch.cuda.synchronize()
        pipe.send(("bucket", (slots, reduce_tensor(buffer))))
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
        ours.send(("end", None))
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
    """Copy what comes into weights of this process, until it is told to end; runs in the other process.

    Where that cannot be done, as without CUDA IPC, the error is the answer.
    """
    try:
        _receive(pipe, place)
    except RuntimeError as error:
        pipe.send(RuntimeError(str(error)))


def _receive(pipe: Connection, place: str) -> None:
    weights: dict[str, torch.Tensor] = {}
    wait = torch.cuda.synchronize if torch.device(place).type == "cuda" else lambda: None
    pipe.send("ready")
    while True:
        kind, content = pipe.recv()
        if kind == "end":
            return
        if kind == "sum":
            pipe.send(float(sum(weight.double().sum() for weight in weights.values())))
            continue
        for name, tensor in _opened(kind, content):
            if name not in weights:
                weights[name] = torch.empty_like(tensor)
            weights[name].copy_(tensor)
            del tensor
        wait()
        pipe.send("done")


def _opened(kind: str, content: tuple[Any, Any]) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors of a message by name; they are in the sender's memory."""
    named, (rebuild, arguments) = content
    tensor = rebuild(*arguments)
    if kind == "tensor":
        return [(named, tensor)]
    slots: list[WeightSlot] = named
    return weights_in(tensor, slots)
