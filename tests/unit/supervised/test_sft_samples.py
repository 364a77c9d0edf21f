from dataclasses import replace

import pytest
import torch
from helpers.character_kit import END, IMAGE, NEWLINE, PLACEHOLDER, CharacterKit
from helpers.conversations import message, row

from lmm_r1.errors import UserError
from lmm_r1.supervised import batch_indices
from lmm_r1.supervised.samples import SFTSample, encode_sample


def encode(*messages, max_len=100, every_turn=False, kit=None):
    return encode_sample(
        row(*messages), kit=kit or CharacterKit(), processor=None, max_len=max_len, every_turn=every_turn
    )


def loss_positions(sample):
    return [index for index, counts in enumerate(sample.loss_mask) if counts]


def test_the_content_of_the_assistants_turn_and_its_end_token_are_in_the_loss():
    sample = encode(message("user", "hi"), message("assistant", "ok"))
    assert sample.token_ids == [*b"uhi", END, NEWLINE, *b"aok", END, NEWLINE]
    assert loss_positions(sample) == [6, 7, 8]
    assert sample.media is None


def test_every_assistant_turn_is_in_the_loss_only_when_asked_for():
    turns = [message("user", "a"), message("assistant", "b"), message("user", IMAGE), message("assistant", "cd")]
    # 0 u a END \n  4 a b END \n  8 u <image x 3> </image> END \n  15 a c d END \n
    assert loss_positions(encode(*turns, every_turn=True)) == [5, 6, 16, 17, 18]
    assert loss_positions(encode(*turns)) == [16, 17, 18]


class CaptioningKit(CharacterKit):
    """Writes a colon between the placeholders of an image, as kits do with the times of a video's frames."""

    def encode(self, processor, messages, **settings):
        encoded = super().encode(processor, messages, **settings)
        ids = []
        for token in encoded.token_ids:
            ids += [ord(":"), token] if token == PLACEHOLDER else [token]
        return replace(encoded, token_ids=ids)


def test_turns_before_between_and_behind_media_are_found_whatever_the_media_expand_to():
    turns = [
        message("user", "a"),
        message("assistant", "b"),
        message("user", IMAGE),
        message("assistant", "cd"),
        message("user", "e", IMAGE),
        message("assistant", "f"),
    ]
    sample = encode(*turns, every_turn=True, kit=CaptioningKit())
    # 0 u a END \n  4 a b END \n  8 u <: image> x 3 </image> END \n  18 a c d END \n  23 u e <...> END \n  34 a f END \n
    assert [sample.token_ids[index] for index in (18, 34)] == [ord("a"), ord("a")]
    assert loss_positions(sample) == [5, 6, 19, 20, 21, 35, 36]


def test_a_sample_longer_than_the_limit_is_left_out_and_never_cut():
    turns = (message("user", "hi"), message("assistant", "ok"))
    assert len(encode(*turns, max_len=10).token_ids) == 10
    assert encode(*turns, max_len=9) is None


@pytest.mark.parametrize(
    ("turns", "every_turn"),
    [
        ([message("user", "hi")], False),
        ([message("assistant", "hi")], False),
        ([message("assistant", "hi"), message("user", "a"), message("assistant", "b")], True),
    ],
)
def test_a_row_without_a_prompt_and_a_response_is_refused_with_its_place(turns, every_turn):
    with pytest.raises(UserError, match="rows.jsonl, line 1: an assistant turn must follow a prompt"):
        encode(*turns, every_turn=every_turn)


class EndlessKit(CharacterKit):
    """Its template ends no turn."""

    def _ids(self, messages, **settings):
        return [token for token in super()._ids(messages, **settings) if token != END]


class ForgetfulKit(CharacterKit):
    """Its template writes an assistant turn in full only while it is the last one, as some do with reasoning."""

    def _ids(self, messages, **settings):
        last = len(messages) - 1
        shown = [
            message("assistant", "-") if turn.role == "assistant" and index < last else turn
            for index, turn in enumerate(messages)
        ]
        return super()._ids(shown, **settings)


def test_a_template_without_an_end_token_is_refused():
    with pytest.raises(
        UserError, match="ends an assistant turn with 'ok.*', in which the tokenizer's end token <end> is missing"
    ):
        encode(message("user", "hi"), message("assistant", "ok"), kit=EndlessKit())


def test_a_template_that_rewrites_earlier_turns_can_teach_the_last_turn_only():
    turns = [message("user", "a"), message("assistant", "long"), message("user", "b"), message("assistant", "c")]
    sample = encode(*turns, kit=ForgetfulKit())
    assert [sample.token_ids[index] for index in loss_positions(sample)] == [ord("c"), END]
    with pytest.raises(UserError, match="the messages up to 2 differently when more follow"):
        encode(*turns, kit=ForgetfulKit(), every_turn=True)


def test_a_model_gets_a_mark_at_the_token_before_each_loss_token():
    media = {"pixels": 1}
    sample = SFTSample(token_ids=[8, 9, 10, 11, 12], loss_mask=[True, False, True, False, True], media=media)
    given = sample.for_model(group=3)
    assert given.token_ids.tolist() == [8, 9, 10, 11, 12]
    assert given.loss_mask.tolist() == [False, True, False, True]
    assert (given.media, given.group, given.prompt_tokens) == (media, 3, 0)
    assert replace(sample, loss_mask=[False, False, True, True, True]).for_model().prompt_tokens == 2
    assert replace(sample, loss_mask=[False] * 5).for_model().loss_mask.dtype is torch.bool


def epoch(number, *, seed=7):
    steps = range(4 * number, 4 * number + 4)
    return [
        index
        for step in steps
        for index in batch_indices(num_rows=10, batch_size=3, seed=seed, step=step, keep_order=False)
    ]


def test_an_epoch_shows_each_row_once_in_an_order_of_its_own():
    first, second = epoch(0), epoch(1)
    for order in (first, second):
        assert sorted(order) == list(range(10))
    assert first != second
    assert first != epoch(0, seed=8)


def test_the_rows_of_a_step_depend_on_the_step_alone():
    assert epoch(2) == epoch(2)
    full = [
        index
        for step in range(2)
        for index in batch_indices(num_rows=6, batch_size=3, seed=0, step=step, keep_order=False)
    ]
    assert sorted(full) == list(range(6))
