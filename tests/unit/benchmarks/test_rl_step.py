"""What a timed step of RL asks for on a CPU, and that on a GPU the command's own defaults are timed."""

import argparse
from pathlib import Path

import pytest
import rl_step

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
