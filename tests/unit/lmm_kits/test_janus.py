"""The kit of Janus: the prompt in its exact form, the end of an answer, what learns, and why there is no rollout."""

import json
import shutil
from typing import Any

import torch
from helpers.conversations import message, picture
from helpers.passes import next_log_probs
from helpers.tiny_models import encode, make_actor
from transformers import JanusConfig, JanusForConditionalGeneration

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


def test_a_prompt_is_what_transformers_makes_of_the_chat_in_one_call(processor):
    image = picture(56, 84)
    chat = [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "Which?"}]}]
    # As a batch of one: the processor takes a single text for a list of characters.
    expected = processor.apply_chat_template([chat], tokenize=True, return_dict=True, add_generation_prompt=True)
    encoded = encode(KIT, processor, [message("user", image, "Which?")])
    assert encoded.token_ids == expected["input_ids"][0].tolist()
    assert torch.equal(encoded.media["pixel_values"], expected["pixel_values"])


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


def test_an_output_layer_of_its_own_survives_a_config_that_does_not_speak_of_tying(folder, tmp_path):
    # The config class ties by default.
    saved = shutil.copytree(folder, tmp_path / "released")
    config = json.loads((saved / "config.json").read_text())
    del config["tie_word_embeddings"]
    (saved / "config.json").write_text(json.dumps(config))
    assert JanusConfig.from_pretrained(saved).tie_word_embeddings
    models = [make_actor(path).model for path in (folder, saved)]
    assert torch.equal(models[0].lm_head.weight, models[1].lm_head.weight)
    assert not torch.equal(models[1].lm_head.weight, models[1].model.language_model.embed_tokens.weight)
    models[1].save_pretrained(tmp_path / "again")
    assert torch.equal(make_actor(tmp_path / "again").model.lm_head.weight, models[0].lm_head.weight)


def test_vllm_still_has_no_way_to_run_it():
    from vllm import ModelRegistry

    assert KIT.engine_refusal
    assert "JanusForConditionalGeneration" not in ModelRegistry.get_supported_archs()
    # What vLLM's Transformers backend asks of a model class.
    assert not JanusForConditionalGeneration.is_backend_compatible()


def test_the_released_models_filler_is_one_image_of_576_placeholders():
    # 384 pixels in patches of 16: 24 x 24.
    ids, media = KIT.filler_media(JanusConfig(image_token_id=7))
    assert ids == [7] * 576
    assert media["pixel_values"].shape == (1, 3, 384, 384)
