"""A reward model's training: losses over pairs, its evaluation with calibration, and where a response is scored."""

import math
from types import SimpleNamespace

import pytest
import torch
from helpers.character_kit import CharacterKit
from helpers.conversations import message, write_rows
from helpers.played_updates import PlayedEngine
from helpers.sessions import AccumulatingStrategy, configured, session_of, updated

from lmm_r1 import dotted
from lmm_r1.config import RMConfig
from lmm_r1.data.messages import PreferenceRow
from lmm_r1.errors import UserError
from lmm_r1.models.packed.packing import ModelSample
from lmm_r1.supervised.pairs import RewardEncoder, RewardSample, RMRun


class Engine(PlayedEngine):
    """A model whose reward is a hundredth of how far the first letter of a response is behind a, times a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.tensor(1.0, requires_grad=True)
        self.module.model = SimpleNamespace(config=SimpleNamespace())

    def __call__(self, samples: list[ModelSample], *, of_samples: bool, **given: object) -> torch.Tensor:
        assert of_samples
        return self.weight * (torch.stack([sample.token_ids[5] for sample in samples]) - ord("a"))


def pair(chosen: str, rejected: str, **judged: object) -> PreferenceRow:
    sides = {name: (message("assistant", text),) for name, text in (("chosen", chosen), ("rejected", rejected))}
    given = {"margin": None, "location": "rows.jsonl line 1"} | judged
    return PreferenceRow(messages=(message("user", "q"),), **sides, **given)


def encoder() -> RewardEncoder:
    return RewardEncoder(kit=CharacterKit(), processor=None, max_len=16)


def rm_run(**flags: object) -> RMRun:
    config = configured(RMConfig, **flags)
    sample = encoder()(pair("a", "b"))
    return RMRun(
        session_of(config, AccumulatingStrategy(), kit=CharacterKit()),
        Engine(),
        rows=[],
        encode=encoder(),
        filler=sample.filler,
    )


def samples(*rows: PreferenceRow) -> list[RewardSample]:
    return [encoder()(row) for row in rows]


def loss(difference: float) -> float:
    return math.log1p(math.exp(-difference))


@pytest.mark.usefixtures("one_process")
def test_a_batch_knows_margins_scores_and_what_stands_before_a_response():
    first, second = samples(pair("ab", "c", margin=0.5), pair("b", "cd", chosen_score=2.0, rejected_score=-1.0))
    batch = rm_run().collate([first, second, second.filler])
    assert batch.margins.tolist() == [0.5, 0.0, 0.0]
    assert batch.scores.tolist() == [[0.0, 2.0, 2.0], [0.0, -1.0, -1.0]]
    # u q END newline a; of a filler's sides, all of them.
    assert [side.prompt_tokens for side in batch.sides] == [5, 5, 7, 5, 5, 8]
    # Chosen sides first; those of a filler have prompts of their own.
    assert [side.group for side in batch.sides] == [0, 1, None, 0, 1, None]


@pytest.mark.usefixtures("one_process")
def test_the_loss_is_the_mean_over_the_pairs_of_the_update_however_they_fall_into_micro_batches():
    run = rm_run()
    batches = [rm_run().collate(samples(pair("c", "a"), pair("b", "c")))]
    batches.append(rm_run().collate([*samples(pair("d", "d")), run.filler]))
    made = updated(run, batches)
    assert made.loss == pytest.approx((loss(2) + loss(-1) + loss(0)) / 3)
    assert made.tokens == 3 * 4
    assert made.means == {
        "pair_accuracy": pytest.approx(1 / 3),
        "reward_margin": pytest.approx(1 / 3),
        "chosen_reward": pytest.approx((2 + 1 + 3) / 3),
        "rejected_reward": pytest.approx((0 + 2 + 3) / 3),
    }
    slope = sum(-difference / (1 + math.exp(difference)) for difference in (2, -1, 0)) / 3
    assert run.actor.weight.grad.item() == pytest.approx(slope)


@pytest.mark.usefixtures("one_process")
def test_margins_and_scores_count_where_the_flags_say_so():
    batch = rm_run().collate(samples(pair("c", "a", margin=0.5, chosen_score=1.0, rejected_score=0.5)))
    assert updated(rm_run(model__margin_loss_enable=True), [batch]).loss == pytest.approx(loss(1.5))
    # (2 - 1)^2 and (0 - 0.5)^2
    assert updated(rm_run(model__loss_type="regression"), [batch]).loss == pytest.approx((1 + 0.25) / 2)


@pytest.mark.usefixtures("one_process")
def test_held_out_pairs_say_how_well_rankings_are_right_and_how_sure_the_model_may_be():
    run = rm_run(eval__dataset="held.jsonl", train__micro_batch_size=2)
    # Margins 2, 2 and -1: confidences 0.880797 twice, and 0.731059 in a bin of its own, which is wrong.
    run.evaluate_on([pair("c", "a"), pair("d", "b"), pair("a", "b")])
    metrics = run.evaluation.evaluate(run.actor)
    high, low = 1 / (1 + math.exp(-2)), 1 / (1 + math.exp(-1))
    rewards = [2, 0, 3, 1, 0, 1]
    mean = sum(rewards) / 6
    deviation = (sum((reward - mean) ** 2 for reward in rewards) / 6) ** 0.5
    assert metrics == {
        "eval_loss": pytest.approx((loss(2) + loss(2) + loss(-1)) / 3),
        "eval_pair_accuracy": pytest.approx(2 / 3),
        "eval_reward_margin": pytest.approx(1.0),
        "eval_reward_mean": pytest.approx(mean),
        "eval_reward_std": pytest.approx(deviation),
        "eval_calibration_error": pytest.approx((2 * (1 - high) + low) / 3),
        "eval_overlong_rows": 0,
    }
    run.finish()
    config = run.actor.module.model.config
    assert (config.mean, config.std) == (pytest.approx(mean), pytest.approx(deviation))


def test_rows_without_what_the_loss_needs_are_refused(tmp_path):
    row = {"prompt": "1?", "chosen": "2", "rejected": "3"}
    path = write_rows(tmp_path / "rows.jsonl", row | {"chosen_score": 1.0, "rejected_score": 0.0}, row)
    base = {"data.dataset": path, "train.batch_size": 1}

    def read(**flags: object) -> int:
        return len(RMRun.training_rows(dotted.replace(configured(RMConfig, **flags), base)))

    assert read() == 2
    with pytest.raises(UserError, match="rows.jsonl line 2: --model.loss_type regression needs the scores of both"):
        read(model__loss_type="regression")
