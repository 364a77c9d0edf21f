"""A student learns from a larger teacher: packed sequences give the distances that all logits of padded rows give."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.conversations import message, picture, row
from helpers.kd_steps import BETA, TEMPERATURE, losses_by_hand
from helpers.tables import SOME
from helpers.tiny_models import make_actor

from lmm_r1.lmm_kits import Checkpoint, get_kit
from lmm_r1.models.distillation import Distillation, Divergence
from lmm_r1.models.packed.attention import packing_refusal
from lmm_r1.models.packed.packing import stacked
from lmm_r1.supervised.samples import encode_sample
from lmm_r1.supervised.sft import _check_same_media, _probes, check_same_tokens

DIVERGENCE = Divergence(name="jsd", beta=BETA, temperature=TEMPERATURE)


@pytest.mark.parametrize("name", sorted(SOME))
def test_a_student_is_as_far_from_a_larger_teacher_as_its_logits_say(
    name: str, tiny_checkpoint: Callable[[str], Path], larger_teacher: Callable[[str], Path]
):
    kit, folder, larger = get_kit(name), tiny_checkpoint(name), larger_teacher(name)
    student, teacher = Checkpoint(str(folder)), Checkpoint(str(larger))
    media = [picture(84, 56)] if kit.takes_images else []
    rows = [
        row(message("user", *media, "Which digit?"), message("assistant", "<think>easy</think><answer>4</answer>")),
        row(message("user", "What is 12 + 34?"), message("assistant", "46")),
    ]
    check_same_tokens(student.tokenizer, teacher.tokenizer, teacher_flag="")
    for probe in _probes(rows):
        _check_same_media(probe, student, teacher, flag="")

    samples = [encode_sample(one, kit=kit, processor=student.processor, max_len=8192, every_turn=True) for one in rows]
    packs = packing_refusal(make_actor(folder).model) is None
    ours, theirs = (make_actor(path, packing_samples=packs) for path in (folder, larger))
    batch = [sample.for_model() for sample in samples]
    wanted = stacked(batch, lambda sample: sample.loss_mask)
    with torch.no_grad():
        # Padded, each by itself.
        parts = (losses_by_hand(ours, theirs, sample) for sample in samples)
        distances, losses = map(torch.cat, zip(*parts, strict=True))
        tokens = theirs.teacher_tokens(batch, ring_attn_group=None)
        compared = Distillation(teacher=tokens, divergence=DIVERGENCE)
        log_probs, output = ours(batch, return_output=True, distillation=compared)
    assert distances.mean() > 0.05
    torch.testing.assert_close(output.divergence[wanted], distances, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(-log_probs[wanted], losses, atol=1e-4, rtol=1e-5)
    assert output.divergence[~wanted].abs().max() == 0
