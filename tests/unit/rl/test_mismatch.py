"""The gap's numbers by hand, which rows they count, and what the check says."""

import math
from types import SimpleNamespace

import pytest
import torch
from helpers.rl_steps import sample

from lmm_r1 import dotted
from lmm_r1.config import PPOConfig, mismatch_limit
from lmm_r1.errors import UserError
from lmm_r1.rl.losses import LossSettings, PolicyLoss
from lmm_r1.rl.mismatch import Gap, Mismatch, Modality, gaps_of, merged
from lmm_r1.rl.samples import TrainingSample
from lmm_r1.rl.workers import KitPolicyActor

POLICY = torch.tensor([[0.0, -1.0, -2.0, 0.0], [0.0, -0.5, 0.0, 0.0]])
ENGINE = torch.tensor([[0.0, -1.5, -1.8, 9.0], [7.0, -0.4, 9.0, 9.0]])
MASK = torch.tensor([[0, 1, 1, 0], [0, 1, 0, 0]])


def approx(value: float) -> object:
    return pytest.approx(value, rel=1e-6)


def with_log_probs(policy: torch.Tensor, engine: torch.Tensor, mask: torch.Tensor, kind: Modality) -> TrainingSample:
    one = sample([1], [2] * len(policy))
    one.log_probs, one.engine_log_probs, one.loss_mask, one.modality = policy, engine, mask.bool(), kind
    return one


def samples(*kinds: Modality, mask: torch.Tensor = MASK) -> list[TrainingSample]:
    """A sample of each row of the tensors above."""
    return list(map(with_log_probs, POLICY, ENGINE, mask, kinds))


def far(distance: float, *, kind: Modality, tokens: int = 8) -> TrainingSample:
    """A row whose tokens are all so far apart."""
    return with_log_probs(torch.full((tokens,), -distance), torch.zeros(tokens), torch.ones(tokens), kind)


def mismatch(dtype: str = "bf16", **settings: object) -> Mismatch:
    return Mismatch(dotted.replace(PPOConfig(), {"ds.param_dtype": dtype}), **settings)


def test_a_gap_is_that_of_response_tokens():
    (gap,) = gaps_of(samples("text", "text"), POLICY).values()
    # 0.5, 0.2 and 0.1.
    assert gap.tokens == 3
    statistics = gap.statistics()
    assert statistics["mean"] == approx(0.8 / 3)
    assert statistics["mean_exp"] == approx((math.exp(0.5) + math.exp(0.2) + math.exp(0.1)) / 3)
    assert statistics["max"] == approx(0.5)


def test_each_modality_has_its_own_gap_and_all_have_one_over_all_tokens():
    run = mismatch()
    run.limit = math.inf
    run.measure([*samples("image", "text"), far(0.4, kind="video", tokens=1)])
    metrics = run.take_metrics()
    assert metrics["mismatch/image/mean"] == approx(0.35)
    assert metrics["mismatch/text/mean"] == approx(0.1)
    assert metrics["mismatch/video/mean"] == approx(0.4)
    # The mean of four tokens, and not of three means.
    assert metrics["mismatch/mean"] == approx((0.5 + 0.2 + 0.1 + 0.4) / 4)
    assert metrics["mismatch/max"] == approx(0.5)
    assert len(metrics) == 4 * 3
    assert run.take_metrics() == {}, "the next step begins anew"


def test_the_gap_of_two_ranks_is_that_over_their_tokens_together():
    both = samples("text", "text")
    parts = [gaps_of([one], [one.log_probs]) for one in both]
    together = gaps_of(both, POLICY)
    (one,), (other,) = merged(parts).values(), together.values()
    assert (one.tokens, one.largest) == (other.tokens, other.largest)
    assert (one.total, one.total_exp) == (approx(other.total), approx(other.total_exp))


