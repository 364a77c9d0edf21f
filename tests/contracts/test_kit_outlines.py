"""What is checked of a row before a run, without reading pixels, is what encoding it says later; for every kit."""

import io
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from helpers.tables import kits_with, table
from PIL import Image

from lmm_r1.data.messages import ImagePart, Message, Row, TextPart, VideoPart
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits import KITS, Checkpoint
from lmm_r1.lmm_kits.checkpoint import encode_row, outlined_row

# On both sides of what kits refuse: sides whose ratio is 200, 1,344 or more, and images of which a crop has no height.
SIZES = table("contracts/kit_outlines", "sizes")
BOUNDS = {"as it is": {}, "bounded": {"max_pixels": 28 * 28 * 200}, "scaled up": {"min_pixels": 28 * 28 * 20}}


@pytest.fixture(scope="module")
def checkpoint_of(tiny_checkpoint: Callable[[str], Path]) -> Callable[[str], Checkpoint]:
    return cache(lambda name: Checkpoint(str(tiny_checkpoint(name))))


def row_of(*messages: Message) -> Row:
    return Row(messages=messages, answer="", datasource="", location="rows.jsonl line 7")


def asked(part: ImagePart | VideoPart) -> Row:
    return row_of(Message(role="user", parts=(part, TextPart("Which digit?"))))


def refusal(make: Callable[..., object], row: Row, checkpoint: Checkpoint) -> str | None:
    try:
        make(row, kit=checkpoint.kit, processor=checkpoint.processor, add_generation_prompt=True)
    except UserError as error:
        return str(error)
    return None


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("name", kits_with("images"))
def test_an_image_is_refused_by_its_size_as_it_is_refused_by_its_pixels(checkpoint_of, name, bounds):
    for size in SIZES:
        row = asked(ImagePart(png(Image.new("RGB", size)), **BOUNDS[bounds]))
        found, expected = (refusal(make, row, checkpoint_of(name)) for make in (outlined_row, encode_row))
        assert found == expected, size


@pytest.mark.parametrize("name", kits_with("video"))
def test_so_are_the_frames_of_a_video(checkpoint_of, name):
    for size in [(64, 32), (10, 5000), (2, 398), (2, 402)]:
        for bounds in ({}, {"max_pixels": 28 * 28 * 200}):
            row = asked(VideoPart(tuple(png(Image.new("RGB", size)) for _ in range(4)), **bounds))
            found, expected = (refusal(make, row, checkpoint_of(name)) for make in (outlined_row, encode_row))
            assert (found is None) == (expected is None), (size, bounds, found, expected)


@pytest.mark.parametrize("name", KITS)
def test_the_outline_of_a_conversation_has_the_ids_that_engines_take(checkpoint_of, name):
    checkpoint = checkpoint_of(name)
    image = (ImagePart(Image.new("RGB", (84, 56))),) if checkpoint.kit.takes_images else ()
    turns = [
        Message(role="user", parts=(*image, TextPart("Which digit?"))),
        Message(role="assistant", parts=(TextPart("4"),)),
        Message(role="user", parts=(TextPart("And here? "), *image)),
    ]
    for count, opens in ((3, True), (2, False), (1, True)):
        made = [
            make(
                row_of(*turns[:count]), kit=checkpoint.kit, processor=checkpoint.processor, add_generation_prompt=opens
            )
            for make in (outlined_row, encode_row)
        ]
        assert made[0].engine_token_ids == made[1].engine_token_ids


def test_a_template_that_refuses_a_conversation_is_a_sentence_with_the_row(checkpoint_of):
    plain = checkpoint_of("llm")
    template = "{{ raise_exception('roles must alternate') }}"
    processor = plain.kit.load_processor(plain.path, trust_remote_code=False)
    processor.chat_template = template
    row = row_of(*[Message(role="user", parts=(TextPart("Hi."),))] * 2)
    for make in (outlined_row, encode_row):
        with pytest.raises(
            UserError, match=r"^rows.jsonl line 7: the checkpoint's chat template refuses .*must alternate"
        ):
            make(row, kit=plain.kit, processor=processor, add_generation_prompt=True)
