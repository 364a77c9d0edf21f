"""The kit of Janus: the prompt in its exact form, the end of an answer, what learns, and why there is no rollout."""

from typing import Any

import torch
from helpers.conversations import message, picture
from helpers.passes import next_log_probs
from helpers.tiny_models import encode, make_actor

from lmm_r1.lmm_kits import get_kit

KIT = get_kit("janus")
SYSTEM = (
    "You are a helpful language and vision assistant. You are able to understand the visual content that the user "
    "provides, and assist the user with a variety of tasks using natural language.\n\n"
)
BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
IMAGE = "<begin_of_image><image_placeholder><end_of_image>"


def written(processor: Any, *messages: Any, add_generation_prompt: bool) -> str:
    ids = KIT.render(processor, messages, add_generation_prompt=add_generation_prompt)
    return processor.tokenizer.decode(ids)


def test_a_prompt_in_full(processor):
    messages = [message("system", "Think first."), message("user", picture(56, 56), "Which digit?", picture(30, 60))]
    assert written(processor, *messages, add_generation_prompt=True) == (
        f"{BOS}{SYSTEM}System: Think first.{EOS}<|User|>: {IMAGE}\nWhich digit?\n{IMAGE}\n\n<|Assistant|>:"
    )


def test_the_default_system_prompt_stands_where_the_checkpoint_asks_for_it(processor):
    assert processor.use_default_system_prompt
    processor.use_default_system_prompt = False
    text = written(processor, message("user", "What is 1 + 2?"), add_generation_prompt=True)
    assert text == f"{BOS}<|User|>: What is 1 + 2?\n\n<|Assistant|>:"


def test_an_answer_ends_with_the_end_token_whether_more_follows_or_not(processor):
    turns = [
        message("user", "1 + 2?"),
        message("assistant", "3"),
        message("user", "2 + 2?"),
        message("assistant", "4"),
    ]
    first = f"{BOS}{SYSTEM}<|User|>: 1 + 2?\n\n<|Assistant|>: 3{EOS}"
    assert written(processor, *turns[:2], add_generation_prompt=False) == first
    assert written(processor, *turns, add_generation_prompt=False) == (
        f"{first}<|User|>: 2 + 2?\n\n<|Assistant|>: 4{EOS}"
    )


def test_images_learn_and_the_side_that_draws_them_is_left_alone(folder, processor):
    actor = make_actor(folder)
    encoded = encode(KIT, processor, [message("user", picture(56, 56), "Which digit?")])
    sequences = torch.tensor([encoded.token_ids])
    next_log_probs(actor, sequences, attention_mask=torch.ones_like(sequences), media=[encoded.media]).sum().backward()
    for name, weight in actor.model.named_parameters():
        assert (weight.grad is None) == name.startswith(KIT.untrained_prefixes), name
    for prefix in KIT.untrained_prefixes:
        assert any(name.startswith(prefix) for name, _ in actor.model.named_parameters()), prefix
