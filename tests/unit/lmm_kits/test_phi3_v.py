"""The kit of Phi-3.5-vision: crops and their tokens, the layout of image features, tags in texts, Microsoft's names."""

import json

import pytest
import torch
from helpers.conversations import message, picture
from helpers.tables import table
from helpers.tiny_models import encode, make_actor
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor

from lmm_r1.lmm_kits import get_kit
from lmm_r1.lmm_kits.phi3_v.modeling import (
    CLIP_MEAN,
    CLIP_STD,
    Phi3VConfig,
    Phi3VForCausalLM,
    Phi3VImageProcessor,
    hd_transform,
    lay_out,
)

KIT = get_kit("phi3_v")
WIDE = picture(200, 99)
BLACK_AND_WHITE = [[(value - mean) / std for mean, std in zip(CLIP_MEAN, CLIP_STD, strict=True)] for value in (0, 1)]


@pytest.mark.parametrize(
    ("width", "height", "num_crops", "tokens"),
    table("lmm_kits/phi3_v", "an_image_has_as_many_tokens_as_computed_by_hand"),
)
def test_an_image_has_as_many_tokens_as_computed_by_hand(width, height, num_crops, tokens):
    images = Phi3VImageProcessor(num_crops=num_crops)
    assert images.num_image_tokens(width=width, height=height) == tokens
    grid = hd_transform(Image.new("RGB", (width, height)), num_crops=num_crops)
    rows, columns = grid.height / 336, grid.width / 336
    assert (rows * columns + 1) * 144 + (rows + 1) * 12 + 1 == tokens


def test_the_whole_comes_first_then_the_crops_in_reading_order_then_zeros():
    image = Image.new("RGB", (672, 336), "black")
    image.paste("white", (336, 0, 672, 336))
    (pixels,) = Phi3VImageProcessor()(image, return_tensors="pt")["pixel_values"]
    black, white = torch.tensor(BLACK_AND_WHITE)
    assert pixels.shape == (5, 3, 336, 336)
    torch.testing.assert_close(pixels[0, :, 100, 100], black)
    torch.testing.assert_close(pixels[0, :, 100, 300], white)
    torch.testing.assert_close(pixels[1], black.view(3, 1, 1).expand(3, 336, 336))
    torch.testing.assert_close(pixels[2], white.view(3, 1, 1).expand(3, 336, 336))
    assert not pixels[3:].any()


# Crops of 4 x 4 patches, of which each patch is one number: those of the whole, 100 to 115, then those of two crops.
CROPS = torch.stack([torch.arange(first, first + 16) for first in (100, 0, 16)])[..., None]
WHOLE = [[100, 101, 104, 105], [102, 103, 106, 107], [-1] * 4, [108, 109, 112, 113], [110, 111, 114, 115], [-1] * 4]


def laid_out(rows: int, columns: int) -> list[list[int]]:
    newline, separator = torch.full((1, 1, 1, 4), -1), torch.full((1, 1, 4), -2)
    return lay_out(CROPS, rows=rows, columns=columns, newline=newline, separator=separator).tolist()


def test_two_crops_side_by_side_are_laid_out_as_drawn_by_hand():
    assert laid_out(1, 2) == [
        *([0, 1, 4, 5], [2, 3, 6, 7], [16, 17, 20, 21], [18, 19, 22, 23], [-1] * 4),
        *([8, 9, 12, 13], [10, 11, 14, 15], [24, 25, 28, 29], [26, 27, 30, 31], [-1] * 4),
        [-2] * 4,
        *WHOLE,
    ]


def test_two_crops_one_above_the_other_are_laid_out_as_drawn_by_hand():
    assert laid_out(2, 1) == [
        *([0, 1, 4, 5], [2, 3, 6, 7], [-1] * 4),
        *([8, 9, 12, 13], [10, 11, 14, 15], [-1] * 4),
        *([16, 17, 20, 21], [18, 19, 22, 23], [-1] * 4),
        *([24, 25, 28, 29], [26, 27, 30, 31], [-1] * 4),
        [-2] * 4,
        *WHOLE,
    ]


