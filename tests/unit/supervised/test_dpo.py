"""A preference run: its update is the mean over pairs, its evaluation too, and its reference what the flags say."""

import math
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.character_kit import CharacterKit
from helpers.conversations import message
from helpers.sessions import (
    POLICY,
    AccumulatingStrategy,
    TableActor,
    TableReference,
    configured,
    responding,
    session_of,
    updated,
)

from lmm_r1 import dotted
from lmm_r1.config import DPOConfig
from lmm_r1.data.messages import PreferenceRow
from lmm_r1.models.loading import LoadSettings
from lmm_r1.supervised import start
from lmm_r1.supervised.pairs import DPORun, PairBatch, PairEncoder, PairSample, sides_for_model
from lmm_r1.supervised.start import prepare_reference

config = partial(configured, DPOConfig)


def sample(chosen: list[int], rejected: list[int]) -> PairSample:
    """Responses behind a prompt of the token 0."""
    return PairSample(chosen=responding(chosen), rejected=responding(rejected))


def batch(*samples: PairSample) -> PairBatch:
    return PairBatch(sides=sides_for_model(samples))


def dpo_run(**flags: object) -> DPORun:
    settings = config(**flags)
    kit = CharacterKit()
    return DPORun(
        session_of(settings, AccumulatingStrategy(), kit=kit),
        TableActor(POLICY),
        reference=None if settings.model.simpo_enable else TableReference(),
        rows=[],
        encode=PairEncoder(kit=kit, processor=None, max_len=16),
        filler=sample([1], [2]).filler,
    )


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


@pytest.mark.usefixtures("one_process")
def test_the_loss_is_the_mean_over_the_pairs_of_the_update_however_they_fall_into_micro_batches():
    # Log-ratios of the tokens 1, 2 and 3: 0.5, 0 and -1.
    first, second, third = sample([1, 1], [2]), sample([2], [3, 2]), sample([3], [1])
    run = dpo_run(model__beta=0.5)
    made = updated(run, [batch(first, second), batch(third, run.filler)])
    differences = [1.0, 1.0, -1.5]
    assert made.loss == pytest.approx(sum(-math.log(sigmoid(0.5 * d)) for d in differences) / 3)
    assert made.tokens == 3 + 3 + 2
    assert made.means == {
        "pair_accuracy": pytest.approx(2 / 3),
        "reward_margin": pytest.approx(0.5 * (1 + 1 - 1.5) / 3),
        "chosen_reward": pytest.approx(0.5 * (1 + 0 - 1) / 3),
        "rejected_reward": pytest.approx(0.5 * (0 - 1 + 0.5) / 3),
        "chosen_log_prob": pytest.approx((-2 - 2 - 4) / 3),
        "rejected_log_prob": pytest.approx((-2 - 6 - 1) / 3),
        "nll_loss": pytest.approx((1 + 2 + 4) / 3),
    }
    # Of each pair -b sigmoid(-b d) / 3, times how often a token stands on the chosen side more than on the other.
    slopes = [-0.5 * sigmoid(-0.5 * d) / 3 for d in differences]
    expected = [0.0, 2 * slopes[0] - slopes[2], -slopes[0], -slopes[1] + slopes[2]]
    assert run.actor.table.grad.tolist() == pytest.approx(expected)


@pytest.mark.usefixtures("one_process")
def test_the_chosen_responses_loss_is_added_where_it_is_asked_for():
    run = dpo_run(model__beta=0.5, model__nll_loss_coef=0.25)
    made = updated(run, [batch(sample([1, 2], [3]))])
    # Log-ratios 0.5 and -1; the chosen response's tokens lose 1 and 2.
    assert made.loss == pytest.approx(-math.log(sigmoid(0.75)) + 0.25 * 1.5)
    assert made.means["nll_loss"] == 1.5


