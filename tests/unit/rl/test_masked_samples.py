"""Losses are divided by what is learnt from: a masked sample is in no numerator and in no denominator, whatever the passes."""

from types import SimpleNamespace

import pytest
import ray
import torch
from helpers.played_updates import update_by_ids
from helpers.rl_steps import PlayedGroup, StepParts, sample, trained

from lmm_r1 import cpu, dotted
from lmm_r1.config import PPOConfig, resolve
from lmm_r1.data.sample import MediaRef
from lmm_r1.rl.samples import Pass, TrainingSample

pytestmark = pytest.mark.usefixtures("one_process")

# Two groups of two; a token's loss is its id. Of each group one is masked.
KEPT = {50: 3, 53: 4}
MASKED = {51: 1, 52: 2}


def one(
    prompt: list[int], response: list[int], *, group: int = 0, masked: bool, media: MediaRef | None = None
) -> TrainingSample:
    made = trained(sample(prompt, response, media=media, group=group))
    made.masked = masked
    return made


def rollout() -> list[TrainingSample]:
    """The four samples with what the models say of them."""
    return [
        one([1, 2], [50] * KEPT[50], masked=False),
        one([1, 2], [51] * MASKED[51], masked=True),
        one([3, 4, 5], [52] * MASKED[52], group=1, masked=True),
        one([3, 4, 5], [53] * KEPT[53], group=1, masked=False),
    ]


def maker(*, ranks: int, share_prefix: bool, **flags: object) -> StepParts:
    given = {
        "actor.model_name_or_path": "model",
        "actor.num_gpus_per_node": ranks,
        "ref.num_gpus_per_node": ranks,
        "data.prompt_dataset": "rows.jsonl",
        "reward.remote_url": "http://127.0.0.1:5000/get_reward",
        "rollout.batch_size": 2,
        "rollout.n_samples_per_prompt": 2,
        "train.batch_size": 4,
        "train.shared_prefix_enable": share_prefix,
    }
    config = resolve(
        dotted.replace(PPOConfig(), given | {name.replace("__", "."): value for name, value in flags.items()})
    )
    return StepParts(config, share_prefix=share_prefix, policy=PlayedGroup(*[object()] * ranks))


@pytest.mark.parametrize("per_token", [True, False])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("share_prefix", [True, False])
@pytest.mark.parametrize("samples", [1, 2, 4])
def test_a_mean_is_over_what_is_not_masked(samples, share_prefix, ranks, per_token, monkeypatch):
    made = maker(ranks=ranks, share_prefix=share_prefix, train__micro_batch_size=min(samples, 4 // ranks))
    (by_rank,) = made.update_passes(rollout(), step=0).steps
    expected = (50 * 3 + 53 * 4) / 7 if per_token else (50 + 53) / 2
    for step, _ in update_by_ids(by_rank, per_token=per_token, monkeypatch=monkeypatch):
        assert step.loss == pytest.approx(expected, rel=1e-6)


def test_a_masked_sample_takes_no_more_than_the_prompt_that_its_group_computes():
    passes = maker(ranks=1, share_prefix=True, train__micro_batch_size=4).update_passes(rollout(), step=0)
    (((found,),),) = passes.steps
    rows = {tuple(sample.token_ids.tolist()) for sample in found}
    assert rows == {(1, 2, 50, 50, 50), (1, 2), (3, 4, 5), (3, 4, 5, 53, 53, 53, 53)}
    for each in found:
        parts = (each.loss_mask, each.turns, each.log_probs, each.advantages, each.returns)
        assert {len(part) for part in parts} == {len(each.token_ids) - 1}
    # Prompts of 2 and 3, responses of 3 and 4.
    assert passes.unique_tokens == 2 + 3 + 3 + 4
    # What is logged of it stays: how long it was, and that it was masked.
    assert sorted(sample.logged["response_length"] for sample in found) == [1, 2, 3, 4]
    assert sorted(sample.masked for sample in found) == [False, False, True, True]


def test_a_step_of_masked_samples_alone_is_worth_nothing_and_stays_a_number(monkeypatch):
    samples = [one([1, 2], [50] * length, masked=True) for length in (1, 2, 3, 4)]
    (by_rank,) = maker(ranks=1, share_prefix=True, train__micro_batch_size=2).update_passes(samples, step=0).steps
    for per_token in (True, False):
        ((step, _),) = update_by_ids(by_rank, per_token=per_token, monkeypatch=monkeypatch)
        assert step.loss == 0.0


def test_a_sample_without_loss_tokens_has_a_mean_of_zero(monkeypatch):
    def model(value: float) -> PlayedGroup:
        def forward(passes: list[Pass]) -> list[list[torch.Tensor]]:
            return [[torch.full(sample.loss_mask.shape, value) for sample in part] for part in passes]

        return PlayedGroup(SimpleNamespace(forward=forward))

    monkeypatch.setattr(ray, "get", lambda refs: refs)
    monkeypatch.setattr(cpu, "has_cuda", lambda: True)
    made = StepParts(maker(ranks=1, share_prefix=True).config, policy=model(-2.0), reference=model(-3.0))
    made.mismatch.measure = lambda samples: None
    first, second = made.with_outputs([one([1, 2], [50, 50], masked=False), one([1, 2], [], masked=False)])
    assert [each.logged["kl"] for each in (first, second)] == [1.0, 0.0]
    assert [each.logged["logprobs_diff"] for each in (first, second)] == [1.0, 0.0]
