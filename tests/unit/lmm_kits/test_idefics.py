"""The kits of Idefics 3's architecture: prompts in full, tiles, patch positions, other shapes, vLLM's count of tiles."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.conversations import message, picture
from helpers.tiny_models import encode, make_actor
from PIL import Image
from safetensors import safe_open
from transformers import Idefics3ImageProcessor, SmolVLMImageProcessor, SmolVLMVisionConfig
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.models.idefics3.modeling_idefics3 import Idefics3VisionEmbeddings
from transformers.models.smolvlm.modeling_smolvlm import SmolVLMVisionEmbeddings

from lmm_r1.errors import UserError
from lmm_r1.lmm_kits import get_kit
from lmm_r1.lmm_kits.features import exact_patch_positions
from lmm_r1.lmm_kits.idefics.engine_model import tile_grid

NAMES = ("idefics3", "smolvlm")
AROUND, WHOLE = "<fake_token_around_image>", "<global-img>"
TILE = "<image>" * 4
# Patches a side of a tile in SmolVLM2-500M (512 / 16), SmolVLM2-2.2B (384 / 14) and Idefics3-8B (364 / 14).
RELEASED_SIDES = (32, 27, 26)


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def folder(name: str, tiny_checkpoint: Callable[[str], Path]) -> Path:
    return tiny_checkpoint(name)


@pytest.fixture
def processor(name: str, folder: Path) -> Any:
    return get_kit(name).load_processor(str(folder), trust_remote_code=False)


def tiles(rows: int, columns: int) -> str:
    """An image as it is written: its tiles row by row, and then the whole."""
    grid = "".join(
        "".join(f"{AROUND}<row_{row}_col_{column}>{TILE}" for column in range(1, columns + 1)) + "\n"
        for row in range(1, rows + 1)
    )
    return f"{grid}\n{AROUND}{WHOLE}{TILE}{AROUND}"


def test_a_prompt_in_full(name, processor):
    # 168 x 168 pixels are 2 x 2 tiles of 84; 168 x 84 are 1 x 2, and so are 168 x 8.
    messages = [
        message("system", "Think first."),
        message("user", picture(56, 56), "Which digit?"),
        message("assistant", "<answer>4</answer>"),
        message("user", "And ", picture(60, 30), picture(400, 20)),
    ]
    encoded = encode(get_kit(name), processor, messages)
    written = (
        "System: Think first.<end_of_utterance>\nUser:{0}Which digit?<end_of_utterance>\n"
        "Assistant: <answer>4</answer><end_of_utterance>\nUser: And {1}{2}<end_of_utterance>\nAssistant:"
    )
    decode, written = processor.tokenizer.decode, processor.tokenizer.bos_token + written
    assert decode(encoded.token_ids) == written.format(tiles(2, 2), tiles(1, 2), tiles(1, 2))
    assert decode(encoded.engine_token_ids) == written.format(*["<image>"] * 3)
    assert encoded.media["pixel_values"].shape == (1, 5 + 3 + 3, 3, 84, 84)
    assert encoded.media["pixel_attention_mask"].all()


@pytest.mark.parametrize("image_processor", [Idefics3ImageProcessor, SmolVLMImageProcessor])
@pytest.mark.parametrize(("longest", "splits"), [(80, True), (55, True), (20, True), (80, False)])
def test_the_engine_counts_tiles_as_the_processor_cuts_them(image_processor, longest, splits):
    sizes = {"size": {"longest_edge": longest}, "max_image_size": {"longest_edge": 20}}
    processor = image_processor(**sizes, do_image_splitting=splits)
    draw = np.random.default_rng(0)
    shapes = [
        (1, 1),
        (1, 300),
        (300, 1),
        (20, 20),
        (21, 20),
        (61, 80),
        (80, 61),
        *draw.integers(1, 130, (60, 2)).tolist(),
    ]
    asked = []
    for height, width in shapes:
        cut = processor([[Image.new("RGB", (width, height))]], return_tensors="pt", return_row_col_info=True)
        expected = (cut["rows"][0][0], cut["cols"][0][0])
        assert tile_grid(processor, height=height, width=width) == expected, (height, width)
        number = cut["pixel_values"].shape[1]
        assert number == expected[0] * expected[1] + 1
        asked.append(processor.get_number_of_image_patches(height, width, {})[0] == number)
    # What vLLM asks: wrong for single tiles, and where the longest side is no multiple of a tile.
    assert all(asked) == (longest == 80 and splits), "does vLLM still need a count of its own?"


def looked_up(embeddings: torch.nn.Module, *, side: int, dtype: torch.dtype) -> list[int]:
    """The indices that the module looks up in its position embedding for a whole tile."""
    seen = []
    hook = embeddings.position_embedding.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with torch.no_grad():
        embeddings(
            pixel_values=torch.zeros(1, 3, side, side, dtype=dtype),
            patch_attention_mask=torch.ones(1, side, side, dtype=torch.bool),
        )
    hook.remove()
    return seen[0].flatten().tolist()


@pytest.mark.parametrize("made", [Idefics3VisionEmbeddings, SmolVLMVisionEmbeddings])
@pytest.mark.parametrize("side", RELEASED_SIDES)
def test_patches_of_a_released_tile_lie_in_their_order_on_both_sides_and_in_any_dtype(made, side):
    from types import SimpleNamespace

    from vllm.model_executor.models.idefics2_vision_model import Idefics2VisionEmbeddings

    expected = list(range(side * side))
    config = SmolVLMVisionConfig(hidden_size=1, num_attention_heads=1, image_size=side, patch_size=1)
    exact, stock = made(config), made(config).bfloat16()
    exact_patch_positions(exact)
    assert looked_up(exact, side=side, dtype=torch.float32) == expected
    exact_patch_positions(exact.bfloat16())
    assert looked_up(exact, side=side, dtype=torch.bfloat16) == expected
    # Transformers rounds 1 / 27 to the pixels' dtype.
    assert (looked_up(stock, side=side, dtype=torch.bfloat16) == expected) == (side == 32)
    engine = SimpleNamespace(num_patches_per_side=side, position_embedding=torch.nn.Embedding(1, 1))
    mask = torch.ones(1, side, side, dtype=torch.bool)
    assert Idefics2VisionEmbeddings.get_position_ids(engine, mask).flatten().tolist() == expected


def test_released_names_are_those_of_the_parameters(name, folder):
    """Transformers has no table of other names for them: what a run saves has the names of the releases."""
    assert get_checkpoint_conversion_mapping(name) is None
    with safe_open(folder / "model.safetensors", framework="pt") as weights:
        names = set(weights.keys())
    assert names == {key for key, _ in make_actor(folder).model.named_parameters()}
    assert {
        "lm_head.weight",
        "model.connector.modality_projection.proj.weight",
        "model.text_model.embed_tokens.weight",
        "model.text_model.layers.0.self_attn.q_proj.weight",
        "model.vision_model.embeddings.patch_embedding.weight",
        "model.vision_model.encoder.layers.0.self_attn.out_proj.weight",
        "model.vision_model.post_layernorm.weight",
    } <= names


def altered_processor(folder: Path, copy: Path, **settings: Any) -> str:
    shutil.copytree(folder, copy)
    written = json.loads((copy / "processor_config.json").read_text())
    written["image_processor"] |= settings
    (copy / "processor_config.json").write_text(json.dumps(written))
    return str(copy)


@pytest.mark.parametrize("setting", ["do_resize", "do_pad"])
def test_images_of_any_size_are_refused(name, folder, tmp_path, setting):
    path = altered_processor(folder, tmp_path / "model", **{setting: False})
    with pytest.raises(UserError, match=f"{path}: do_resize or do_pad is false"):
        get_kit(name).load_processor(path, trust_remote_code=False)


def test_the_end_token_is_the_end_of_a_turn(name, folder, tmp_path):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text()) | {"eos_token": "<|im_end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    processor = get_kit(name).load_processor(str(tmp_path), trust_remote_code=False)
    assert processor.tokenizer.eos_token == "<end_of_utterance>"
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content[0].text }}<|im_end|>")
    processor = get_kit(name).load_processor(str(tmp_path), trust_remote_code=False)
    assert processor.tokenizer.eos_token == "<|im_end|>"
