"""Settings of a call, given as a mapping, a file or a dataclass."""

import math
from pathlib import Path

import pytest

from lmm_r1.api.settings import read_config
from lmm_r1.config import PPOConfig, SFTConfig
from lmm_r1.errors import UserError


def test_a_mapping_is_nested_or_dotted_or_both_and_its_values_are_those_of_the_flags():
    config = read_config(
        PPOConfig,
        {
            "actor": {"model_name_or_path": Path("models/m"), "adam": {"lr": 1e-6}, "eps_clip_low_high": (0.1, 0.3)},
            "train.seed": 3,
            "ckpt.max_mem": math.inf,
            "reward.function_kwargs": {"weight": 0.5},
            "data.max_len": "64",
            "eval.dataset": None,
        },
        {"train.seed": 4},
    )
    assert config.actor.model_name_or_path == "models/m"
    assert (config.actor.adam.lr, config.actor.eps_clip_low_high) == (1e-6, (0.1, 0.3))
    assert (config.train.seed, config.ckpt.max_mem, config.data.max_len) == (4, math.inf, 64)
    assert (config.reward.function_kwargs, config.eval.dataset) == ('{"weight": 0.5}', None)


def test_a_file_stands_under_what_goes_before_it_and_a_dataclass_likewise(tmp_path):
    file = tmp_path / "stage.yaml"
    file.write_text("train:\n  seed: 5\n  batch_size: 2\n")
    config = read_config(SFTConfig, file, {"train.batch_size": 4})
    assert (config.train.seed, config.train.batch_size) == (5, 4)
    assert read_config(SFTConfig, config, {"train.seed": 6}).train.seed == 6


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"trian.seed": 1}, "config: unknown key trian.seed; did you mean train.seed?"),
        ({"train": {"seed": "x"}}, "config: train.seed must be a whole number, not 'x'"),
        ({"train": 3}, "config: train is a group of settings, not a setting"),
        ({"train.seed": object}, "config: <class 'object'> is no value of a setting; give a text, a number or a list"),
        (3, "config is a int; give a mapping of settings, the path of a YAML file, or a SFTConfig"),
        ("none.yaml", "none.yaml: No such file or directory; check the path"),
    ],
)
def test_what_cannot_be_read_is_told_without_flags(given, told):
    with pytest.raises(UserError) as error:
        read_config(SFTConfig, given)
    assert str(error.value) == told
