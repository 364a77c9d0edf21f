"""Rope scaling by length: one choice for a run, worked out by hand, and what is refused."""

import math

import pytest
import torch
from helpers.tiny_models import make_actor, with_longrope, with_rope

from lmm_r1.errors import UserError
from lmm_r1.lmm_kits import get_kit
from lmm_r1.models.rope_scaling import check_rope, short_length, takes_long_factors, tell_factors


def angles(actor: object, length: int) -> torch.Tensor:
    """Return the angles (length, D / 2) by which the tokens of a sample are turned."""
    rotary = actor.model.model.rotary_emb
    cos, sin = rotary(torch.zeros(1, length, 1), position_ids=torch.arange(length)[None])
    half = cos.shape[-1] // 2
    return torch.atan2(sin, cos)[0, :, :half]


def wrapped(values: torch.Tensor) -> torch.Tensor:
    return torch.remainder(values + math.pi, 2 * math.pi) - math.pi


@pytest.mark.parametrize("max_len", [8, 9])
def test_all_samples_of_a_run_are_turned_by_the_same_factors(tiny_checkpoint, tmp_path, max_len):
    folder = with_longrope(tiny_checkpoint("llm"), 8, copy=tmp_path / "model")
    actor = make_actor(folder, max_len=max_len)
    size = 2 * len(actor.model_config.rope_parameters["short_factor"])
    theta = actor.model_config.rope_parameters["rope_theta"]
    for length in (3, 8, *([9, 12] if max_len == 9 else [])):
        for index in range(size // 2):
            factor = 1.0 + index if max_len == 9 else 1.0
            frequency = theta ** (-2 * index / size) / factor
            expected = wrapped(torch.arange(length) * frequency)
            torch.testing.assert_close(angles(actor, length)[:, index], expected, atol=1e-5, rtol=0)


def test_the_buffers_stay_as_they_were_loaded(tiny_checkpoint, tmp_path):
    folder = with_longrope(tiny_checkpoint("llm"), 8, copy=tmp_path / "model")
    short, long = (dict(make_actor(folder, max_len=max_len).model.named_buffers()) for max_len in (8, 9))
    assert short.keys() == long.keys()
    assert all(torch.equal(short[name], value) for name, value in long.items())


def test_the_limit_is_that_of_the_first_training_and_of_longrope_alone(tiny_checkpoint, tmp_path):
    config = get_kit("llm").load_config(
        str(with_longrope(tiny_checkpoint("llm"), 64, copy=tmp_path / "model")), trust_remote_code=False
    )
    assert short_length(config) == 64
    assert [takes_long_factors(config, max_len=length) for length in (64, 65)] == [False, True]
    plain = get_kit("llm").load_config(str(tiny_checkpoint("llm")), trust_remote_code=False)
    assert short_length(plain) is None
    assert not takes_long_factors(plain, max_len=10**6)


def test_one_line_tells_of_long_factors(tiny_checkpoint, tmp_path, caplog):
    config = get_kit("llm").load_config(
        str(with_longrope(tiny_checkpoint("llm"), 64, copy=tmp_path / "model")), trust_remote_code=False
    )
    tell_factors(config, max_len=64, flag="--data.max_len")
    assert not caplog.records
    tell_factors(config, max_len=100, flag="--data.max_len")
    assert caplog.messages == [
        "--data.max_len 100: all samples take the long factors of longrope, as in vLLM; up to 64 they would take the short "
        "ones"
    ]


def test_scaling_that_depends_on_the_batch_is_refused_by_name(tiny_checkpoint, tmp_path):
    folder = with_rope(tiny_checkpoint("llm"), tmp_path / "model", rope_type="dynamic", factor=2.0)
    config = get_kit("llm").load_config(str(folder), trust_remote_code=False)
    with pytest.raises(UserError, match=r"--actor.model_name_or_path X: rope_type 'dynamic' .*32768.*linear, yarn"):
        check_rope(config, model="--actor.model_name_or_path X")
    with pytest.raises(UserError, match="rope_type 'dynamic'"):
        make_actor(folder)
    fixed = with_rope(tiny_checkpoint("llm"), tmp_path / "fixed", rope_type="yarn", factor=2.0)
    check_rope(get_kit("llm").load_config(str(fixed), trust_remote_code=False), model="X")
