from pathlib import Path

import pytest
import torch
from helpers.conversations import message, picture
from helpers.tiny_models import encode
from transformers import Phi4MultimodalImageProcessor

from lmm_r1.errors import UserError
from lmm_r1.lmm_kits import get_kit, kit_of, phi4_multimodal

KIT = get_kit("phi4_multimodal")
IMAGE_EMBED = "model.embed_tokens_extend.image_embed."


def load(folder: Path, *, attention: str = "sdpa", dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    return KIT.load_model(str(folder), dtype=dtype, attn_implementation=attention, trust_remote_code=False)


def media_of(processor: object, *sizes: tuple[int, int]) -> dict[str, torch.Tensor]:
    images = [picture(*size) for size in sizes]
    return encode(KIT, processor, [message("user", *images, "Which digit?")]).media


def features(model: torch.nn.Module, media: dict[str, torch.Tensor]) -> torch.Tensor:
    """Features of every crop of the first image, (crops, tokens, width)."""
    embed = model.model.embed_tokens_extend.image_embed
    pixels, masks = media["image_pixel_values"], media["image_attention_mask"].bool()
    with torch.no_grad():
        return embed.get_img_features(pixels.flatten(0, 1), masks.flatten(0, 1))[: pixels.shape[1]]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_an_images_features_do_not_depend_on_the_padding_of_its_neighbours(folder, processor, attention):
    model = load(folder, attention=attention)
    whole, padded = media_of(processor, (56, 56)), media_of(processor, (140, 84))
    assert whole["image_attention_mask"].all()
    assert not padded["image_attention_mask"].all()
    alone, beside = features(model, whole), features(model, KIT.merge_media([whole, padded]))
    torch.testing.assert_close(beside, alone, atol=1e-5, rtol=0)


# Width, height -> rows and columns of crops, placeholders. 448 x 10: one row of 16 tokens with its end, one separator, and
# the whole picture of 16 x 16 with 16 row ends. 10 x 448: 16 rows of one token with 16 ends. 56 x 56: 16 rows of 17.
# 900 x 500: 2 x 3 crops, scaled by 1344 / 900 to 1344 x 746 pixels, of which 10 of 64 rows of patches are padding: 27 rows
# of 48 tokens and an end.
@pytest.mark.parametrize(
    ("size", "grid", "placeholders"),
    [
        ((448, 10), (1, 1), 17 + 1 + 272),
        ((10, 448), (1, 1), 32 + 1 + 272),
        ((56, 56), (1, 1), 272 + 1 + 272),
        ((900, 500), (2, 3), 27 * 49 + 1 + 272),
    ],
)
def test_placeholders_are_counted_by_hand_and_as_the_processor_counts_them(size, grid, placeholders):
    batch = Phi4MultimodalImageProcessor()([picture(*size)], return_tensors="pt")
    assert phi4_multimodal.crop_grid(batch["image_sizes"][0], crop_size=448) == grid
    assert phi4_multimodal.num_placeholders(batch["image_attention_mask"][0], grid=grid) == placeholders
    assert batch["num_img_tokens"].tolist() == [placeholders]


def test_prompts_with_different_numbers_of_crops_are_joined_with_empty_ones(processor):
    small, wide = media_of(processor, (56, 56)), media_of(processor, (900, 500), (56, 84))
    joined = KIT.merge_media([small, wide])
    assert joined["image_pixel_values"].shape == (3, 7, 3, 448, 448)
    assert joined["image_attention_mask"].shape == (3, 7, 32, 32)
    assert joined["image_sizes"].tolist() == [[448, 448], [896, 1344], [448, 448]]
    assert torch.equal(joined["image_pixel_values"][0, :2], small["image_pixel_values"][0])
    assert torch.count_nonzero(joined["image_pixel_values"][0, 2:]) == 0
    assert torch.equal(joined["image_pixel_values"][1:], wide["image_pixel_values"])
    assert torch.equal(joined["image_attention_mask"][1:], wide["image_attention_mask"])


def test_frozen_on_loading_is_what_no_loss_reaches_and_nothing_else(folder, processor):
    model = load(folder)
    frozen = {name for name, weight in model.named_parameters() if not weight.requires_grad}
    tower = f"{IMAGE_EMBED}img_processor."
    dead = ("model.embed_tokens_extend.audio_embed.", f"{tower}head.", f"{tower}post_layernorm.")
    assert frozen == {
        name for name, _ in model.named_parameters() if name.startswith((*dead, f"{tower}encoder.layers.1."))
    }
    encoded = encode(KIT, processor, [message("user", picture(56, 84), "Which digit?")])
    sequences = torch.tensor([encoded.token_ids])
    model(sequences, **encoded.media).logits.square().sum().backward()
    assert all(weight.grad is not None for name, weight in model.named_parameters() if name not in frozen)


def test_the_end_token_is_the_one_that_ends_a_turn(folder, processor, tmp_path):
    processor.save_pretrained(tmp_path)
    for name, text in (("tokenizer_config.json", '"eos_token": "<|end|>"'), ("tokenizer.json", '"<|end|>"')):
        assert text in (tmp_path / name).read_text()
    config = (tmp_path / "tokenizer_config.json").read_text()
    (tmp_path / "tokenizer_config.json").write_text(config.replace("<|end|>", "<|endoftext|>"))
    loaded = KIT.load_processor(str(tmp_path), trust_remote_code=False)
    assert loaded.tokenizer.eos_token == "<|end|>"
    assert loaded.tokenizer.pad_token == "<|endoftext|>"

    vocabulary = (tmp_path / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(vocabulary.replace("<|end|>", "<|other|>"))
    with pytest.raises(UserError, match=r"the tokenizer of this checkpoint has no <\|end\|>"):
        KIT.load_processor(str(tmp_path), trust_remote_code=False)


def test_a_checkpoint_in_the_original_format_is_refused_with_where_to_get_another(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "phi4mm"}')
    with pytest.raises(UserError, match="revision refs/pr/70 .* lmm-r1 merge"):
        kit_of(str(tmp_path))
