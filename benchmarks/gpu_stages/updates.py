"""Seconds, use and memory of updates of Qwen2.5-VL-3B's shape: of one group in all ways, and of passes with more tokens.

Tokens are unique ones, as `--train.max_tokens_per_gpu` counts them if prompts are shared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from gpu_stages.kernels import kernel_shares
from gpu_stages.policy import LAYOUTS, LOGITS, LOOP, vision_ways
from gpu_stages.record import Result, Save, Task, free_memory
from gpu_stages.setting import Device, Once, Setting, gib
from gpu_stages.subject import GROUP, SAMPLES, Shape, Subject, first_rows, make_subject, rows_within
from train_batches import GroupBatch

TOKENS = (8192, 16384, 32768)
PASSES = (("shared", "chunked"), ("packed", "chunked"), ("shared", "whole"))
# The largest pass is searched on a card of this size. Besides the model and its gradients in half precision, a card holds an
# eighth of Adam's state and of the weights in single precision, 12 bytes per weight.
CARD_BYTES = 80_000_000_000
STATE_BYTES, CARDS = 12, 8
# Larger passes than of so many groups are not tried.
GROUPS = 24


@dataclass(frozen=True, kw_only=True)
class Bench:
    """The model, and the rows of as many groups as are computed at most."""

    subject: Subject
    rows: GroupBatch
    samples: int

    @classmethod
    def of(cls, setting: Setting, *, groups: int = 1) -> Bench:
        subject = checkpointing_subject(setting)
        samples = setting.scaled(SAMPLES, least=2)
        rows = subject.batch(GROUP.scaled(setting.scale), samples=samples, groups=groups)
        return cls(subject=subject, rows=rows, samples=samples)

    def batch(self, rows: int) -> GroupBatch:
        return first_rows(self.rows, rows, samples=self.samples)

    def rows_within(self, tokens: int) -> int:
        rows = self.rows
        return rows_within(tokens, prompts=rows.prompt_lengths, responses=rows.response_lengths, samples=self.samples)


def checkpointing_subject(setting: Setting) -> Subject:
    """Return the whole shape in bf16, whose activations are computed again in the backward pass."""
    folder, shape = setting.folder / "subject", Shape().scaled(setting.scale)
    return make_subject(shape, folder, setting.device, dtype=torch.bfloat16, checkpointing=True)


def ways_of_vision() -> list[str]:
    """Return the names of the vision tower's ways, those first that take all windows in one call."""
    return sorted(vision_ways(), key=lambda name: name == LOOP)


def way_tasks(setting: Setting) -> list[Task]:
    """Return an update of one group in all ways, the trainer's first."""
    bench = Once(partial(Bench.of, setting))
    return [
        Task(name=f"{layout}/{logits}/{way}", measure=partial(_one_group, setting, bench, layout, logits, way))
        for logits in LOGITS
        for layout in reversed(LAYOUTS)
        for way in ways_of_vision()
    ]


def _one_group(setting: Setting, bench_of: Once[Bench], layout: str, logits: str, way: str, save: Save) -> Result:
    bench, device = bench_of(), setting.device
    vision_ways()[way](bench.subject.policy.model)
    update = partial(bench.subject.update, bench.rows, layout=layout, logits=logits)
    # Kernels are chosen and compiled in the first.
    first = device.seconds(update)
    held = device.held_bytes()
    peak = device.peak_bytes(update)
    found: Result = {"first_s": round(first, 3), "held_gib": gib(held), "peak_gib": gib(peak)}
    save(found)
    took = device.median_seconds(update, repeats=setting.repeats)
    batch = bench.rows
    found |= bench.subject.rates(batch, samples=bench.samples, seconds=took, device=device) | {
        "prompt_tokens": batch.prompt_lengths[0],
        "response_tokens": [min(batch.response_lengths), max(batch.response_lengths)],
        "samples": bench.samples,
    }
    save(found)
    return {**found, "kernels": kernel_shares(update, device)}


def pass_tasks(setting: Setting) -> list[Task]:
    """Return passes of 8k, 16k and 32k tokens, and the search for the largest pass on a card of 80 GB."""
    bench = Once(partial(_with_adam, setting))
    tasks = [
        Task(name=f"{tokens}/{layout}/{logits}", measure=partial(_one_pass, setting, bench, tokens, layout, logits))
        for tokens in TOKENS
        for layout, logits in PASSES
    ]
    for layout, logits in PASSES:
        tasks.append(
            Task(name=f"largest/{layout}/{logits}", measure=partial(_largest, setting, bench, layout, logits))
        )
    return tasks


def _with_adam(setting: Setting) -> tuple[Bench, torch.Tensor]:
    """Return a bench of many groups, and memory that stands in for a GPU's share of Adam's state."""
    bench = Bench.of(setting, groups=setting.scaled(GROUPS, least=2))
    model = bench.subject.policy.model
    vision_ways()[ways_of_vision()[0]](model)
    weights = sum(weight.numel() for weight in model.parameters())
    return bench, torch.empty(STATE_BYTES * weights // CARDS, dtype=torch.uint8, device=setting.device.place)


def _one_pass(
    setting: Setting, bench_of: Once[tuple[Bench, torch.Tensor]], tokens: int, layout: str, logits: str, save: Save
) -> Result:
    (bench, reserved), device = bench_of(), setting.device
    batch = bench.batch(max(1, bench.rows_within(setting.scaled(tokens))))
    update = partial(bench.subject.update, batch, layout=layout, logits=logits)
    found: Result = {"unique_tokens": batch.unique_tokens, "peak_gib": gib(device.peak_bytes(update))}
    save(found)
    took = device.median_seconds(update, repeats=max(1, setting.repeats // 2))
    found |= bench.subject.rates(batch, samples=bench.samples, seconds=took, device=device)
    return found | {"adam_share_gib": gib(reserved.nbytes)}


def _largest(
    setting: Setting, bench_of: Once[tuple[Bench, torch.Tensor]], layout: str, logits: str, save: Save
) -> Result:
    """Return the most rows, and their unique tokens, of a pass within a card's memory, with every pass that was tried."""
    (bench, reserved), device = bench_of(), setting.device
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
    return {
        "unique_tokens": bench.batch(rows).unique_tokens if rows else 0,
        "rows": rows,
        "bounded_by": "rows that were made" if rows == most else "memory",
        "card_gb": CARD_BYTES / 1e9,
        "adam_share_gib": gib(reserved.nbytes),
        "tried": tried,
    }


def largest(fits: Callable[[int], bool], *, first: int, most: int) -> int:
    """Return the largest number from 0 to `most` that fits, to within a twentieth, if all smaller ones fit."""
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
