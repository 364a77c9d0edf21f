"""Images as people's files hold them: every kit takes them upright and in colour, or refuses them with their size."""

import io
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from helpers.conversations import message, picture
from helpers.passes import next_log_probs
from helpers.tables import by_turns, kits_with
from helpers.tiny_models import encode, make_actor, pad
from PIL import Image

from lmm_r1.data.images import load_image
from lmm_r1.data.messages import ImagePart
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits import EncodedPrompt, get_kit
from lmm_r1.models.actor import KitActor

# What becomes of an image of 1 x 1 and of 10,000 x 20 pixels, as datasets/README.md says.
EXTREMES = {"1x1": (1, 1), "10000x20": (10_000, 20)}
REFUSED = {
    (name, "10000x20")
    for name in ("glm4v", "glm4v_moe", "qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe")
}
SEASCAPE = picture(84, 56)


def encoded_as(image: Image.Image, kind: str, **settings: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **settings)
    return file.getvalue()


def frames_of_a_gif() -> bytes:
    first, second = (Image.new("RGB", (84, 56), colour) for colour in ("red", "blue"))
    return encoded_as(first, "GIF", save_all=True, append_images=[second], duration=100)


def turned_by_its_tag() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held upright: turn by 90 degrees to the right
    return encoded_as(SEASCAPE, "PNG", exif=exif)


# kind of file -> (its bytes, the upright RGB image that it shows)
FILES: dict[str, tuple[bytes, Image.Image]] = {
    "grey": (encoded_as(SEASCAPE.convert("L"), "PNG"), SEASCAPE.convert("L").convert("RGB")),
    "palette": (encoded_as(SEASCAPE.convert("P"), "PNG"), SEASCAPE.convert("P").convert("RGB")),
    "CMYK": (encoded_as(SEASCAPE.convert("CMYK"), "TIFF"), SEASCAPE.convert("CMYK").convert("RGB")),
    "animated GIF, first frame": (frames_of_a_gif(), Image.new("RGB", (84, 56), "red")),
    "EXIF rotation": (turned_by_its_tag(), SEASCAPE.transpose(Image.Transpose.ROTATE_270)),
    "transparent, on white": (encoded_as(Image.new("RGBA", (84, 56), (0, 0, 0, 0)), "PNG"), Image.new("RGB", (84, 56), "white")),
}  # fmt: skip


@pytest.fixture(scope="module")
def actor_of(tiny_checkpoint: Callable[[str], Path]) -> Callable[[str], tuple[KitActor, object]]:
    @cache
    def loaded(name: str) -> tuple[KitActor, object]:
        folder = tiny_checkpoint(name)
        return make_actor(folder), get_kit(name).load_processor(str(folder), trust_remote_code=False)

    return loaded


def encode_image(name: str, processor: object, image: Image.Image) -> EncodedPrompt:
    return encode(get_kit(name), processor, [message("user", image, "Which digit?")])


@pytest.mark.parametrize(
    ("name", "kind"), by_turns(kits_with("images"), [(kind,) for kind in FILES], turns=len(FILES))
)
def test_a_file_of_any_kind_is_what_it_shows(actor_of, name, kind):
    _, processor = actor_of(name)
    content, shown = FILES[kind]
    read = encode_image(name, processor, load_image(ImagePart(content), location="rows.jsonl, line 1"))
    expected = encode_image(name, processor, shown)
    assert read.token_ids == expected.token_ids
    for key, value in expected.media.items():
        assert torch.equal(read.media[key], value), key


@pytest.mark.parametrize("extreme", EXTREMES)
@pytest.mark.parametrize("name", kits_with("images"))
def test_an_extreme_image_is_trained_on_or_refused_with_its_size(actor_of, name, extreme):
    actor, processor = actor_of(name)
    image = picture(*EXTREMES[extreme])
    if (name, extreme) in REFUSED:
        with pytest.raises(UserError, match=extreme):
            encode_image(name, processor, image)
        return
    encoded = encode_image(name, processor, image)
    sequences, mask = pad([encoded.token_ids], side="right")
    with torch.no_grad():
        log_probs = next_log_probs(actor, sequences, attention_mask=mask, media=[encoded.media])
    assert torch.isfinite(log_probs).all()
