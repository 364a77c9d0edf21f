import pytest

from lmm_r1.config.shared import LoraConfig
from lmm_r1.models.loading import LoadSettings
from lmm_r1.planning.estimates import GIB, ModelSettings, PlanImage, kept_bytes

IMAGE = PlanImage(token_ids=tuple(range(100)), media=None)


@pytest.mark.parametrize(
    ("given", "keeps", "limit_gib", "expected"),
    [
        # 10,000 images of 100 tokens of 64 numbers of 4 bytes.
        ({"freeze_visual_encoder": True}, False, 2.0, 10_000 * 100 * 64 * 4),
        ({"lora": LoraConfig(rank=4)}, False, 2.0, 10_000 * 100 * 64 * 4),
        ({"freeze_prefix": ("model.visual.",), "param_dtype": "bf16"}, False, 2.0, 10_000 * 100 * 64 * 2),
        ({}, True, 2.0, 10_000 * 100 * 64 * 4),
        ({"freeze_visual_encoder": True}, False, 0.125, GIB // 8),
        ({"freeze_visual_encoder": True}, False, 0.0, 0),
        ({}, False, 2.0, 0),
    ],
)
def test_a_process_keeps_features_of_so_many_images_or_what_the_limit_leaves(
    tiny_checkpoint, given, keeps, limit_gib, expected
):
    load = LoadSettings(**{"attn_implementation": "auto", "param_dtype": "fp32", "share_prefix": True, **given})
    planned = ModelSettings(path=str(tiny_checkpoint("qwen2_5_vl")), role="policy", load=load)
    assert kept_bytes(planned, IMAGE, limit_gib=limit_gib, keeps=keeps) == expected
    assert kept_bytes(planned, None, limit_gib=limit_gib, keeps=keeps) == 0
