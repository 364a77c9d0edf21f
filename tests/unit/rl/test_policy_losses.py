"""Policy losses: by hand, OpenRLHF's where it has them (TRL's: test_trl_losses.py), and the same however a step is cut into passes."""

import itertools
import math
from collections.abc import Sequence
from typing import Any, get_args

import pytest
import torch
from helpers.rl_steps import LossPass, random_pass
from helpers.tables import frozen
from openrlhf.models.loss import PolicyLoss as TheirPolicyLoss

from lmm_r1.config.ppo import PolicyLossName
from lmm_r1.rl.losses import Correction, LossSettings, PolicyLoss, PolicyPass
from lmm_r1.train.update import Terms

NAMES = get_args(PolicyLossName)
AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def one(ratio: float, advantage: float, *, engine: float = 1.0) -> LossPass:
    """One token; the old probability is `engine` times the engine's."""
    return sequence([ratio], advantage, engine=[engine])


def sequence(ratios: Sequence[float], advantage: float, *, engine: Sequence[float] | None = None) -> LossPass:
    old = torch.zeros(1, len(ratios))
    return {
        "log_probs": torch.tensor([ratios]).log().requires_grad_(True),
        "old_log_probs": old,
        "advantages": torch.full_like(old, advantage),
        "mask": torch.ones_like(old).long(),
        "engine_log_probs": old - torch.tensor([engine or [1.0] * len(ratios)]).log(),
    }


def terms_of(given: LossPass, **settings: Any) -> Terms:
    return PolicyLoss(LossSettings(**settings))(PolicyPass(**given), kl_weight=0.0)


def loss_and_gradient(given: LossPass, **settings: Any) -> tuple[float, list[float]]:
    loss = terms_of(given, **settings).loss / LossSettings(**settings).units(given["mask"])
    (gradient,) = torch.autograd.grad(loss, given["log_probs"])
    return loss.item(), gradient.flatten().tolist()


# Loss, ratio, advantage, and by hand the value and its gradient.
BY_HAND = [
    ("ppo", 1.5, 1.0, -1.2, 0.0),
    ("ppo", 1.5, -1.0, 1.5, 1.5),
    ("ppo", 0.5, -1.0, 0.8, 0.0),
    # -sg(clip(r)) A log pi, of log pi = log r: the gradient is the weight, also beyond the bounds.
    ("cispo", 1.5, 2.0, -1.2 * 2 * math.log(1.5), -1.2 * 2),
    ("cispo", 0.5, 2.0, -0.8 * 2 * math.log(0.5), -0.8 * 2),
    ("cispo", 1.1, -2.0, 1.1 * 2 * math.log(1.1), 1.1 * 2),
    # 4 sigmoid(0) = 2, whose derivative is 4 / 4 = 1 times the ratio.
    ("sapo", 1.0, 1.0, -2.0, -1.0),
    ("sapo", 1.0, -1.0, 2 / 1.05, 1.0),
    # r = 3: sigmoid(2) and its derivative, times 4 and 4 r; for a negative advantage tau = 1.05.
    ("sapo", 3.0, 1.0, -4 * 0.880797078, -4 * 3 * 0.104993585),
    ("sapo", 3.0, -1.0, 4 / 1.05 * 0.890903179, 4 * 3 * 0.097194705),
]


@pytest.mark.parametrize(("loss", "ratio", "advantage", "expected", "gradient"), BY_HAND)
def test_losses_are_as_by_hand(loss, ratio, advantage, expected, gradient):
    found, (slope,) = loss_and_gradient(one(ratio, advantage), loss=loss)
    assert (found, slope) == (pytest.approx(expected, rel=1e-5), pytest.approx(gradient, rel=1e-5, abs=1e-7))


def test_a_response_has_one_ratio_and_each_token_its_own_gradient():
    wide = {"clip": (0.9, 0.9)}
    # The geometric mean of 1.5 and 1 is s; each token's share of its derivative is a half of it.
    s = math.sqrt(1.5)
    for loss in ("gspo", "gspo_token"):
        found, gradient = loss_and_gradient(sequence([1.5, 1.0], 2.0), loss=loss, **wide)
        assert found == pytest.approx(-2 * s)
        assert gradient == pytest.approx([-s, -s])
    # Of advantages that differ, GSPO-token gives each token its own, and GSPO both their mean.
    given = sequence([1.5, 1.0], 2.0)
    given["advantages"] = torch.tensor([[4.0, 0.0]])
    assert loss_and_gradient(given, loss="gspo", **wide)[1] == pytest.approx([-s, -s])
    assert loss_and_gradient(given, loss="gspo_token", **wide)[1] == pytest.approx([-2 * s, 0.0])
    # Both are clipped as a whole.
    for loss in ("gspo", "gspo_token"):
        assert loss_and_gradient(sequence([1.5, 1.0], 2.0), loss=loss) == (pytest.approx(-2.4), [0.0, 0.0])


