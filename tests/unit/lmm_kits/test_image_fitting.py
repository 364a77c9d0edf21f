"""Prompts that are too long only because of their images, which are scaled down until they fit."""

from dataclasses import replace

import pytest
from helpers.conversations import message, row
from helpers.sessions import configured
from PIL import Image

from lmm_r1.config import DPOConfig, SFTConfig
from lmm_r1.data.messages import ImagePart, PreferenceRow, images_of
from lmm_r1.lmm_kits import Checkpoint, EncodedPrompt
from lmm_r1.lmm_kits.checkpoint import ImageFitting, encode_row, outlined_row
from lmm_r1.supervised.pairs import PairEncoder
from lmm_r1.supervised.sft import RowEncoder

# Of the released checkpoints, where a token is a square of 28 x 28 pixels.
RELEASED = {"shortest_edge": 56 * 56, "longest_edge": 12845056}
PHOTO = (4032, 3024)  # 144 x 108 tokens


@pytest.fixture
def released(tiny_checkpoint) -> Checkpoint:
    model = Checkpoint(str(tiny_checkpoint("qwen2_5_vl")))
    model.processor.image_processor.size = dict(RELEASED)
    return model


def asking(*sizes, **bounds):
    return row(message("user", "Where?", *(ImagePart(Image.new("RGB", size), **bounds) for size in sizes)))


@pytest.mark.parametrize(
    ("sizes", "texts", "limits", "after"),
    [
        # 1000 of 15552 tokens, half of what the text leaves: 144 and 108 times the root of their share, 36 x 27.
        ([PHOTO], 48, {}, [((1008, 756), 972)]),
        ([PHOTO], 24, {"least": 1024, "wanted": 1024}, [((1008, 756), 972)]),
        # 3000, all but the 1024 that are wanted: 63 x 47.
        ([PHOTO], 72, {"max_len": 4096, "wanted": 1024}, [((1764, 1316), 2961)]),
        # All 2000, because the response is in the row: 51 x 38.
        ([PHOTO], 48, {"least": 0, "wanted": 0}, [((1428, 1064), 1938)]),
        # Of 500 x 5 tokens, 316 x 3.
        ([(14000, 140)], 48, {}, [((8848, 84), 948)]),
        # A side has at least 28 pixels.
        ([(5600, 28)], 1960, {}, [((1232, 28), 44)]),
        # In proportion, 32 x 24 and 16 x 12.
        ([PHOTO, (2016, 1512)], 48, {}, [((896, 672), 768), ((448, 336), 192)]),
    ],
)
def test_images_share_the_tokens_that_are_left_for_them(released, sizes, texts, limits, after):
    asked, outline = asking(*sizes), EncodedPrompt.of_text([0] * (texts + len(sizes)))
    fitting = ImageFitting(checkpoint=released, **{"max_len": 2048, "wanted": None, **limits})
    found = fitting.fitted(asked, outline)
    assert released.kit.shown_images(released.processor, images_of(found.messages), sizes) == after
    pairs = ", ".join(f"{w}x{h} to {x}x{y}" for (w, h), ((x, y), _) in zip(sizes, after, strict=True))
    assert (
        f"images of 1 prompts scaled down to fit into {fitting.max_len:,} tokens, such as {pairs} in {asked.location};"
        in (fitting.told(prefix="--"))
    )
    assert fitting.fitted(found, outline) is found, "what fits is left alone"


def test_a_prompt_that_no_scaling_helps_stays_as_it_is(released):
    fitting = ImageFitting(checkpoint=released, max_len=2048, least=1024, wanted=1024)
    linked = row(message("user", ImagePart("https://a/photo.jpg")))
    # The text alone is too long; it leaves 3 tokens, and the smallest image has 4.
    for asked, texts in ((asking(PHOTO), 1100), (asking(PHOTO), 1021), (asking((840, 560)), 48), (linked, 48)):
        assert fitting.fitted(asked, EncodedPrompt.of_text([0] * (texts + 1))) is asked
    bounded = asking(PHOTO, min_pixels=2_000_000)
    assert fitting.fitted(bounded, EncodedPrompt.of_text([0] * 49)) is bounded
    assert fitting.told(prefix="--") is None


@pytest.mark.parametrize(
    ("name", "size", "budget"),
    [
        ("qwen2_5_vl", (420, 300), 41),
        ("glm4v", (420, 300), 41),
        # The smallest images have 104 and 477 tokens.
        ("llava_onevision", (420, 300), 110),
        ("phi4_multimodal", (1400, 1000), 1000),
    ],
)
@pytest.mark.parametrize("bound", [None, 60_000])
def test_tokens_are_counted_as_the_processor_makes_them_and_boxes_scaled_as_the_image(
    name, size, budget, bound, tiny_checkpoint
):
    model = Checkpoint(str(tiny_checkpoint(name)))
    asked = asking(size, max_pixels=bound)
    own = {"kit": model.kit, "processor": model.processor, "add_generation_prompt": True}
    found, outline = encode_row(asked, **own), outlined_row(asked, **own)
    [(within, tokens)] = model.kit.shown_images(model.processor, images_of(asked.messages), [size])
    assert (within, tokens) == (found.images[0].size, len(found.token_ids) - len(outline.token_ids) + 1)
    text = len(outline.token_ids) - 1
    fitted = ImageFitting(checkpoint=model, max_len=text + 2 * budget, wanted=None).fitted(asked)
    scaled = encode_row(fitted, **own)
    assert len(scaled.token_ids) <= text + budget or (fitted is asked and tokens <= 2 * budget)
    assert (fitted is asked) == (tokens < 2 * budget)
    if name == "qwen2_5_vl":
        width, height = scaled.images[0].size
        assert scaled.image_scales == ((420 / width, 300 / height),)


def test_in_training_rows_images_and_the_longest_response_fit_together(released):
    asked, long = message("user", Image.new("RGB", PHOTO)), message("assistant", "x" * 400)
    sides = {"chosen": (message("assistant", "y"),), "rejected": (long,), "margin": None}
    own = {"kit": released.kit, "processor": released.processor}
    learn, compare = RowEncoder.of(configured(SFTConfig), **own), PairEncoder.of(configured(DPOConfig), **own)
    pair = PreferenceRow(messages=(asked,), location="rows.jsonl line 1", **sides)
    for encode, given in ((learn, row(asked, long)), (compare, pair)):
        fitting = ImageFitting(checkpoint=released, max_len=2048, least=0, wanted=0)
        sample = encode(encode.check(given, fitting))
        longest = sample.rejected if encode is compare else sample
        assert (2048 - 100 < len(longest.token_ids) <= 2048, fitting.count) == (True, 1)
        assert encode.check(given, None) is given
    pictured = replace(pair, chosen=(message("assistant", *asked.parts),))
    assert compare.check(pictured, fitting) is pictured
