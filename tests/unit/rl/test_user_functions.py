"""Estimators and policy losses of a user's file: their flags, and what is said of files that cannot be used."""

import re

import pytest
import torch
from helpers.rl_steps import random_pass, small_run

from lmm_r1.cli.arguments import parse
from lmm_r1.config import PPOConfig, resolve
from lmm_r1.errors import UserError
from lmm_r1.rl.advantages import RewardedRollout, estimator_named, group_norm
from lmm_r1.rl.losses import LossSettings, PolicyLoss, PolicyPass, loss_named

FILE = """
from lmm_r1.rl.advantages import group_norm
from lmm_r1.rl.losses import LossSettings, cispo, ppo

def estimate(rollout):
    return group_norm(rollout)

def policy_loss(given, *, clip=0.2):
    return ppo(given, LossSettings(clip=(clip, clip)))

def plain(given):
    return cispo(given, LossSettings(clip=(1.0, 4.0))).losses

def costly(given):
    return given.log_ratios(to=given.reference_log_probs) - 0.1 * given.entropy

def wrong(given):
    return given.nothing

def short(given):
    return 0.5
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "own.py").write_text(FILE)
    return str(tmp_path / "own.py")


def read(tmp_path, **settings: str) -> PPOConfig:
    (tmp_path / "c.yaml").write_text(
        "".join(f"{name.replace('__', '.')}: {text}\n" for name, text in settings.items())
    )
    common = ["--actor.model_name_or_path", "m", "--data.prompt_dataset", "rows.jsonl"]
    flags = [f"--{name.replace('__', '.')}={text}" for name, text in settings.items()]
    by_flags, by_file = (
        parse(PPOConfig, [*common, *more], prog="p", description="")
        for more in (flags, ["--config", f"{tmp_path}/c.yaml"])
    )
    assert by_flags == by_file
    return resolve(by_flags)


def test_both_flags_take_a_file(file, tmp_path):
    config = read(tmp_path, algo__advantage__estimator=file, actor__policy_loss_type=f"{file}:plain")
    assert (config.algo.advantage.estimator, config.actor.policy_loss_type) == (file, f"{file}:plain")
    # They may compare the responses to a prompt, and use the range of ratios and the discount.
    assert (config.rollout.n_samples_per_prompt, config.actor.eps_clip_low_high) == (8, (0.2, 0.2))


@pytest.mark.parametrize(
    ("flag", "given", "meant"),
    [
        ("actor.policy_loss_type", ["pp"], "ppo"),
        ("algo.advantage.estimator", ["rlo"], "rloo"),
        ("data.format", ["sharegtp"], "sharegpt"),
        ("logger.trackers", ["own.py", "wanddb"], "wandb"),
    ],
)
def test_a_mistyped_name_is_still_refused(flag, given, meant, capsys):
    with pytest.raises(SystemExit):
        parse(PPOConfig, [f"--{flag}", *given], prog="p", description="")
    assert re.search(
        f"--{flag} must be one of .*, not '{given[-1]}'; did you mean {meant}\\?", capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("own", "known"),
    [("?clip=0.1", LossSettings(clip=(0.1, 0.1))), (":plain", LossSettings(loss="cispo", clip=(1.0, 4.0)))],
)
def test_a_loss_of_a_file_gives_the_gradients_of_the_same_loss_by_name(own, known, file):
    found = []
    for settings in (LossSettings(loss=file + own), known):
        given = random_pass(3, 5)
        loss = PolicyLoss(settings)(PolicyPass(**given), kl_weight=0.0).loss
        loss.backward()
        found.append([loss.detach(), given["log_probs"].grad])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_a_loss_of_a_file_gets_the_entropy_and_needs_a_reference_if_it_reads_them(file):
    def of(name: str, *, kl: float) -> PolicyLoss:
        return PolicyLoss.of(small_run(actor__policy_loss_type=f"{file}:{name}", algo__kl__init_coef=kl))

    assert of("costly", kl=1e-9).needs_entropy
    assert not of("plain", kl=0.0).needs_entropy
    with pytest.raises(
        UserError, match=r"own\.py:costly reads reference_log_probs, and --algo\.kl\.init_coef 0 loads no"
    ):
        of("costly", kl=0.0)


def test_an_estimator_of_a_file_may_return_what_those_of_the_project_do(file):
    tokens = {"mask": torch.ones(2, 3, dtype=torch.long), "kl": torch.zeros(2, 3)}
    rewards = torch.tensor([[0.9, 1 / 3]], dtype=torch.double)
    rollout = RewardedRollout(rewards=rewards, **tokens, kl_coef=0.0, gamma=1.0, lambd=1.0, divide=False)
    assert torch.equal(estimator_named(file)(rollout).advantages, group_norm(rollout).advantages)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (":wrong", r"own\.py:wrong: it raised AttributeError: .* 'nothing', at .*own\.py, line 18"),
        (":short", r"own\.py:short: a policy loss returns a tensor of the tokens' shape \(2, 3\), or TokenLosses"),
        (":none", r"own\.py:none: the file defines no none; add it, or name another as .*own\.py:NAME"),
        ("?clp=1", r"own\.py\?clp=1: policy_loss has no keyword-only parameter clp; known are clip"),
    ],
)
def test_a_function_that_cannot_be_used_is_named_with_its_line(text, said, file):
    with pytest.raises(UserError, match=said):
        loss_named(file + text)
