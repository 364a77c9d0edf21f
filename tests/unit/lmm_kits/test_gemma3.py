import json
from pathlib import Path

import pytest
import torch
from helpers.conversations import message, picture
from helpers.engines import disturb, largest_difference, running_engine, sampled
from helpers.passes import logits_of
from helpers.tiny_models import encode, make_actor, pad
from jinja2 import TemplateError

from lmm_r1.errors import UserError
from lmm_r1.lmm_kits import get_kit
from lmm_r1.models.actor import KitActor

KIT = get_kit("gemma3")
SMALL, WIDE = picture(56, 56), picture(140, 84)
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def actor(folder: Path) -> KitActor:
    return make_actor(folder)


def attend_causally(actor: KitActor) -> torch.utils.hooks.RemovableHandle:
    """Let the model forget which tokens are an image's, until the handle is removed."""

    def forget(module, args, kwargs):
        return args, {key: value for key, value in kwargs.items() if key != "token_type_ids"}

    return actor.model.register_forward_pre_hook(forget, with_kwargs=True)


def test_line_breaks_beside_an_image_are_one_token(processor):
    messages = [message("system", "Think first.\n"), message("user", SMALL, "Which digit?")]
    tokens = processor.tokenizer.convert_ids_to_tokens(encode(KIT, processor, messages).engine_token_ids)
    place = tokens.index("<image_soft_token>")
    # One of the text, two that the template writes after a system turn, and two that open an image.
    assert tokens[place - 2 : place + 3] == [
        "\n\n\n\n\n",
        "<start_of_image>",
        "<image_soft_token>",
        "<end_of_image>",
        "\n\n",
    ]


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ([message("user", "hello"), message("user", "are you there?")], TemplateError),
        ([message("assistant", "hello")], TemplateError),
        ([message("system", SMALL), message("user", "hello")], TemplateError),
        ([message("system", "Look:", SMALL), message("user", "hello")], UserError),
    ],
    ids=["two user turns", "assistant first", "image as system turn", "image in the system turn"],
)
def test_turns_that_the_template_cannot_write_are_refused(processor, messages, error):
    with pytest.raises(error):
        encode(KIT, processor, messages)


def test_the_end_token_is_the_end_of_a_turn_where_the_checkpoint_names_the_end_of_a_document(
    folder, processor, tmp_path
):
    written = json.loads((folder / "tokenizer_config.json").read_text())["eos_token"]
    stops = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    tokenizer = processor.tokenizer
    assert (written, tokenizer.eos_token) == ("<eos>", "<end_of_turn>")
    assert stops == tokenizer.convert_tokens_to_ids(["<eos>", "<end_of_turn>"])
    processor.save_pretrained(tmp_path)
    again = KIT.load_processor(str(tmp_path), trust_remote_code=False)
    assert again.tokenizer.eos_token == "<end_of_turn>"
    assert again.tokenizer.get_vocab() == tokenizer.get_vocab()


@pytest.mark.parametrize("attention", ["flash_attention_2", "flash_attention_3", "kernels-community/flash-attn2"])
def test_flash_attention_is_refused(folder, attention):
    with pytest.raises(UserError, match="sdpa"):
        KIT.load_model(str(folder), dtype=torch.float32, attn_implementation=attention, trust_remote_code=False)


def test_the_first_token_of_an_image_sees_the_last_one(actor, processor):
    prompt = encode(KIT, processor, [message("user", SMALL, "Which digit?")])
    first = prompt.token_ids.index(actor.model_config.image_token_index)

    def at_first_token() -> torch.Tensor:
        sequences, mask = pad([prompt.token_ids], side="right")
        with torch.no_grad():
            return logits_of(actor, sequences, attention_mask=mask, media=[prompt.media])[0, first]

    def without_last_token(module, args, output):  # (1, 16, width)
        return torch.cat([output[:, :-1], torch.zeros_like(output[:, -1:])], dim=1)

    def change() -> float:
        whole = at_first_token()
        hook = actor.model.model.multi_modal_projector.register_forward_hook(without_last_token)
        cut = at_first_token()
        hook.remove()
        return (whole - cut).abs().max().item()

    assert change() > 1e-3
    handle = attend_causally(actor)
    assert change() == 0.0
    handle.remove()


def test_the_engine_computes_what_the_model_does_without_attention_to_later_tokens_of_an_image(
    folder, processor, tmp_path
):
    actor = make_actor(folder, ban_media_tokens=True)
    disturb(actor, seed=0)
    actor.model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    conversations = [
        [message("user", WIDE, "Which digit is this?")],
        # Five and six line breaks beside images, of which vLLM's own class joins four.
        [message("system", "Think first.\n"), message("user", SMALL, WIDE, "\n", SMALL, "And " + "then " * 150)],
        [message("user", "Which digit?"), message("assistant", "\n\n4"), message("user", SMALL, SMALL)],
    ]
    prompts = [encode(KIT, processor, messages) for messages in conversations]
    with running_engine(KIT, tmp_path, max_images=3) as llm:
        banned = actor.banned_token_ids.tolist()
        samples = sampled(llm, KIT, prompts, banned=banned, n=2, max_tokens=12)
    assert largest_difference(actor, prompts, samples) > TOLERANCE
    handle = attend_causally(actor)
    assert largest_difference(actor, prompts, samples) <= TOLERANCE
    handle.remove()
