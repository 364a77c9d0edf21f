"""What a timed step asks for on a CPU and on a GPU: ours of the command, whose defaults stand, and TRL's of settings that it has."""

import argparse
import dataclasses
from pathlib import Path

import pytest
import rl_step
import trl
import trl_step
from helpers.tables import table

ASKED = {"prompts": 16, "samples": 8, "new_tokens": 512, "image_side": 896, "dtype": "bf16"}
SIZES = {"--rollout.batch_size": "16", "--rollout.n_samples_per_prompt": "8", "--train.batch_size": "128"}
# 256 of text, 32 x 32 of the image, and the response.
LONGEST = {"--data.max_len": "1792", "--rollout.max_new_tokens": "512"}


def flags(monkeypatch, *, cards, further=()):
    monkeypatch.setattr(rl_step, "cards", lambda: cards)
    arguments = argparse.Namespace(**ASKED, flags=list(further))
    return rl_step.stage_flags(arguments, Path("f"), Path("model"), Path("reward.py"), Path("run"))


@pytest.mark.parametrize("cards", [[], ["NVIDIA H200"]])
def test_a_step_has_the_sizes_that_were_asked_for_and_ends_with_the_users_flags(monkeypatch, cards):
    given = flags(monkeypatch, cards=cards, further=["--ds.zero_stage", "0"])
    values = dict(zip(given, given[1:], strict=False))
    assert {name: values[name] for name in SIZES | LONGEST} == SIZES | LONGEST
    assert given[-2:] == ["--ds.zero_stage", "0"]


def test_on_a_gpu_who_shares_it_and_how_large_passes_are_is_left_to_the_command(monkeypatch):
    left_open = {"--train.colocate_all", "--actor.num_gpus_per_node", "--ref.num_gpus_per_node"}
    left_open |= {"--rollout.micro_batch_size", "--train.micro_batch_size"}
    assert left_open <= set(flags(monkeypatch, cards=[]))
    assert not left_open & set(flags(monkeypatch, cards=["NVIDIA H200"]))


OF_TRL = table("benchmarks/trl_step", "asked")


def settings(monkeypatch, *, cards, **asked):
    monkeypatch.setattr(trl_step, "cards", lambda: cards)
    arguments = argparse.Namespace(**{**OF_TRL, "correction": "token_truncate", **asked})
    return trl_step.settings(arguments, Path("run"), media=(7, 9))


@pytest.mark.parametrize("cards", [[], ["NVIDIA H200"]])
def test_every_setting_is_one_of_trls(monkeypatch, cards):
    known = {field.name for field in dataclasses.fields(trl.GRPOConfig)}
    assert settings(monkeypatch, cards=cards).keys() <= known


def test_on_a_gpu_the_engine_sleeps_in_the_process_and_knows_how_long_rows_are(monkeypatch):
    given = settings(monkeypatch, cards=["NVIDIA H200"])
    assert (given["use_vllm"], given["vllm_mode"], given["vllm_enable_sleep_mode"]) == (True, "colocate", True)
    # 256 of text, 32 x 32 of the image, and the response.
    assert given["vllm_max_model_length"] == 256 + 1024 + 512
    assert given["generation_kwargs"] == {"ignore_eos": True, "logit_bias": {7: -100.0, 9: -100.0}}
    assert given["vllm_importance_sampling_mode"] == "token_truncate"


def test_a_step_is_one_update_however_large_a_pass_is(monkeypatch):
    by_group = settings(monkeypatch, cards=["NVIDIA H200"])
    larger = settings(monkeypatch, cards=["NVIDIA H200"], micro_batch=32)
    passes = [(one["per_device_train_batch_size"], one["gradient_accumulation_steps"]) for one in (by_group, larger)]
    assert passes == [(8, 16), (32, 4)]


def test_the_correction_can_be_switched_off(monkeypatch):
    given = settings(monkeypatch, cards=["NVIDIA H200"], correction="off")
    assert not given["vllm_importance_sampling_correction"]
    assert "vllm_importance_sampling_mode" not in given
