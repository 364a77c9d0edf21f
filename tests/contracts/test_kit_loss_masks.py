"""What is in a loss where images and videos stand in a model's own turns: its words and its end token, nothing of the media."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.conversations import as_written, clip, message, picture
from helpers.conversations import row as row_of
from helpers.tables import kits_with

from lmm_r1.data.messages import ImagePart, Message, PreferenceRow, Row, VideoPart
from lmm_r1.data.row_parser import OWN_NAMES, parse_row
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits import Checkpoint
from lmm_r1.supervised.pairs import encode_pair
from lmm_r1.supervised.samples import SFTSample, encode_sample

CASE = Path(__file__).parents[1] / "data" / "cases" / "F04_image_in_assistant_turn.jsonl"
IMAGE_KITS = kits_with("images")
# Their chat template writes no media in the model's turns, so that such rows are refused.
REFUSING = ("glm4v", "glm4v_moe")
WIDE, TALL, SHORT = picture(140, 84), picture(84, 112), clip(3, 112, 84)
ASKED = message("user", WIDE, "Draw it in blue.")
BEGINNING, MIDDLE, END = "Here it is:", "7 < 8. Frame1: <0.5 seconds>", "Done."
THOUGHT = "<think> 1 < 2\n</think>"
# Of a turn that begins with a medium.
FIRST = "|"


def samples_of(checkpoint: Checkpoint, row: Row, **settings: bool) -> SFTSample:
    settings = {"every_turn": True, **settings}
    sample = encode_sample(row, kit=checkpoint.kit, processor=checkpoint.processor, max_len=100_000, **settings)
    assert sample is not None
    return sample


def learnt(checkpoint: Checkpoint, sample: SFTSample) -> str:
    """The text of the loss tokens, without spaces and line breaks; sees that none of them is banned."""
    ids = [token for token, counts in zip(sample.token_ids, sample.loss_mask, strict=True) if counts]
    assert set(checkpoint.banned_token_ids).isdisjoint(ids)
    return "".join(checkpoint.tokenizer.decode(ids).split())


def said(checkpoint: Checkpoint, *turns: str) -> str:
    """The texts that are learnt of turns, without spaces; what a template writes before a medium at the beginning is not."""
    name = checkpoint.kit.model_type
    written = (turn.removeprefix(FIRST) if turn.startswith(FIRST) else as_written(name, turn) for turn in turns)
    return "".join("".join(turn.split()) + checkpoint.tokenizer.eos_token for turn in written)


def turns_with(medium: ImagePart | VideoPart | object) -> dict[str, list[Message]]:
    """Answers with a medium at each place, by what is to be learnt of them."""
    return {
        BEGINNING + END: [message("assistant", BEGINNING, medium, END)],
        BEGINNING: [message("assistant", BEGINNING, medium)],
        FIRST + END: [message("assistant", medium, END)],
        BEGINNING + MIDDLE + END: [message("assistant", f"{BEGINNING}\n", medium, MIDDLE, medium, f"\n{END}")],
        f"{FIRST} {END}": [message("assistant", medium, medium, f"  {END}")],
        f"{THOUGHT}{END}{MIDDLE}": [message("assistant", f"{THOUGHT} {END}", medium, MIDDLE)],
    }


def check(checkpoint: Checkpoint, medium: object) -> None:
    for text, (answer,) in turns_with(medium).items():
        first, last = message("assistant", medium, MIDDLE), message("assistant", END)
        row = row_of(ASKED, first, message("user", "And ", medium, "?"), answer, message("user", WIDE), last)
        sample = samples_of(checkpoint, row)
        assert learnt(checkpoint, sample) == said(checkpoint, FIRST + MIDDLE, text, END)
        short = samples_of(checkpoint, row_of(ASKED, answer), every_turn=False)
        assert learnt(checkpoint, short) == said(checkpoint, text)
        learnt(checkpoint, samples_of(checkpoint, row, every_token=True))


@pytest.mark.parametrize("name", [name for name in IMAGE_KITS if name not in REFUSING])
def test_of_a_turn_with_images_the_loss_takes_its_words_and_its_end(name, tiny_checkpoint):
    check(Checkpoint(str(tiny_checkpoint(name))), TALL)


@pytest.mark.parametrize("name", [name for name in kits_with("video") if name not in REFUSING])
def test_of_a_turn_with_videos_the_loss_takes_its_words_and_its_end(name, tiny_checkpoint):
    check(Checkpoint(str(tiny_checkpoint(name))), SHORT)


@pytest.mark.parametrize("name", REFUSING)
def test_a_template_that_writes_no_media_in_the_models_turns_refuses_them(name, tiny_checkpoint):
    checkpoint = Checkpoint(str(tiny_checkpoint(name)))
    for medium in (TALL, SHORT):
        with pytest.raises(UserError, match="line 1: the checkpoint's chat template writes . placeholders for the 2"):
            samples_of(checkpoint, row_of(message("user", medium), message("assistant", BEGINNING, medium)))


@pytest.mark.parametrize("name", [name for name in IMAGE_KITS if name not in REFUSING])
def test_of_pairs_whose_answers_have_images_the_loss_takes_the_words(name, tiny_checkpoint):
    checkpoint = Checkpoint(str(tiny_checkpoint(name)))
    row = PreferenceRow(
        messages=(ASKED,),
        chosen=(message("assistant", BEGINNING, TALL, END),),
        rejected=(message("assistant", TALL, MIDDLE),),
        margin=None,
        location="rows.jsonl, line 1",
        datasource="test",
    )
    pair = encode_pair(row, kit=checkpoint.kit, processor=checkpoint.processor, max_len=100_000)
    assert learnt(checkpoint, pair.chosen) == said(checkpoint, BEGINNING + END)
    assert learnt(checkpoint, pair.rejected) == said(checkpoint, FIRST + MIDDLE)


@pytest.mark.parametrize("name", [name for name in IMAGE_KITS if name not in REFUSING])
def test_the_case_of_an_image_in_an_assistants_turn_teaches_its_words(name, tiny_checkpoint):
    checkpoint = Checkpoint(str(tiny_checkpoint(name)))
    for number, line in enumerate(CASE.read_text().splitlines(), start=1):
        row = parse_row(
            json.loads(line),
            location=f"{CASE.name} line {number}",
            base_dir=CASE.parent,
            names=replace(OWN_NAMES, prompt="messages"),
            answer_required=False,
        )
        assert learnt(checkpoint, samples_of(checkpoint, row)) == said(checkpoint, "Here it is:Done.")
