"""The kit of Aria: patch positions in any dtype, padding in vLLM's vision tower, crops, experts."""

import shutil
from types import SimpleNamespace

import torch
from helpers.conversations import message, picture
from helpers.engines import largest_difference, running_engine, sampled
from helpers.tiny_models import encode, make_actor
from transformers.models.idefics3.modeling_idefics3 import Idefics3VisionEmbeddings

from lmm_r1.lmm_kits import get_kit
from lmm_r1.lmm_kits.aria.engine_model import patch_positions

KIT = get_kit("aria")
RELEASED_SIDE = 70  # patches of 14 pixels in 980


def mask_of(rows: int, columns: int, *, side: int) -> torch.Tensor:
    """The mask (1, side, side) of an image of rows x columns patches, padded at the bottom and on the right."""
    mask = torch.zeros(1, side, side, dtype=torch.bool)
    mask[0, :rows, :columns] = True
    return mask


def looked_up(embeddings: torch.nn.Module, mask: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
    """The indices (1, patches) that transformers' module looks up in its position embedding."""
    seen = []
    hook = embeddings.position_embedding.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    size = mask.shape[1] * embeddings.patch_size
    with torch.no_grad():
        embeddings(pixel_values=torch.zeros(1, 3, size, size, dtype=dtype), patch_attention_mask=mask)
    hook.remove()
    return seen[0]


def test_patches_lie_at_their_share_of_the_image():
    # Two rows of four columns on a grid of 4: the rows at 0 and 1/2 of the height, which is row 2 of the embedding.
    positions = patch_positions(mask_of(2, 4, side=4), side=4)
    assert positions.tolist() == [[0, 1, 2, 3, 8, 9, 10, 11, 0, 0, 0, 0, 0, 0, 0, 0]]


def test_the_engine_looks_up_the_positions_of_the_training_forward_and_vllm_alone_does_not():
    from vllm.model_executor.models.idefics2_vision_model import Idefics2VisionEmbeddings

    side = RELEASED_SIDE
    theirs = Idefics3VisionEmbeddings(
        SimpleNamespace(hidden_size=1, image_size=side, patch_size=1, num_channels=3)
    ).eval()
    stock = SimpleNamespace(num_patches_per_side=side, position_embedding=torch.nn.Embedding(1, 1))
    differing = []
    for rows in range(1, side + 1):
        mask = mask_of(rows, side, side=side)
        expected = looked_up(theirs, mask, dtype=torch.float32)
        assert torch.equal(patch_positions(mask, side=side), expected), rows
        if not torch.equal(Idefics2VisionEmbeddings.get_position_ids(stock, mask), expected):
            differing.append(rows)
    assert differing == [49, 58], "vLLM has changed: does the engine's class still need positions of its own?"


def test_a_padded_image_agrees_with_the_engine_only_as_its_vision_tower_does_not_see_the_padding(
    folder, processor, tmp_path
):
    # Neither side cuts a large image into crops, whatever the checkpoint says.
    processor.image_processor.split_image = True
    cropping = shutil.copytree(folder, tmp_path / "cropping")
    processor.save_pretrained(cropping)
    actor = make_actor(cropping, ban_media_tokens=True)
    processor = KIT.load_processor(str(cropping), trust_remote_code=False)
    assert processor.image_processor.split_image

    square, wide, tall = (
        [encode(KIT, processor, [message("user", picture(*size), "Which digit?")])]
        for size in ((56, 56), (1500, 1000), (40, 60))
    )
    differences = {}
    with running_engine(KIT, cropping, max_images=1) as llm:
        for masked in (True, False):
            llm.llm_engine.reset_mm_cache()
            llm.llm_engine.reset_encoder_cache()
            llm.reset_prefix_cache()
            tower = llm.llm_engine.model_executor.driver_worker.worker.model_runner.model.vision_tower
            assert tower.apply_encoder_attention_mask
            tower.apply_encoder_attention_mask = masked
            for name, prompts in (("square", square), ("wide", wide), ("tall", tall)):
                samples = sampled(llm, KIT, prompts, banned=actor.banned_token_ids.tolist(), n=2, max_tokens=8)
                differences[name, masked] = largest_difference(actor, prompts, samples)
    assert all(differences[name, True] <= 1e-4 for name in ("square", "wide", "tall")), differences
    assert differences["square", False] <= 1e-4
    assert min(differences["wide", False], differences["tall", False]) > 1e-2, differences


def test_an_image_becomes_one_square_whose_shorter_side_is_never_below_336_pixels(processor):
    # 980 / 1960 = 0.5 gives 980 x 490; 300 x 1 pixels become 980 x 3, stretched to 980 x 336.
    for size, height in (((1960, 980), 490), ((300, 1), 336), ((1, 1), 980)):
        encoded = encode(KIT, processor, [message("user", picture(*size), "Which digit?")])
        assert encoded.media["pixel_values"].shape == (1, 3, 980, 980)
        assert encoded.media["pixel_mask"].sum().item() == height * 980
        assert encoded.media["pixel_mask"][0, :height].all()
