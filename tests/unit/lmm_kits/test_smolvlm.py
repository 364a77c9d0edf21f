"""The kit of SmolVLM2: videos in a prompt, whose template writes them, what vLLM's prompts have of them, videos alone."""

import torch
from helpers.conversations import clip, message, picture
from helpers.tiny_models import encode

from lmm_r1.lmm_kits import get_kit

KIT = get_kit("smolvlm")
AROUND = "<fake_token_around_image>"
FRAME = f"{AROUND}<global-img>{'<image>' * 4}{AROUND}"
INTRO = "You are provided the following series of {} frames from a {} [H:MM:SS] video.\n\nFrame from 00:00:"


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