def test_a_checkpoint_as_microsoft_writes_it_loads(folder, processor, tmp_path):
    """Settings with remote code, the template in the tokenizer's config, the embedding stored twice."""
    processor.tokenizer.save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps(
            {
                "auto_map": {
                    "AutoImageProcessor": "image_processing_phi3_v.Phi3VImageProcessor",
                    "AutoProcessor": "processing_phi3_v.Phi3VProcessor",
                },
                "num_crops": 16,
                "image_mean": CLIP_MEAN,
                "image_std": CLIP_STD,
                "image_processor_type": "Phi3VImageProcessor",
                "num_img_tokens": 9,
                "processor_class": "Phi3VProcessor",
                "transformers_version": "4.38.1",
            }
        )
    )
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "configuration_phi3_v.Phi3VConfig"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    weights["model.vision_embed_tokens.wte.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = KIT.load_processor(str(tmp_path), trust_remote_code=False)
    assert loaded.image_processor.num_crops == 16
    assert loaded.chat_template == processor.chat_template
    ids = torch.arange(20)[None]
    with torch.no_grad():
        theirs, ours = (make_actor(path).model(ids).logits for path in (tmp_path, folder))
    assert torch.equal(theirs, ours)


def microsofts_names(config: Phi3VConfig) -> set[str]:
    """The names in the release's weight files, as public loaders of them list them."""
    norms = [f"{name}.{part}" for name in ("layer_norm1", "layer_norm2") for part in ("weight", "bias")]
    linear = [f"self_attn.{name}_proj" for name in ("q", "k", "v", "out")] + ["mlp.fc1", "mlp.fc2"]
    in_layer = norms + [f"{name}.{part}" for name in linear for part in ("weight", "bias")]
    tower = {f"encoder.layers.{layer}.{name}" for layer in range(24) for name in in_layer}
    tower |= {f"{name}.{part}" for name in ("pre_layrnorm", "post_layernorm") for part in ("weight", "bias")}
    tower |= {"class_embedding", "patch_embedding.weight", "position_embedding.weight"}
    tower = {f"embeddings.{name}" if "embedding" in name else name for name in tower}
    images = {f"img_projection.{index}.{part}" for index in (0, 2) for part in ("weight", "bias")} | {
        "glb_GN",
        "sub_GN",
    }
    in_layer = ("input_layernorm", "post_attention_layernorm", "mlp.down_proj", "mlp.gate_up_proj")
    in_layer = (*in_layer, "self_attn.o_proj", "self_attn.qkv_proj")
    text = {f"layers.{layer}.{name}.weight" for layer in range(config.num_hidden_layers) for name in in_layer}
    text |= {"embed_tokens.weight", "norm.weight"}
    text |= {f"vision_embed_tokens.{name}" for name in images}
    text |= {f"vision_embed_tokens.img_processor.vision_model.{name}" for name in tower}
    return {"lm_head.weight"} | {f"model.{name}" for name in text}


def test_a_saved_folder_has_microsofts_names_and_loads_with_the_auto_classes(folder, processor, tmp_path):
    actor = make_actor(folder)
    actor.model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert set(file.keys()) == microsofts_names(actor.model.config)
        assert file.get_slice("model.vision_embed_tokens.sub_GN").get_shape() == [1, 1, 1, 4 * 32]
    assert set(dict(actor.model.named_parameters())) == microsofts_names(actor.model.config)

    assert isinstance(AutoConfig.from_pretrained(tmp_path), Phi3VConfig)
    again = AutoProcessor.from_pretrained(tmp_path)
    assert again.chat_template == processor.chat_template
    prompt = encode(KIT, again, [message("user", WIDE, "Which digit?")])
    assert prompt.token_ids == encode(KIT, processor, [message("user", WIDE, "Which digit?")]).token_ids
    ids = torch.tensor([prompt.token_ids])
    with torch.no_grad():
        logits = actor.model(ids, **prompt.media).logits
        for auto in (AutoModelForCausalLM, AutoModelForImageTextToText):
            model = auto.from_pretrained(tmp_path).eval()
            assert isinstance(model, Phi3VForCausalLM)
            assert torch.equal(model(ids, **prompt.media).logits, logits)
