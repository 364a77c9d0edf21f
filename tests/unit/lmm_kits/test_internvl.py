"""The kit of InternVL: tiles and prompts, the released layouts, what it refuses, vLLM's prompts, other shapes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.conversations import clip, message, picture
from helpers.tables import frozen
from helpers.tiny_models import encode
from safetensors.torch import load_file, save_file

from lmm_r1.errors import UserError
from lmm_r1.lmm_kits import get_kit

KIT = get_kit("internvl")
PER_TILE = 4


def test_a_prompt_in_full(processor):
    messages = [
        message("system", "Think first."),
        message("user", picture(56, 56), "Which digit?"),
        message("assistant", "<answer>4</answer>"),
        message("user", "And this?", picture(112, 56)),
    ]
    encoded = encode(KIT, processor, messages)
    one, three = ("<IMG_CONTEXT>" * PER_TILE * tiles for tiles in (1, 3))
    assert processor.tokenizer.decode(encoded.token_ids) == (
        "<|im_start|>system\nThink first.<|im_end|>\n"
        f"<|im_start|>user\n<img>{one}</img>\nWhich digit?<|im_end|>\n"
        "<|im_start|>assistant\n<answer>4</answer><|im_end|>\n"
        f"<|im_start|>user\nAnd this?<img>{three}</img>\n<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert encoded.media["pixel_values"].shape == (4, 3, 56, 56)


def test_a_prompt_with_videos_in_full(processor):
    still, two, one = picture(112, 56), clip(2, 84, 56), clip(1, 30, 400)
    messages = [message("user", "Look: ", two, still, "?"), message("assistant", "4"), message("user", one)]
    encoded = encode(KIT, processor, messages)
    tile = "<IMG_CONTEXT>" * PER_TILE
    written = (
        "<|im_start|>user\nLook: Frame1: <img>{0}</img>\n<img>{1}</img>\n?<|im_end|>\n"
        "<|im_start|>assistant\n4<|im_end|>\n<|im_start|>user\nFrame1: <img>{2}</img>\n<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    frames = f"{tile}</img>\nFrame2: <img>{tile}"
    assert processor.tokenizer.decode(encoded.token_ids) == written.format(frames, tile * 3, tile)
    assert processor.tokenizer.decode(encoded.engine_token_ids) == written.format(
        "<video>", "<IMG_CONTEXT>", "<video>"
    )
    # Two frames, two tiles of the image with the whole of it, and a frame.
    pixels = encoded.media["pixel_values"]
    assert pixels.shape == (2 + 3 + 1, 3, 56, 56)
    for place, part in ((0, two), (2, still), (5, one)):
        alone = encode(KIT, processor, [message("user", part)]).media["pixel_values"]
        assert torch.equal(pixels[place : place + len(alone)], alone)


@pytest.mark.parametrize(("size", "tiles"), frozen("lmm_kits/internvl", "an_images_shape_says_how_many_tiles_it_has"))
def test_an_images_shape_says_how_many_tiles_it_has(processor, size, tiles):
    encoded = encode(KIT, processor, [message("user", picture(*size), "?")])
    assert encoded.media["pixel_values"].shape[0] == tiles
    assert encoded.token_ids.count(processor.image_token_id) == tiles * PER_TILE


def test_tiles_lie_in_reading_order_with_the_whole_behind_them(processor):
    halves = picture(112, 56)
    halves.paste("red", (0, 0, 56, 56))
    halves.paste("blue", (56, 0, 112, 56))
    left, right, whole = encode(KIT, processor, [message("user", halves)]).media["pixel_values"]  # (3, 56, 56) each
    for tile, channel in ((left, 0), (right, 2), (whole[:, :, :20], 0), (whole[:, :, 36:], 2)):
        assert (tile[channel] > 2).all()
        assert (tile[2 - channel] < -1).all()


def released(folder: Path, tmp_path: Path, **changes: Any) -> Path:
    """A copy of the tiny checkpoint under the names that the releases have, with changes to its config."""
    config = json.loads((folder / "config.json").read_text())
    for key, value in changes.items():
        place, _, name = key.rpartition("__")
        (config[place] if place else config)[name] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"vision_feature_layer": -2}, "vision_feature_layer -2 .* are not supported"),
        ({"vision_feature_select_strategy": "full"}, "vision_feature_select_strategy full are not supported"),
        (
            {"text_config__model_type": "gpt_oss"},
            "the language model gpt_oss is not supported; .*: llama, qwen2, qwen3",
        ),
    ],
)
def test_what_was_not_tried_is_refused(folder, tmp_path, changes, reason):
    with pytest.raises(UserError, match=reason):
        KIT.load_config(str(released(folder, tmp_path, **changes)), trust_remote_code=False)


def test_weights_of_the_releases_are_read_and_written_under_their_names(folder, tmp_path):
    old = {
        "lm_head.": "language_model.lm_head.",
        "model.language_model.": "language_model.model.",
        "model.vision_tower.": "vision_tower.",
        "model.multi_modal_projector.": "multi_modal_projector.",
    }
    weights = load_file(folder / "model.safetensors")
    renamed = {}
    for name, weight in weights.items():
        (prefix,) = (prefix for prefix in (*old, *old.values()) if name.startswith(prefix))
        renamed[old.get(prefix, prefix) + name.removeprefix(prefix)] = weight
    released(folder, tmp_path)
    save_file(renamed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    theirs, mine = (
        KIT.load_model(str(path), dtype=torch.float32, attn_implementation="sdpa", trust_remote_code=False)
        for path in (tmp_path, folder)
    )
    for name, weight in mine.state_dict().items():
        assert torch.equal(theirs.state_dict()[name], weight), name
    theirs.save_pretrained(tmp_path / "again")
    assert load_file(tmp_path / "again" / "model.safetensors").keys() == renamed.keys()
