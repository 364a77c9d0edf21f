import pytest
from helpers.character_kit import CharacterKit
from helpers.conversations import clip, message, picture, row
from PIL import Image

from lmm_r1.data.row_encoding import encode_row
from lmm_r1.errors import UserError

pytestmark = pytest.mark.unit


class RecordingKit(CharacterKit):
    """Keeps what it is given to encode."""

    def encode(self, processor, messages, **given):
        self.given = given
        return super().encode(processor, [message("user", "a")], **given)


def encode(kit, *parts):
    return encode_row(row(message("user", *parts)), kit=kit, processor=None, add_generation_prompt=True)


def test_images_and_videos_reach_the_kit_decoded_and_in_the_order_of_the_row():
    kit = RecordingKit()
    encode(kit, clip(2, 8, 6, fps=4.0), picture(5, 4), "a", clip(3, 6, 4), picture(7, 4))
    assert [image.size for image in kit.given["images"]] == [(5, 4), (7, 4)]
    assert [(video.frames.shape, video.fps) for video in kit.given["videos"]] == [
        ((2, 6, 8, 3), 4.0),
        ((3, 4, 6, 3), 2.0),
    ]
    assert kit.given["add_generation_prompt"] is True


def test_what_the_kit_refuses_is_told_with_the_rows_place():
    with pytest.raises(UserError, match="^rows.jsonl, line 1: an image is too small"):
        encode(CharacterKit(), Image.new("RGB", (1, 1)))
