"""What passes of 8k, 16k and 32k tokens take, and the most tokens of a pass with which a card of 80 GB gets by.

Tokens are unique ones, as `--train.max_tokens_per_gpu` counts them where prompts are shared. Beside the model and its
gradients in half precision a card holds its eighth of Adam's state and of the weights in single precision, 12 bytes each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from gpu_stages.device import Device, gib
from gpu_stages.record import Result, Save, Task, free_memory
from gpu_stages.setting import Once, Setting
from gpu_stages.subject import GroupShape, Subject, first_rows, rows_within
from gpu_stages.updates import checkpointing_subject
from gpu_stages.vision import LOOP, vision_ways
from train_batches import GroupBatch

GROUP = GroupShape(image_tokens=1024, responses=(1024, 1024), samples=16)
TOKENS = (8192, 16384, 32768)
WAYS = (("shared", "chunked"), ("packed", "chunked"), ("shared", "whole"))
CARD_BYTES = 80_000_000_000
STATE_BYTES, CARDS = 12, 8
# So many groups are made at most; what still fits then is not looked for.
GROUPS = 24


@dataclass(frozen=True, kw_only=True)
class Bench:
    """The model, rows of as many groups as are tried at most, and what else a card would hold."""

    subject: Subject
    rows: GroupBatch
    samples: int
    reserved: torch.Tensor

    @classmethod
    def of(cls, setting: Setting) -> Bench:
        subject = checkpointing_subject(setting)
        ways = vision_ways()
        ways[min(ways, key=lambda name: name == LOOP)](subject.policy.model)
        shape = GROUP.scaled(setting.scale)
        weights = sum(weight.numel() for weight in subject.policy.model.parameters())
        reserved = torch.empty(STATE_BYTES * weights // CARDS, dtype=torch.uint8, device=setting.device.place)
        rows = subject.batch(shape, groups=setting.scaled(GROUPS, least=2))
        return cls(subject=subject, rows=rows, samples=shape.samples, reserved=reserved)

    def batch(self, rows: int) -> GroupBatch:
        return first_rows(self.rows, rows, samples=self.samples)

    def rows_within(self, tokens: int) -> int:
        rows = self.rows
        return rows_within(tokens, prompts=rows.prompt_lengths, responses=rows.response_lengths, samples=self.samples)


def tasks(setting: Setting) -> list[Task]:
    bench = Once(partial(Bench.of, setting))
    found = [
        Task(name=f"{tokens}/{layout}/{logits}", measure=partial(_measured, setting, bench, tokens, layout, logits))
        for tokens in TOKENS
        for layout, logits in WAYS
    ]
    for layout, logits in WAYS:
        found.append(
            Task(name=f"largest/{layout}/{logits}", measure=partial(_largest, setting, bench, layout, logits))
        )
    return found


def _measured(setting: Setting, bench_of: Once[Bench], tokens: int, layout: str, logits: str, save: Save) -> Result:
    bench, device = bench_of(), setting.device
    rows = bench.rows_within(setting.scaled(tokens))
    batch = bench.batch(max(1, rows))
    update = partial(bench.subject.update, batch, layout=layout, logits=logits)
    peak = device.peak_bytes(update)
    save({"unique_tokens": batch.unique_tokens, "peak_gib": gib(peak)})
    took = device.median_seconds(update, repeats=max(1, setting.repeats // 2))
    useful = bench.subject.operations(batch, samples=bench.samples)
    return {
        "unique_tokens": batch.unique_tokens,
        "seconds": round(took, 4),
        "utilisation": None if device.peak is None else round(useful / took / device.peak, 4),
        "unique_tokens_per_s": round(batch.unique_tokens / took),
        "peak_gib": gib(peak),
        "adam_share_gib": gib(bench.reserved.nbytes),
    }


def _largest(setting: Setting, bench_of: Once[Bench], layout: str, logits: str, save: Save) -> Result:
    """Return the most rows, and their unique tokens, of a pass within a card's memory, with every pass that was tried."""
    bench, device = bench_of(), setting.device
    tried: list[Result] = []

    def fits(rows: int) -> bool:
        batch = bench.batch(rows)
        entry: Result = {"rows": rows, "unique_tokens": batch.unique_tokens}
        try:
            peak = device.peak_bytes(partial(bench.subject.update, batch, layout=layout, logits=logits))
            entry["peak_gib"] = gib(peak)
            entry["fits"] = peak <= CARD_BYTES
        except torch.OutOfMemoryError:
            entry["fits"] = False
        free_memory()
        tried.append(entry)
        save({"tried": tried})
        return entry["fits"]

    most = len(bench.rows.sequences)
    with _card_of(device, CARD_BYTES):
        rows = largest(fits, first=min(most, max(1, bench.rows_within(setting.scaled(TOKENS[0])))), most=most)
    tokens = bench.batch(rows).unique_tokens if rows else 0
    return {
        "unique_tokens": tokens,
        "rows": rows,
        "bounded_by": "rows that were made" if rows == most else "memory",
        "card_gb": CARD_BYTES / 1e9,
        "adam_share_gib": gib(bench.reserved.nbytes),
        "tried": tried,
    }


def largest(fits: Callable[[int], bool], *, first: int, most: int) -> int:
    """Return the largest number from 0 to `most` that fits, to within a twentieth; all up to it are taken to fit."""
    low, high = 0, most + 1
    probe = first
    while high - low > max(1, low // 20):
        if fits(probe):
            low = probe
        else:
            high = probe
        # Doubled until one is too large, then halved; `most` itself is tried before it is believed.
        probe = min(2 * low, most) if low and high > most else (low + high) // 2
        if probe <= low:
            break
    return low


@contextmanager
def _card_of(device: Device, size: int) -> Iterator[None]:
    """Let allocations beyond a card of `size` bytes fail on a device that has more."""
    if not device.is_cuda:
        yield
        return
    total = torch.cuda.get_device_properties(device.place).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, size / total), device.place)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device.place)
