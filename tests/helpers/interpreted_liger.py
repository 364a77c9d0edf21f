"""Compare a kit's passes with and without Liger's kernels, which Triton's interpreter runs on a CPU.

Triton reads TRITON_INTERPRET when it is imported, so this needs a process that starts with it. One process serves all kits.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest


@contextmanager
def interpreting_process() -> Iterator[ProcessPoolExecutor]:
    """A process that loads the training stack once and interprets the kernels of what is submitted to it."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=interpret) as pool:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")
            pool.submit(os.getpid).result()
        yield pool


def interpret() -> None:
    """Let the interpreter run what Liger's kernels take of Triton, which the interpreter of 3.9 lacks in part."""
    import numpy
    import triton.language as tl
    from triton.language.extra import libdevice
    from triton.runtime import interpreter

    assert os.environ["TRITON_INTERPRET"] == "1", "read when Triton is imported"
    convert = interpreter._implicit_cvt

    def convert_numbers(argument: Any) -> Any:
        if type(argument) is not float:
            return convert(argument)
        handle = interpreter.TensorHandle(numpy.array([argument], dtype=numpy.float32), tl.float32)
        return tl.tensor(handle, tl.float32)

    interpreter._implicit_cvt = convert_numbers
    # Those of CUDA's library do nothing here. The interpreter replaces the members of `tl` while a kernel runs.
    libdevice.rsqrt = lambda values: tl.math.rsqrt(values)
    libdevice.tanh = lambda values: 2 * tl.sigmoid(2 * values) - 1


def compare(name: str, folder: Path) -> dict[str, int]:
    """Return how many modules of each kind have a kernel; raises if results differ by more than rounding."""
    from helpers.conversations import message, picture
    from helpers.engines import disturb
    from helpers.packed_batches import SINGLE, check, groups, norm_of, shuffled, together
    from helpers.tiny_models import encode, make_actor

    from lmm_r1.lmm_kits import get_kit
    from lmm_r1.models.liger import fuse

    kit = get_kit(name)
    processor = kit.load_processor(str(folder), trust_remote_code=False)
    conversations = [[message("user", "What is 12 + 34?")]]
    if kit.takes_images:
        conversations.append([message("user", picture(84, 56), "Which digit is this?")])
    prompts = [encode(kit, processor, messages) for messages in conversations]
    batch = shuffled(groups(prompts, [(5, 4), (3, 2)][: len(prompts)], gap=True))
    counts: dict[str, int] = {}
    # All weights; adapters, with activations computed again in the backward pass.
    for settings in ({}, {"lora_rank": 4, "lora_alpha": 8}):
        actor = make_actor(folder, packing_samples=True, share_prefix=True, **settings).train()
        # Adapters start at zero, as does the projector of a kit.
        disturb(actor, seed=1)
        theirs = together(actor, batch)
        names = [weight for weight, _ in actor.model.named_parameters()]
        counts = fuse(actor.model)
        assert names == [weight for weight, _ in actor.model.named_parameters()]
        if settings:
            actor.gradient_checkpointing_enable({"use_reentrant": False})
        mine = together(actor, batch)
        assert mine.gradients.keys() == theirs.gradients.keys()
        total = norm_of(theirs.gradients)
        zero = {weight for weight, part in theirs.gradients.items() if part.norm() < SINGLE * total}
        check(mine, theirs, tolerance=SINGLE, zero=zero)
    return dict(counts)