@pytest.mark.usefixtures("one_process")
def test_held_out_pairs_are_measured_without_those_that_are_too_long():
    def row(chosen: str, rejected: str, source: str) -> PreferenceRow:
        sides = {"chosen": chosen, "rejected": rejected}
        turns = {name: (message("assistant", text),) for name, text in sides.items()}
        return PreferenceRow(
            messages=(message("user", "q"),), margin=None, location="rows.jsonl line 1", datasource=source, **turns
        )

    rows = [row("a", "b", "x"), row("bb", "b", "y"), row("c" * 20, "b", "y")]
    run = dpo_run(model__beta=0.5, eval__dataset="held.jsonl", train__micro_batch_size=2)
    # Of letters from a: a has a log-ratio of 0, b of 2; an end token, 1, has 0.5.
    table = torch.zeros(128)
    run.actor.table = table
    reference = table.clone()
    reference[ord("b")], reference[1] = -2.0, -0.5
    run.reference = TableReference(reference.tolist())
    run.evaluate_on(rows)
    metrics = run.evaluation.evaluate(run.actor)
    # d = 0.5 - 2.5 = -2 in source x, and 4.5 - 2.5 = 2 in source y.
    losses = [-math.log(sigmoid(-1.0)), -math.log(sigmoid(1.0))]
    assert metrics == {
        "eval_loss": pytest.approx(sum(losses) / 2),
        "eval_pair_accuracy": 0.5,
        "eval_reward_margin": pytest.approx(0.0, abs=1e-6),
        "eval_chosen_reward": pytest.approx(0.5 * (0.5 + 4.5) / 2),
        "eval_rejected_reward": pytest.approx(0.5 * 2.5),
        "eval_overlong_rows": 1,
        "eval_x_loss": pytest.approx(losses[0]),
        "eval_x_pair_accuracy": 0.0,
        "eval_y_loss": pytest.approx(losses[1]),
        "eval_y_pair_accuracy": 1.0,
    }
    assert run.actor.modes == ["eval", "train"]


class Model(torch.nn.Module):
    """Keeps what it is built with."""

    def __init__(self, path: str, loaded: LoadSettings | None = None, **settings: Any) -> None:
        super().__init__()
        self.path, self.settings = path, (vars(loaded) if loaded else {}) | settings


class Strategy(SimpleNamespace):
    ring_attn_group = None

    def is_rank_0(self) -> bool:
        return True

    def get_ds_train_config(self) -> str:
        return "to train"

    def get_ds_eval_config(self, *, offload: bool) -> str:
        return f"offloaded: {offload}"

    def prepare(self, given: Any) -> Any:
        return (given[0], None, None) if isinstance(given, tuple) else given


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "KitActor", Model)
    monkeypatch.setattr(start, "check_packing", lambda *model, **settings: None)


def settled(**flags: object) -> DPOConfig:
    return config(model__model_name_or_path="m", ref__model_name_or_path="m", **flags)


@pytest.mark.usefixtures("loaded")
def test_policy_and_reference_compute_what_a_pair_has_in_common_once_where_the_flag_says_so():
    for shared in (True, False):
        settings = settled(train__shared_prefix_enable=shared, ds__param_dtype="fp32")
        run = DPORun.of(session_of(settings, Strategy()), rows=[], encode=None, filler=None)
        policy, reference = run.actor, run.reference
        assert policy.settings["share_prefix"] is reference.actor.settings["share_prefix"] is shared


@pytest.mark.usefixtures("loaded")
def test_with_lora_the_policy_without_its_adapter_is_the_reference_unless_another_is_named():
    policy = Model("m")
    own = prepare_reference(settled(ds__lora__rank=4), Strategy(), policy=policy)
    assert (own.actor, own.without_adapters) == (policy, True)
    other = dotted.replace(settled(ds__lora__rank=4, ds__param_dtype="fp32"), {"ref.model_name_or_path": "base"})
    assert prepare_reference(other, Strategy(), policy=policy).actor.path == "base"
    assert prepare_reference(settled(model__simpo_enable=True), Strategy(), policy=policy) is None
