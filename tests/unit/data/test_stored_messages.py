"""Messages written to a row file and read back."""

import io
from pathlib import Path

import pytest
from PIL import Image

from lmm_r1.data.images import load_image
from lmm_r1.data.messages import ImagePart, Message, TextPart, VideoPart, images_of
from lmm_r1.data.row_parser import parse_row
from lmm_r1.data.stored_messages import stored_messages

pytestmark = pytest.mark.unit


def read_back(messages):
    stored = {"messages": stored_messages(messages)}
    return parse_row(stored, location="row", base_dir=Path("/nowhere"), answer_required=False).messages


@pytest.mark.parametrize(
    "parts",
    [
        (TextPart("What is 1+1?"),),
        (TextPart("the text <image> is a word here"),),
        (ImagePart("/a/b.png", max_pixels=784), TextPart("What?")),
        (ImagePart("https://example.com/a.png"), ImagePart("data:image/png;base64,AAAA"), TextPart("<video>")),
        (VideoPart("/a/b.mp4", fps=2.0, max_frames=8), TextPart("What?")),
        (VideoPart(("/a/1.png", "/a/2.png"), min_pixels=56), TextPart("What?")),
    ],
)
def test_what_is_text_already_comes_back_as_it_was(parts):
    messages = (Message(role="system", parts=(TextPart("Be brief."),)), Message(role="user", parts=parts))
    assert read_back(messages) == messages


@pytest.mark.parametrize("form", ["pil", "png", "jpeg"])
def test_other_images_come_back_with_the_same_pixels(form):
    image = Image.effect_noise((20, 10), 50).convert("RGB")
    source = image
    if form != "pil":
        buffer = io.BytesIO()
        image.save(buffer, format=form)
        source = buffer.getvalue()
    before = ImagePart(source)
    [after] = images_of(read_back((Message(role="user", parts=(before, TextPart("?"))),)))
    assert str(after.source).startswith(f"data:image/{'jpeg' if form == 'jpeg' else 'png'};base64,")
    assert load_image(after, location="").tobytes() == load_image(before, location="").tobytes()