@pytest.mark.parametrize("loss", NAMES)
@pytest.mark.parametrize("advantage", [1.0, -0.5])
def test_an_on_policy_step_is_the_policy_gradient(loss, advantage):
    _, gradient = loss_and_gradient(sequence([1.0, 1.0], advantage), loss=loss)
    assert gradient == pytest.approx([-advantage / 2] * 2)


@pytest.mark.parametrize("loss", NAMES)
def test_without_advantages_a_loss_has_no_gradient(loss):
    assert LossSettings(loss=loss).follows_advantages
    _, gradient = loss_and_gradient(sequence([1.5, 0.5, 1.0], 0.0), loss=loss)
    assert gradient == [0.0] * 3


# OpenRLHF has no weights for GSPO: with a correction it takes another ratio.
THEIRS = frozen("rl/policy_losses", "what_openrlhf_has_is_openrlhfs_4")


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("dual_clip", [None, 1.5])
@pytest.mark.parametrize(
    ("loss", "level", "mode", "gating", "bounds"),
    [("gspo", "off", "mask", "ratio", (0.5, 5.0)), *(("ppo", *case) for case in THEIRS)],
)
def test_what_openrlhf_has_is_openrlhfs(loss, aggregation, dual_clip, level, mode, gating, bounds):
    theirs = TheirPolicyLoss(
        clip_eps_low=0.1,
        clip_eps_high=0.3,
        dual_clip=dual_clip,
        token_level_loss=aggregation == "token-mean",
        policy_loss_type=loss,
        is_correction_level=level,
        is_correction_mode=mode,
        is_correction_gating=gating,
        is_correction_threshold=bounds,
    )
    correction = Correction(level=level, mode=mode, gating=gating, bounds=bounds)
    settings = {"loss": loss, "aggregation": aggregation, "clip": (0.1, 0.3), "dual_clip": dual_clip}
    given = random_pass(6, 3, 1, 4)
    found = terms_of(given, **settings, correction=correction)
    loss_of_all = found.loss / LossSettings(**settings).units(given["mask"])
    others = {"action_mask": given["mask"], "rollout_log_probs": given["engine_log_probs"]}
    expected = theirs(given["log_probs"], given["old_log_probs"], given["advantages"], **others)
    names = ("ppo_clip_ratio", "ppo_kl", "vllm_kl", "is_filter_ratio")
    assert set(found.token_sums) == {
        name for name, other in zip(names, expected[1:], strict=True) if other is not None
    }
    for name, other in zip(names, expected[1:], strict=True):
        if other is not None:
            torch.testing.assert_close((found.token_sums[name] / given["mask"].sum()).double(), other.double())
    torch.testing.assert_close(loss_of_all, expected[0])
    torch.testing.assert_close(
        *(torch.autograd.grad(value, given["log_probs"])[0] for value in (loss_of_all, expected[0]))
    )


def test_the_sums_of_sequences_are_divided_by_one_length():
    # Ratios of 1 and advantages of 1 and -2: -(3 - 2) / (10 x 2), whatever is in the sequences.
    given = {
        "log_probs": torch.zeros(2, 3, requires_grad=True),
        "old_log_probs": torch.zeros(2, 3),
        "advantages": torch.tensor([[1.0] * 3, [-2.0] * 3]),
        "mask": torch.tensor([[1, 1, 1], [1, 0, 0]]),
    }
    found, gradient = loss_and_gradient(given, aggregation="seq-mean-token-sum-norm", length=10)
    assert found == pytest.approx(-1 / 20)
    # A token's weight is no matter of how many others its response has.
    assert gradient == pytest.approx([-0.05, -0.05, -0.05, 0.1, 0.0, 0.0])


