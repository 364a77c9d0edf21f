"""The gap's numbers by hand, which rows they count, and what the check says."""

import math
from types import SimpleNamespace

import pytest
import ray
import torch
from helpers.conversations import clip, message, picture, row
from openrlhf.models.loss import PolicyLoss
from openrlhf.trainer.ppo_utils.experience import Experience, make_experience_batch, split_experience_batch

from lmm_r1 import dotted
from lmm_r1.config import PPOConfig, mismatch_limit
from lmm_r1.errors import UserError
from lmm_r1.rl.mismatch import Gap, Mismatch, gaps_of, merged, modalities, modality_info, modality_of
from lmm_r1.rl.model_groups import take_gaps
from lmm_r1.rl.workers import KitActorPPOTrainer

POLICY = torch.tensor([[0.0, -1.0, -2.0, 0.0], [0.0, -0.5, 0.0, 0.0]])
ENGINE = torch.tensor([[0.0, -1.5, -1.8, 9.0], [7.0, -0.4, 9.0, 9.0]])
MASK = torch.tensor([[0, 1, 1, 0], [0, 1, 0, 0]])


def approx(value: float) -> object:
    return pytest.approx(value, rel=1e-6)


def experience(policy: torch.Tensor, engine: torch.Tensor, mask: torch.Tensor, kinds: list[str]) -> Experience:
    return Experience(
        sequences=torch.zeros(len(policy), policy.shape[1] + 1),
        action_log_probs=policy,
        rollout_log_probs=engine,
        action_mask=mask,
        info={name: torch.cat([modality_info(kind)[name] for kind in kinds]) for name in ("rows/image", "rows/video")},
    )


def far(distance: float, *, kind: str, tokens: int = 8) -> Experience:
    """A row whose tokens are all so far apart."""
    return experience(torch.full((1, tokens), -distance), torch.zeros(1, tokens), torch.ones(1, tokens), [kind])


def mismatch(dtype: str = "bf16", **settings: object) -> Mismatch:
    return Mismatch(dotted.replace(PPOConfig(), {"ds.param_dtype": dtype}), **settings)


def test_a_gap_is_that_of_response_tokens():
    (gap,) = gaps_of(POLICY, ENGINE, MASK, ["text", "text"]).values()
    # 0.5, 0.2 and 0.1.
    assert gap.tokens == 3
    statistics = gap.statistics()
    assert statistics["mean"] == approx(0.8 / 3)
    assert statistics["mean_exp"] == approx((math.exp(0.5) + math.exp(0.2) + math.exp(0.1)) / 3)
    assert statistics["max"] == approx(0.5)


def test_each_modality_has_its_own_gap_and_all_have_one_over_all_tokens():
    run = mismatch()
    run.limit = math.inf
    run.measure([experience(POLICY, ENGINE, MASK, ["image", "text"]), far(0.4, kind="video", tokens=1)])
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
    parts = [gaps_of(POLICY[[index]], ENGINE[[index]], MASK[[index]], ["text"]) for index in (0, 1)]
    together = gaps_of(POLICY, ENGINE, MASK, ["text", "text"])
    (one,), (other,) = merged(parts).values(), together.values()
    assert (one.tokens, one.largest) == (other.tokens, other.largest)
    assert (one.total, one.total_exp) == (approx(other.total), approx(other.total_exp))


def test_a_rank_without_tokens_of_a_kind_changes_nothing():
    nothing = gaps_of(POLICY, ENGINE, torch.zeros_like(MASK), ["text", "image"])
    assert nothing["text"] == Gap(tokens=0, total=0.0, total_exp=0.0, largest=0.0)
    run = mismatch()
    run.add([nothing])
    assert run.take_metrics() == {}


def test_a_banned_token_does_not_overflow():
    gap = Gap.of(torch.tensor([100.0]))
    assert gap.statistics()["mean_exp"] == approx(math.exp(100))


def test_rows_are_counted_by_what_they_hold():
    image, video = picture(8, 8), clip(2, 8, 8)
    assert [modality_of(row(message("user", *parts))) for parts in (["1+1?"], [image], [video], [image, video])] == [
        *("text", "image", "video", "video")
    ]


def test_the_modality_stays_with_its_sample_on_the_way_to_a_pass():
    both = experience(POLICY, ENGINE, MASK, ["image", "text"])
    first, second = split_experience_batch(both)
    assert modalities(make_experience_batch([second, first, first])) == ["text", "image", "image"]


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
    with pytest.raises(UserError, match="0.36 on average over 8 tokens of image rows .* see different images"):
        mismatch().measure([far(0.36, kind="image"), far(0.0, kind="text", tokens=64)])


def test_a_gap_that_grows_along_the_sequence_points_at_positions_and_one_that_does_not_at_the_weights():
    even, growing = far(0.3, kind="text"), far(0.3, kind="text")
    growing.action_log_probs = -torch.linspace(0, 1, 8)[None]
    with pytest.raises(UserError, match="did the last ones reach the engine"):
        mismatch().measure([even])
    with pytest.raises(UserError, match="It grows along the sequence"):
        mismatch().measure([growing])


def test_what_is_no_number_is_no_agreement():
    broken = far(0.0, kind="text")
    broken.action_log_probs[0, 3] = math.nan
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


def pass_of(policy: torch.Tensor, old: torch.Tensor | None) -> KitActorPPOTrainer:
    """The policy's trainer after the loss of one pass."""
    trainer = object.__new__(KitActorPPOTrainer)
    trainer.strategy, trainer.gaps = SimpleNamespace(config=PPOConfig()), {}
    trainer._experience = experience(POLICY, ENGINE, MASK, ["text", "image"])
    settings = {"action_mask": MASK, "rollout_log_probs": ENGINE}
    trainer.loss, *_ = trainer._policy_loss(PolicyLoss(), policy, old, torch.ones_like(policy), **settings)
    return trainer


def test_a_pass_that_computes_the_old_log_probs_itself_notes_its_gap():
    log_probs = POLICY.clone().requires_grad_()
    trainer = pass_of(log_probs, None)
    assert trainer.gaps == gaps_of(POLICY, ENGINE, MASK, ["text", "image"])
    # The policy is still the old one: ratios of 1, so that the gradient is minus the mean advantage, here 1 for each token.
    trainer.loss.backward()
    torch.testing.assert_close(log_probs.grad, -MASK / MASK.sum())


def test_a_pass_whose_old_log_probs_are_known_notes_none():
    # The gap is that of the policy that was rolled out, and not of one that has been updated since.
    assert pass_of(POLICY - 1, POLICY).gaps == {}


def test_workers_that_share_rows_are_counted_once(monkeypatch):
    # Two pairs of ranks: both of a pair know the log-probs of the same rows.
    parts = [{"text": Gap.of(torch.full((2,), distance))} for distance in (0.1, 0.1, 0.4, 0.4)]
    workers = SimpleNamespace(duplicate_actors=2, async_run_method=lambda method_name: parts)
    monkeypatch.setattr(ray, "get", lambda refs: refs)
    run = mismatch()
    assert run.take_metrics(take_gaps(workers))["mismatch/mean"] == approx(0.25)
    # What was measured before the update is not counted again.
    run.measure([far(0.05, kind="text")])
    assert run.take_metrics(take_gaps(workers))["mismatch/mean"] == approx(0.05)
