"""Pairs of responses as samples: ids and loss masks worked out by hand, and what the two sides have in common."""

import pytest
from helpers.character_kit import AFTER_IMAGE, END, IMAGE, NEWLINE, PLACEHOLDER, CharacterKit
from helpers.conversations import message

from lmm_r1.data.messages import Message, PreferenceRow
from lmm_r1.errors import UserError
from lmm_r1.supervised.pairs import PairBatch, PairSample, encode_pair, sides_for_model


def pair(*prompt: Message, chosen: str | Message, rejected: str | Message, plain: bool = False) -> PreferenceRow:
    sides = [message("assistant", side) if isinstance(side, str) else side for side in (chosen, rejected)]
    return PreferenceRow(
        messages=prompt,
        chosen=(sides[0],),
        rejected=(sides[1],),
        margin=None,
        location="rows.jsonl line 1",
        plain=plain,
    )


def encoded(row: PreferenceRow, *, kit: CharacterKit | None = None, max_len: int = 64) -> PairSample | None:
    return encode_pair(row, kit=kit or CharacterKit(), processor=None, max_len=max_len)


def test_the_loss_takes_the_responses_and_their_ends_alone():
    sample = encoded(pair(message("user", "q"), chosen="ab", rejected="c"))
    prompt = [ord("u"), ord("q"), END, NEWLINE, ord("a")]
    assert sample.chosen.token_ids == [*prompt, *b"ab", END, NEWLINE]
    assert sample.chosen.loss_mask == [False] * 5 + [True] * 3 + [False]
    assert sample.rejected.token_ids == [*prompt, *b"c", END, NEWLINE]
    assert sample.rejected.loss_mask == [False] * 5 + [True] * 2 + [False]


def test_an_assistant_turn_of_the_prompt_is_no_loss_token():
    turns = (message("user", "q"), message("assistant", "r"), message("user", "s"))
    sample = encoded(pair(*turns, chosen="ab", rejected="c"))
    assert sum(sample.chosen.loss_mask) == 3
    assert sum(sample.rejected.loss_mask) == 2


def test_the_images_of_the_prompt_are_encoded_once_and_are_the_same_object_on_both_sides():
    kit = CharacterKit()
    sample = encoded(pair(message("user", "x", IMAGE, "?"), chosen="ab", rejected="ac"), kit=kit)
    prompt = [*b"ux", *[PLACEHOLDER] * 3, AFTER_IMAGE, ord("?"), END, NEWLINE, ord("a")]
    assert sample.chosen.token_ids == [*prompt, *b"ab", END, NEWLINE]
    assert sample.rejected.token_ids == [*prompt, *b"ac", END, NEWLINE]
    assert sample.rejected.loss_mask == [False] * len(prompt) + [True] * 3 + [False]
    assert sample.rejected.media is sample.chosen.media
    assert kit.encoded == 1


def test_plain_text_goes_in_as_it_stands():
    sample = encoded(pair(message("user", "q:"), chosen="ab", rejected="c", plain=True))
    assert sample.chosen.token_ids == [*b"q:ab", END]
    assert sample.rejected.loss_mask == [False, False, True, True]


@pytest.mark.parametrize("role", ["user", "system"])
def test_a_side_without_a_turn_of_the_assistant_is_refused(role):
    with pytest.raises(UserError, match="^rows.jsonl line 1: a response of the assistant must follow a prompt"):
        encoded(pair(message("user", "q"), chosen="a", rejected=message(role, "b")))


def test_a_batch_holds_the_chosen_sides_first_and_a_filler_counts_for_nothing():
    sample = encoded(pair(message("user", "q"), chosen="ab", rejected="c"))
    batch = PairBatch(sides=sides_for_model([sample, sample.filler]))
    assert [len(side.token_ids) for side in batch.sides] == [9, 9, 8, 8]
    assert batch.sides[0].token_ids.tolist() == batch.sides[1].token_ids.tolist()
    assert [int(side.loss_mask.sum()) for side in batch.sides] == [3, 0, 2, 0]
    assert batch.weights.tolist() == [1.0, 0.0]
