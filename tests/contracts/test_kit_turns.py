"""A turn that is added to what a model has generated: prompt, turns and observations are the conversation encoded whole."""

from itertools import chain

import pytest
import torch
from helpers.conversations import as_written, message, picture
from helpers.tables import kits_with
from helpers.tiny_models import encode
from PIL import Image

from lmm_r1.data.messages import Message, images_of
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits import EncodedPrompt, LmmKit, get_kit
from lmm_r1.lmm_kits.checkpoint import encode_turn, without_end

# Those that an engine can run: the others take no part in RL.
PLAYING = kits_with("RL")
IMAGE_KITS = [name for name in PLAYING if get_kit(name).takes_images]
SMALL, WIDE, TALL = picture(56, 56), picture(140, 84), picture(84, 112)
QUESTION = message("user", "Which digit is this?")
PICTURED = message("user", WIDE, "Which digit is this?")
SAID = ("<think>look</think> 4", "Then it is 46.")
OBSERVED = (message("user", "Are you sure?"), message("user", "Add 12. "))
CROPPED = (message("user", "Here it is: ", SMALL, "."), message("user", TALL, WIDE, "And these?"))


def turn_of(kit: LmmKit, processor: object, said: Message, **settings: str) -> EncodedPrompt:
    images = [part.source for part in images_of([said]) if isinstance(part.source, Image.Image)]
    return encode_turn(kit, processor, said, images=images, **settings)


def pieces(kit: LmmKit, processor: object, first: Message, observed: tuple[Message, ...]) -> list[list[int]]:
    """The expanded ids of the prompt, and in turns of what the model says and what it is told."""
    tokenizer = kit.tokenizer_of(processor)
    ids = [list(encode(kit, processor, [first]).token_ids)]
    for text, said in zip(SAID, observed, strict=True):
        ids += [tokenizer(as_written(kit.model_type, text), add_special_tokens=False)["input_ids"]]
        ids.append(turn_of(kit, processor, said).token_ids)
    return ids


def whole(first: Message, observed: tuple[Message, ...]) -> list[Message]:
    turns = [(message("assistant", text), said) for text, said in zip(SAID, observed, strict=True)]
    return [first, *chain.from_iterable(turns)]


@pytest.mark.parametrize("name", PLAYING)
def test_turns_of_text_are_the_conversation(kit, processor):
    expected = encode(kit, processor, whole(QUESTION, OBSERVED)).token_ids
    assert list(chain.from_iterable(pieces(kit, processor, QUESTION, OBSERVED))) == list(expected)


@pytest.mark.parametrize("name", IMAGE_KITS)
def test_turns_with_images_are_the_conversation_with_its_media(kit, processor):
    expected = encode(kit, processor, whole(PICTURED, CROPPED))
    assert list(chain.from_iterable(pieces(kit, processor, PICTURED, CROPPED))) == list(expected.token_ids)
    parts = [encode(kit, processor, [PICTURED]), *(turn_of(kit, processor, said) for said in CROPPED)]
    merged = kit.merge_media([part.media for part in parts])
    assert merged.keys() == expected.media.keys()
    for key, tensor in merged.items():
        torch.testing.assert_close(tensor, expected.media[key], rtol=0, atol=0)
    assert [image.size for part in parts for image in part.images] == [image.size for image in expected.images]


@pytest.mark.parametrize("name", IMAGE_KITS)
def test_the_engine_gets_what_it_gets_of_the_whole_conversation(kit, processor):
    expected = encode(kit, processor, whole(PICTURED, CROPPED)).engine_token_ids
    turn = turn_of(kit, processor, CROPPED[1])
    assert turn.engine_token_ids == expected[-len(turn.engine_token_ids) :]
    assert len(turn.engine_token_ids) < len(turn.token_ids)


@pytest.mark.parametrize("name", PLAYING)
def test_the_end_token_stands_once_whoever_writes_it(kit, processor):
    tokenizer, turn = kit.tokenizer_of(processor), turn_of(kit, processor, OBSERVED[0])
    cut_off = tokenizer(SAID[0], add_special_tokens=False)["input_ids"]
    assert without_end(turn, cut_off) == turn
    ended = [*cut_off, turn.token_ids[0]]
    assert [*ended, *without_end(turn, ended).token_ids] == [*cut_off, *turn.token_ids]
    assert turn.token_ids[0] == tokenizer.eos_token_id


@pytest.mark.parametrize("name", PLAYING)
def test_the_next_turn_may_be_begun(kit, processor):
    begun = kit.tokenizer_of(processor)("<think>", add_special_tokens=False)["input_ids"]
    plain = turn_of(kit, processor, OBSERVED[0])
    assert turn_of(kit, processor, OBSERVED[0], prefill="<think>").token_ids == [*plain.token_ids, *begun]


def behind(kit: LmmKit, processor: object, said: Message) -> str:
    """What the chat template writes between the model's turn and its next one, where the message is said to it."""
    spoken = [QUESTION, message("assistant", SAID[1]), said]
    return kit.chat_text(processor, spoken, add_generation_prompt=True).split(SAID[1])[1]


def same_media(one: EncodedPrompt, other: EncodedPrompt) -> None:
    assert (one.token_ids, one.engine_token_ids) == (other.token_ids, other.engine_token_ids)
    assert [image.tobytes() for image in one.images] == [image.tobytes() for image in other.images]
    assert (one.media or {}).keys() == (other.media or {}).keys()
    for key, tensor in (one.media or {}).items():
        torch.testing.assert_close(tensor, other.media[key], rtol=0, atol=0)


@pytest.mark.parametrize("name", PLAYING)
def test_a_text_with_the_templates_marks_is_the_turn_or_the_prompt_that_it_writes(kit, processor):
    written = behind(kit, processor, OBSERVED[0])
    same_media(kit.encode_text(processor, written, images=[], opens=False), turn_of(kit, processor, OBSERVED[0]))
    prompt = kit.chat_text(processor, [QUESTION], add_generation_prompt=True)
    same_media(kit.encode_text(processor, prompt, images=[], opens=True), encode(kit, processor, [QUESTION]))


@pytest.mark.parametrize("name", IMAGE_KITS)
def test_a_text_with_marks_of_images_is_the_turn_or_the_prompt_that_it_writes(kit, processor):
    for said in CROPPED:
        images = [part.source for part in images_of([said])]
        text = behind(kit, processor, said)
        same_media(kit.encode_text(processor, text, images=images, opens=False), turn_of(kit, processor, said))
    prompt = kit.chat_text(processor, [PICTURED], add_generation_prompt=True)
    same_media(kit.encode_text(processor, prompt, images=[WIDE], opens=True), encode(kit, processor, [PICTURED]))


@pytest.mark.parametrize("name", PLAYING)
def test_a_piece_of_text_has_no_start_token(kit, processor):
    tokenizer = kit.tokenizer_of(processor)
    ids = kit.encode_text(processor, "Again. ", images=[], opens=False).token_ids
    assert ids == tokenizer("Again. ", add_special_tokens=False)["input_ids"]


def test_a_template_that_forgets_turns_is_refused(tiny_checkpoint):
    kit = get_kit("llm")
    processor = kit.load_processor(str(tiny_checkpoint("llm")), trust_remote_code=False)
    processor.chat_template = "{{ messages[-1]['content'] }}"
    with pytest.raises(UserError, match="does not write a conversation turn by turn"):
        turn_of(kit, processor, OBSERVED[0])
