"""The kit of SmolVLM2: videos in a prompt, whose template writes them, what vLLM's prompts have of them, videos alone."""

from typing import Any

import pytest
import torch
from helpers.conversations import clip, message, picture
from helpers.engines import disturb, largest_difference, running_engine, sampled
from helpers.tiny_models import encode, make_actor

from lmm_r1.data.messages import Message, VideoPart
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits import get_kit

KIT = get_kit("smolvlm")
AROUND = "<fake_token_around_image>"
FRAME = f"{AROUND}<global-img>{'<image>' * 4}{AROUND}"
INTRO = "You are provided the following series of {} frames from a {} [H:MM:SS] video.\n\nFrame from 00:00:"


def text(processor: Any, messages: list[Message]) -> str:
    return KIT.chat_text(processor, messages, add_generation_prompt=True)


def test_a_prompt_with_videos_in_full(processor):
    # 3 frames, one in 30 s; 2 frames, two a second.
    slow, short = clip(3, 84, 56, fps=1 / 30), clip(2, 30, 400)
    messages = [
        message("user", "Look:", slow, picture(60, 30)),
        message("assistant", "4"),
        message("user", short, "\n?"),
    ]
    encoded = encode(KIT, processor, messages)
    decode = processor.tokenizer.decode
    written = (
        "<|im_start|>User: Look:{0}{1}\n\n{2}<end_of_utterance>\nAssistant: 4<end_of_utterance>\n"
        "User: {3}{4}\n\n\n?<end_of_utterance>\nAssistant:"
    )
    first, second = INTRO.format("three", "0:01:30"), INTRO.format("two", "0:00:01")
    tiles = "".join(f"{AROUND}<row_1_col_{column}>{'<image>' * 4}" for column in (1, 2)) + "\n\n" + FRAME
    shown = (f"{FRAME}\nFrame from 00:30:{FRAME}\nFrame from 01:00:{FRAME}", f"{FRAME}\nFrame from 00:00:{FRAME}")
    assert decode(encoded.token_ids) == written.format(first, shown[0], tiles, second, shown[1])
    mark = f"{AROUND}<image>"
    assert decode(encoded.engine_token_ids) == written.format(first, mark, "<image>", second, mark)
    assert encoded.media["pixel_values"].shape == (1, 3 + 3 + 2, 3, 84, 84)
    for place, part in ((0, slow), (3, picture(60, 30)), (6, short)):
        alone = encode(KIT, processor, [message("user", part)]).media["pixel_values"]
        assert torch.equal(encoded.media["pixel_values"][:, place : place + alone.shape[1]], alone)


def test_text_beside_a_video_is_tokenized_together_with_what_the_processor_writes(processor):
    """Its first words go on from the text before, and its last line breaks into the text behind."""
    encoded = encode(KIT, processor, [message("user", "Which ", clip(1, 84, 84), "\nDigit?")])
    whole = processor.tokenizer.decode(encoded.token_ids)
    assert encoded.token_ids == processor.tokenizer(whole, add_special_tokens=False)["input_ids"]
    known = encoded.engine_token_ids
    assert processor.tokenizer(processor.tokenizer.decode(known), add_special_tokens=False)["input_ids"] == known
    assert KIT.collapsed(processor, known) == known


def test_how_long_a_video_is_stands_in_what_is_rendered_without_its_frames(processor):
    asked = [message("user", clip(5, 84, 84), "?")]
    videos = [encode(KIT, processor, [message("user", clip(number, 84, 84))]).videos[0] for number in (5, 2)]
    five, two = (KIT.render(processor, asked, add_generation_prompt=True, videos=[video]) for video in videos)
    assert five == encode(KIT, processor, asked).engine_token_ids
    assert "series of two frames from a 0:00:01" in processor.tokenizer.decode(two)


def test_a_template_that_writes_no_videos_gives_way_to_transformers_own_where_there_are_some(processor):
    turns = [message("system", "Think first."), message("user", picture(56, 56), "or", clip(2, 84, 84), "?")]
    assert "video" not in processor.chat_template, "as in the releases"
    theirs = text(processor, turns)
    assert theirs == (
        "<|im_start|>System: Think first.<end_of_utterance>\nUser:<image>or<video>?<end_of_utterance>\nAssistant:"
    )
    shown = "{%- elif part.type == 'video' -%}{{- '<video>!' -}}"
    own = processor.chat_template.replace("{%- elif part.type == 'image'", f"{shown}{{%- elif part.type == 'image'")
    assert own != processor.chat_template
    processor.chat_template = own
    assert text(processor, turns) == theirs.replace("<video>", "<video>!")
    # Without videos, the checkpoint's writes.
    processor.chat_template = "{{- 'Hello' -}}"
    assert text(processor, [message("user", "?")]) == "Hello"


def test_the_mark_of_a_video_is_no_token_and_yet_refused_where_marks_stand_for_videos(processor):
    assert "<video>" not in processor.tokenizer.get_vocab()
    typed = [message("user", "What is <video>?")]
    assert "What is <video>?" in processor.tokenizer.decode(encode(KIT, processor, typed).token_ids)
    with pytest.raises(UserError, match="media token <video>"):
        KIT.chat_text(processor, typed, add_generation_prompt=True)


def test_frames_have_the_size_of_a_tile_whatever_the_video_processors_file_says(folder, processor, tmp_path):
    processor.video_processor.max_image_size = {"longest_edge": 364}
    KIT.save_processor(processor, tmp_path)
    again = KIT.load_processor(str(tmp_path), trust_remote_code=False)
    assert encode(KIT, again, [message("user", clip(2, 84, 56))]).media["pixel_values"].shape == (1, 2, 3, 84, 84)


@pytest.mark.slow
@pytest.mark.full
def test_the_engine_takes_videos_where_no_row_has_an_image(folder, processor, tmp_path):
    actor = make_actor(folder, ban_media_tokens=True)
    disturb(actor, seed=0)
    actor.model.save_pretrained(tmp_path)
    KIT.save_processor(processor, tmp_path)
    parts = [clip(1, 84, 84), clip(40, 30, 60), VideoPart(clip(40, 30, 60).source, fps=0.1)]
    prompts = [encode(KIT, processor, [message("user", part, "Which digit?")]) for part in parts]
    with running_engine(KIT, tmp_path, max_images=0, max_videos=1) as llm:
        samples = sampled(llm, KIT, prompts, banned=actor.banned_token_ids.tolist(), n=2, max_tokens=8)
    assert largest_difference(actor, prompts, samples) <= 1e-4
