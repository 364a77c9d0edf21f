import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.conversations import message, picture
from helpers.packed_batches import DOUBLE, Batch, check, groups, make_actors, one_by_one, together
from helpers.passes import next_log_probs
from helpers.tiny_models import encode, make_actor, pad
from transformers import Gemma4Processor

from lmm_r1.errors import UserError
from lmm_r1.lmm_kits import get_kit
from lmm_r1.models.actor import KitActor
from lmm_r1.models.packed.layout import PackedLayout, PackedSegment

KIT = get_kit("gemma4")
WIDE, TALL = picture(140, 84), picture(30, 300)


@pytest.fixture(scope="module")
def bidirectional(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint as the 26B and 31B releases are: tokens of an image see each other in sliding layers."""
    copy = tmp_path_factory.mktemp("gemma4") / "bidirectional"
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text())
    config["text_config"]["use_bidirectional_attention"] = "vision"
    (copy / "config.json").write_text(json.dumps(config))
    return copy


def log_probs(actor: KitActor, prompt: Any) -> torch.Tensor:
    sequences, mask = pad([prompt.token_ids], side="right")
    with torch.no_grad():
        return next_log_probs(actor, sequences, attention_mask=mask, media=[prompt.media])


def prompts(processor: Gemma4Processor, *conversations: list) -> list:
    return [encode(KIT, processor, messages) for messages in conversations]


def test_an_image_has_the_tokens_of_its_aspect_ratio(processor):
    # 280 patches of 8 x 8 pixels are 17,920 pixels, and two patches of each side make a token. 140 x 84 is scaled to
    # 172 x 103 and cut to 160 x 96, 30 x 300 to 42 x 423 and cut to 32 x 416.
    (encoded,) = prompts(processor, [message("user", WIDE, TALL)])
    counts = [10 * 6, 2 * 26]
    assert encoded.token_ids.count(processor.image_token_id) == sum(counts)
    assert [(item >= 0).all(-1).sum().item() for item in encoded.media["image_position_ids"]] == [
        4 * count for count in counts
    ]
    assert encoded.engine_token_ids.count(processor.image_token_id) == 2


def test_flash_attention_is_refused(folder):
    with pytest.raises(UserError, match="--ds.attn_implementation sdpa"):
        KIT.load_model(
            str(folder), dtype=torch.float32, attn_implementation="flash_attention_2", trust_remote_code=False
        )


def test_tokens_of_an_image_see_each_other_in_sliding_layers_only():
    blocks = torch.tensor([-1, 0, 0, -1])
    layout = PackedLayout(segments=(PackedSegment(start=0, end=4),), block_ids=blocks, blocks_within_window=True)
    sliding = layout.seen_with(window=3).mask(0, window=3, device=torch.device("cpu"))
    full = layout.seen_with(window=None)
    assert sliding.int().tolist() == [[1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 1, 0], [0, 1, 1, 1]]
    assert full.is_plain(0, window=None)
    assert layout.seen_with(window=None) is full, "made once"


def test_bidirectional_attention_changes_log_probs_and_packs_exactly(folder, bidirectional, processor):
    encoded = prompts(processor, [message("user", WIDE, "Which digit?")], [message("user", "What is 12 + 34?")])
    causal, both = log_probs(make_actor(folder), encoded[0]), log_probs(make_actor(bidirectional), encoded[0])
    assert (causal - both).abs().max() > 1e-3
    batch = Batch(tuple(groups(encoded, [(4, 2, 7), (5,)])))
    actors = make_actors(bidirectional)
    with actors.in_double_precision():
        alone = one_by_one(actors.stock, batch)
        for way in ("padded", "packed", "shared"):
            with actors.running(way) as actor:
                check(together(actor, batch), alone, tolerance=DOUBLE, zero=set())


def test_the_engine_disagrees_only_if_tokens_of_an_image_see_each_other(folder, bidirectional):
    said = [
        KIT.engine_disagrees(KIT.load_config(str(path), trust_remote_code=False)) for path in (folder, bidirectional)
    ]
    assert said == [False, True]


@pytest.mark.parametrize("size", [(1, 4000), (4000, 1), (3, 3)])
def test_extreme_images_have_as_many_tokens_in_the_text_as_in_the_tower(processor, folder, size):
    (encoded,) = prompts(processor, [message("user", picture(*size), "?")])
    places = encoded.media["image_position_ids"]
    config = KIT.load_config(str(folder), trust_remote_code=False).vision_config
    (point,) = KIT.feature_points
    rows = point.rows(SimpleNamespace(config=config), {"pixel_position_ids": places})
    assert encoded.token_ids.count(processor.image_token_id) == rows <= 70
