import pytest

from lmm_r1.config.shared import LoraConfig
from lmm_r1.models.loading import LoadSettings
from lmm_r1.tools.planning.plan import GIB, ModelSettings, PlanImage, kept_bytes

IMAGE = PlanImage(token_ids=tuple(range(100)), media=None)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        # 10,000 images of 100 tokens of 64 numbers of 4 bytes.
        ({"freeze_visual_encoder": True}, 10_000 * 100 * 64 * 4),
        ({"lora": LoraConfig(rank=4)}, 10_000 * 100 * 64 * 4),
        ({"freeze_prefix": ("model.visual.",), "param_dtype": "bf16"}, 10_000 * 100 * 64 * 2),
        ({"trained": False}, 10_000 * 100 * 64 * 4),
        ({"freeze_visual_encoder": True, "image_cache_gib": 0.125}, GIB // 8),
        ({"freeze_visual_encoder": True, "image_cache_gib": 0.0}, 0),
        ({}, 0),
    ],
)
def test_a_process_keeps_features_of_so_many_images_or_what_the_limit_leaves(tiny_checkpoint, given, expected):
    settings = {"attn_implementation": "auto", "param_dtype": "fp32", "share_prefix": True, "trained": True}
    load = LoadSettings(**settings | {"image_cache_gib": 2.0} | given)
    planned = ModelSettings(path=str(tiny_checkpoint("qwen2_5_vl")), role="policy", load=load)
    assert kept_bytes(planned, IMAGE) == expected
    assert kept_bytes(planned, None) == 0
