"""The shipped sizes of released checkpoints are true: each makes a model of as many parameters as were released."""

import copy

import pytest
import torch

from lmm_r1.lmm_kits import Checkpoint
from lmm_r1.lmm_kits.registry import released_configs, released_folder


@pytest.mark.parametrize("name", released_configs())
def test_a_released_checkpoints_config_makes_a_model_of_as_many_parameters(name):
    # The counts are those that the hub reports of the released files, without what no model has as parameters: weights for
    # speculative decoding (`mtp`), buffers, and keys and values of layers that take them from others.
    checkpoint = Checkpoint(str(released_folder(name)))
    with torch.device("meta"):
        model = checkpoint.kit.model_class_of(checkpoint.config)(copy.deepcopy(checkpoint.config))
    assert sum(weight.numel() for weight in model.parameters()) == released_configs()[name]["parameters"]


@pytest.mark.parametrize(
    ("name", "tokens"),
    # 32 x 32 merged patches of 28 pixels; of 32 pixels 28 x 28; of 448 x 448 pixels four, with 256 tokens each.
    [("Qwen/Qwen2.5-VL-3B-Instruct", 1024), ("Qwen/Qwen3-VL-4B-Instruct", 784), ("OpenGVLab/InternVL3-8B-hf", 1024)],
)
def test_an_image_has_its_tokens_without_a_processor(name, tokens):
    checkpoint = Checkpoint(str(released_folder(name)))
    ids, media = checkpoint.kit.blank_image(checkpoint.config, pixels=896 * 896)
    assert sum(token == checkpoint.config.image_token_id for token in ids) == tokens
    assert max(tensor.numel() for tensor in media.values()) >= 3 * 896 * 896