@pytest.mark.parametrize(("dtype", "limit"), [("fp32", 0.01), ("bf16", 0.1), ("fp16", 0.1)])
def test_the_limit_follows_from_the_precision_unless_it_is_given(dtype, limit):
    config = dotted.replace(PPOConfig(), {"ds.param_dtype": dtype})
    assert mismatch_limit(config) == limit
    assert mismatch_limit(dotted.replace(config, {"algo.mismatch_limit": 0.3})) == 0.3
    mismatch(dtype).measure([far(0.9 * limit, kind="text")])
    with pytest.raises(UserError, match=f"--algo.mismatch_limit {limit:g}. No weight was changed"):
        mismatch(dtype).measure([far(1.1 * limit, kind="text")])


def test_the_rows_of_a_kind_are_checked_by_themselves_and_the_message_says_which():
    # Over all tokens the mean is 0.04.
    with pytest.raises(UserError, match="0.36 on average over 8 tokens of image rows .* processor files"):
        mismatch().measure([far(0.36, kind="image"), far(0.0, kind="text", tokens=64)])


def test_what_is_no_number_is_no_agreement():
    broken = far(0.0, kind="text")
    broken.log_probs[3] = math.nan
    with pytest.raises(UserError, match="nan on average"):
        mismatch().measure([broken])


def test_a_kind_on_which_the_engine_cannot_agree_is_measured_and_the_others_are_checked():
    run = mismatch(unchecked=frozenset({"image"}))
    run.measure([far(0.4, kind="image"), far(0.01, kind="text")])
    assert run.take_metrics()["mismatch/image/mean"] == approx(0.4)
    with pytest.raises(UserError, match="over 8 tokens of text rows"):
        run.measure([far(0.4, kind="image"), far(0.2, kind="text")])


@pytest.mark.parametrize("drifts", [False, True])
def test_the_limit_holds_in_every_step_unless_samples_may_be_older_than_the_policy(drifts):
    run = Mismatch(dotted.replace(PPOConfig(), {"ds.param_dtype": "bf16", "train.async_enable": drifts}))
    run.measure([far(0.01, kind="text")])
    assert run.take_metrics()["mismatch/mean"] == approx(0.01)
    # Of a step whose own passes give the old log-probs, it is known when the step has ended.
    update = [{"text": Gap.of(torch.full((8,), 0.4))}]
    assert run.take_metrics(update)["mismatch/mean"] == approx(0.4)
    if drifts:
        run.hold(2)
        run.measure([far(0.5, kind="text")])
        return
    with pytest.raises(UserError, match="0.4 on average over 8 tokens of text rows .* Step 2 was trained with them"):
        run.hold(2)
    assert run.take_metrics([{"text": Gap.of(torch.full((8,), 0.05))}])
    run.hold(3)
    with pytest.raises(UserError, match="0.5 on average .* No weight was changed"):
        run.measure([far(0.5, kind="text")])


def pass_of(log_probs: torch.Tensor, *, old: bool) -> tuple[KitPolicyActor, torch.Tensor]:
    """The policy's worker after a pass whose log-probs are given, and the pass's loss, a mean over tokens.

    Args:
        old: whether the log-probs before the update are known.
    """
    worker = object.__new__(KitPolicyActor)
    worker.strategy, worker.gaps = SimpleNamespace(config=PPOConfig()), {}
    worker.loss = PolicyLoss(LossSettings())
    worker._run = lambda given, **settings: (log_probs, SimpleNamespace(entropy=None))
    given = samples("text", "image")
    for one in given:
        one.advantages, one.log_probs = torch.ones(4), one.log_probs if old else None
    return worker, worker._terms(given, kl_weight=0.0).loss / MASK.sum()


def test_a_pass_that_computes_the_old_log_probs_itself_notes_its_gap():
    log_probs = POLICY.clone().requires_grad_()
    worker, loss = pass_of(log_probs, old=False)
    assert worker.gaps == gaps_of(samples("text", "image"), POLICY)
    # The policy is still the old one: ratios of 1, so that the gradient is minus the mean advantage, here 1 for each token.
    loss.backward()
    torch.testing.assert_close(log_probs.grad, -MASK / MASK.sum())