@pytest.mark.parametrize(
    ("correction", "weights"),
    [
        # The engine's ratios 1 and 4 of one response have the geometric mean 2.
        ({"mode": "clip", "bounds": (0.5, 5.0)}, [2.0, 2.0]),
        ({"mode": "clip", "bounds": (0.5, 1.5)}, [1.5, 1.5]),
        ({"mode": "clip", "bounds": (2.5, 5.0)}, [2.5, 2.5]),
        ({"mode": "mask", "bounds": (0.5, 5.0)}, [1.0, 4.0]),
        ({"mode": "mask", "bounds": (0.5, 1.5)}, [0.0, 0.0]),
    ],
)
def test_a_response_is_corrected_by_the_geometric_mean_of_its_ratios(correction, weights):
    given, own = sequence([1.0, 1.0], 1.0, engine=[1.0, 4.0]), Correction(level="seq", **correction)
    assert loss_and_gradient(given, correction=own)[1] == pytest.approx([-weight / 2 for weight in weights])
    filtered = terms_of(given, correction=own).token_sums["is_filter_ratio"] / 2
    assert filtered == (not correction["bounds"][0] <= 2 <= correction["bounds"][1])


CORRECTIONS = (
    Correction(),
    Correction(level="token", mode="clip", bounds=(0.8, 1.2)),
    Correction(level="seq", mode="clip", bounds=(0.9, 1.1)),
    Correction(level="seq", mode="mask", bounds=(0.9, 1.1)),
)


@pytest.mark.parametrize(("loss", "aggregation"), list(itertools.product(NAMES, AGGREGATIONS)))
@pytest.mark.parametrize("correction", CORRECTIONS, ids=lambda correction: f"{correction.level}-{correction.mode}")
def test_loss_and_gradient_are_those_of_the_whole_step_however_it_is_cut(loss, aggregation, correction):
    settings = LossSettings(loss=loss, aggregation=aggregation, length=7, correction=correction)
    ours = PolicyLoss(settings)
    # Two samples have no loss token: an empty response, and one that is masked.
    given = random_pass(6, 3, 0, 1, 4, 0)
    whole = ours(PolicyPass(**given), kl_weight=0.0).loss
    (expected,) = torch.autograd.grad(whole, given["log_probs"], retain_graph=True)
    assert expected.isfinite().all()
    assert expected.any()
    for sizes in ((1,) * 6, (2, 2, 2), (1, 3, 2), (1, 2, 1, 2)):
        start, total, units = 0, 0.0, 0
        for size in sizes:
            # Padding is to the longest of a pass, and of another width there.
            part = {name: value[start : start + size] for name, value in given.items()}
            padded = PolicyPass(**{name: torch.nn.functional.pad(value, (2, 1)) for name, value in part.items()})
            total = total + ours(padded, kl_weight=0.0).loss
            units += settings.units(padded.mask)
            start += size
        assert units == (14 if aggregation == "token-mean" and not loss.startswith("gspo") else 4)
        torch.testing.assert_close(total, whole)
        torch.testing.assert_close(torch.autograd.grad(total, given["log_probs"])[0], expected)


@pytest.mark.parametrize("loss", NAMES)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("correction", CORRECTIONS, ids=lambda correction: f"{correction.level}-{correction.mode}")
def test_a_pass_without_loss_tokens_is_worth_nothing_and_no_nan(loss, aggregation, correction):
    given = random_pass(0, 0)
    # What stands where there is no loss token is anything.
    for name in ("old_log_probs", "engine_log_probs"):
        given[name] = torch.full_like(given[name], -math.inf)
    given["advantages"] = torch.zeros_like(given["advantages"])
    found = terms_of(given, loss=loss, aggregation=aggregation, length=7, correction=correction)
    assert {found.loss.item(), *map(float, found.sums.values()), *map(float, found.token_sums.values())} == {0.0}
    (gradient,) = torch.autograd.grad(found.loss, given["log_probs"])
    assert not gradient.any()


@pytest.mark.parametrize(
    ("loss", "clipped"),
    # Ratios of 1.5, 1 and 0.5 with the advantages 1, 1 and 1: PPO holds the first back, CISPO its weight and the third's.
    [("ppo", 1 / 3), ("cispo", 2 / 3), ("sapo", 0.0)],
)
def test_what_is_clipped_is_counted(loss, clipped):
    found = terms_of(sequence([1.5, 1.0, 0.5], 1.0), loss=loss)
    assert found.token_sums["ppo_clip_ratio"].item() / 3 == pytest.approx(clipped)
