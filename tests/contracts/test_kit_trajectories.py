"""A trajectory as supervised learning encodes it: what a rollout of it encodes turn by turn, the loss on the model's turns."""

from itertools import chain

import pytest
import torch
from helpers.conversations import as_written, message, picture, row
from helpers.tables import kits_with

from lmm_r1.data.messages import Message, images_of
from lmm_r1.lmm_kits import LmmKit
from lmm_r1.lmm_kits.checkpoint import encode_turn
from lmm_r1.supervised.samples import SFTSample, encode_sample

# Turns that a chat template refuses or passes over: the model was not trained on tools.
UNWRITTEN = {("gemma3", "tool"), ("glm4v", "tool"), ("glm4v_moe", "tool")}
SMALL, WIDE = picture(56, 56), picture(140, 84)
SAID = ("<think>look</think> 4", "Then 12.", "<answer>46</answer>")


def observed(kit: LmmKit, *, role: str) -> tuple[Message, Message]:
    """What is shown behind the first two turns: images where the kit takes them."""
    if not kit.takes_images:
        return message(role, "Here it is."), message(role, "And 12?")
    return message(role, "Here it is: ", SMALL, "."), message(role, WIDE, SMALL, "And 12?")


def trajectory(kit: LmmKit, *, role: str = "user") -> list[Message]:
    asked = message("user", *([WIDE] if kit.takes_images else []), "Which digit is this?")
    said = [message("assistant", text) for text in SAID]
    first, second = observed(kit, role=role)
    return [message("system", "Call a tool."), asked, said[0], first, said[1], second, said[2]]


def sample_of(kit: LmmKit, processor: object, messages: list[Message], *, every_turn: bool = True) -> SFTSample:
    sample = encode_sample(row(*messages), kit=kit, processor=processor, max_len=10_000, every_turn=every_turn)
    assert sample is not None
    return sample


@pytest.mark.parametrize(
    ("name", "role"),
    [(name, role) for name in kits_with("RL") for role in ("user", "tool") if (name, role) not in UNWRITTEN],
)
def test_a_trajectory_has_the_ids_and_the_mask_of_a_rollout_that_says_the_same(name, kit, processor, role):
    tokenizer, messages = kit.tokenizer_of(processor), trajectory(kit, role=role)
    images = [part.source for part in images_of(messages[:2])]
    opening = kit.encode(processor, messages[:2], images=images, add_generation_prompt=True)
    turns = [
        encode_turn(kit, processor, shown, images=[part.source for part in images_of([shown])])
        for shown in observed(kit, role=role)
    ]
    said = [tokenizer(as_written(name, text), add_special_tokens=False)["input_ids"] for text in SAID]
    end = [tokenizer.eos_token_id]
    # What is shown begins with the end of the model's turn, which the model may have generated.
    assert [turn.token_ids[0] for turn in turns] == end * 2
    shown = [turn.token_ids[1:] for turn in turns]
    pieces = [opening.token_ids, said[0] + end, shown[0], said[1] + end, shown[1], said[2] + end]
    sample = sample_of(kit, processor, messages)
    expected = list(chain.from_iterable(pieces))
    mask = [number % 2 == 1 for number, piece in enumerate(pieces) for _ in piece]
    # What a template puts behind the last end is never generated.
    assert sample.token_ids[: len(expected)] == expected
    assert sample.loss_mask == [*mask, *([False] * (len(sample.token_ids) - len(expected)))]
    if not kit.takes_images:
        assert sample.media is None
        return
    merged = kit.merge_media([part.media for part in (opening, *turns)])
    assert merged.keys() == sample.media.keys()
    for key, tensor in merged.items():
        torch.testing.assert_close(sample.media[key], tensor, rtol=0, atol=0)
