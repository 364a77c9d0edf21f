"""Evaluation in a supervised run: the loss over all ranks' rows, when it is made, and which checkpoint is the best."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from helpers.character_kit import CharacterKit
from helpers.conversations import message, row
from helpers.sessions import configured

from lmm_r1.config import SFTConfig
from lmm_r1.data.messages import Row
from lmm_r1.errors import UserError
from lmm_r1.host.checkpoint_folder import METRIC, best_metric
from lmm_r1.models.packed.packing import ModelSample, stacked
from lmm_r1.supervised.loop import BestMetric, TokenTerms
from lmm_r1.supervised.samples import SFTSample
from lmm_r1.supervised.sft import RowEncoder, SFTEvaluation

pytestmark = pytest.mark.usefixtures("one_process")


class Share:
    """One rank's place among those that have rows of their own."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks

    def get_local_rank(self) -> int:
        return self.rank

    def size(self) -> int:
        return self.ranks

    def get_group(self) -> None:
        return None


class Model:
    """Notes whether dropout would be on when it is evaluated."""

    training = True

    def eval(self) -> None:
        self.training = False

    def train(self) -> None:
        self.training = True


config = partial(configured, SFTConfig)


def answered(text: str, *, source: str = "a") -> Row:
    return replace(row(message("user", "q"), message("assistant", text)), datasource=source)


def log_probs(batch: list[ModelSample]) -> torch.Tensor:
    """Of a loss token the negative of how far it is behind 'a'; the end token, 1, costs 96."""
    return stacked(batch, lambda one: -(one.token_ids[1:] - ord("a")).abs() * one.loss_mask)


def evaluation(rows: list[Row], *, rank: int = 0, ranks: int = 1, **flags: object) -> SFTEvaluation:
    settings = config(train__micro_batch_size=2, data__max_len=12, eval__dataset="held_out.jsonl", **flags)
    run = SimpleNamespace(
        config=settings,
        strategy=SimpleNamespace(ds_device_mesh={"dp": Share(rank, ranks)}),
        taken=RowEncoder.of(settings, kit=CharacterKit(), processor=None),
        filler=SFTSample(token_ids=[1, 1], loss_mask=[False, False], media=None),
        collate=lambda samples: [sample.for_model() for sample in samples],
        token_losses=lambda batch: TokenTerms(loss=-log_probs(batch)),
    )
    return SFTEvaluation(run, rows)


# Losses of loss tokens: b 1, end 96; c 2, d 3, end 96; c 2, end 96.
ROWS = [answered("b"), answered("cd"), answered("c" * 20), answered("c", source="b")]
MEAN = (1 + 96 + 2 + 3 + 96 + 2 + 96) / 7


def test_the_loss_is_the_mean_over_all_loss_tokens():
    model = Model()
    metrics = evaluation(ROWS).evaluate(model)
    assert metrics == {
        "eval_loss": pytest.approx(MEAN),
        "eval_overlong_rows": 1,
        "eval_a_loss": pytest.approx((1 + 96 + 2 + 3 + 96) / 5),
        "eval_b_loss": pytest.approx((2 + 96) / 2),
    }
    assert model.training


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_ranks_take_shares_of_the_rows_in_as_many_passes_and_their_sums_make_the_whole(ranks, monkeypatch):
    sums, passes = [], []
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: sums.append(tensor.clone()))
    for rank in range(ranks):
        own = evaluation(ROWS, rank=rank, ranks=ranks)
        count = []
        measured = own._measured
        own._measured = lambda samples, count=count, measured=measured: (count.append(1), measured(samples))[1]
        if rank < len(ROWS) and rank != 2:
            own.evaluate(Model())
        else:  # It has no row of its own that fits.
            with pytest.raises(UserError):
                own.evaluate(Model())
        passes.append(len(count))
    assert len(set(passes)) == 1
    total, tokens, overlong = torch.stack(sums).sum((0, 1)).tolist()
    assert (total / tokens, overlong) == (pytest.approx(MEAN), 1)


@pytest.mark.parametrize(("every", "due"), [(-1, [3, 6, 8]), (2, [2, 4, 6, 8]), (5, [5])])
def test_it_is_made_every_so_many_steps_or_after_each_epoch_and_the_last_step(every, due):
    own = evaluation(ROWS, eval__steps=every)
    assert [step for step in range(1, 9) if own.is_due(step, per_epoch=3, steps=8)] == due


def test_of_a_loss_the_least_is_best_and_of_answers_the_most(tmp_path):
    best = BestMetric(config(ckpt__output_dir=str(tmp_path)))
    assert [best.improves({"eval_loss": value}) for value in (2.0, 2.0, float("nan"), 1.0, 1.5)] == [
        True,
        False,
        False,
        True,
        False,
    ]
    assert best.best == 1.0
    right = BestMetric(config(ckpt__output_dir=str(tmp_path), ckpt__best_metric_key="eval_a_pass1"))
    assert [right.improves({"eval_a_pass1": value}) for value in (0.5, 0.25, 0.75)] == [True, False, True]
    with pytest.raises(UserError, match="--ckpt.best_metric_key eval_a_pass1: the evaluation has eval_loss"):
        right.improves({"eval_loss": 1.0})
    assert not BestMetric(config(ckpt__best_metric_key="none")).improves({"eval_loss": 1.0})


def saved(folder: Path, tag: str, *, key: str, value: float, whole: bool = True) -> None:
    path = folder / tag
    path.mkdir(parents=True)
    (path / METRIC).write_text(json.dumps({"metric_key": key, "metric_value": value}))
    if whole:
        (path / "complete.json").write_text(json.dumps({"session": "s", "files": {}}))
    else:
        (path / "complete.json").write_text(json.dumps({"session": "s", "files": {"gone.pt": 1}}))


def test_a_resumed_run_knows_the_best_that_is_kept(tmp_path):
    folder = tmp_path / "checkpoints"
    best = BestMetric(config(ckpt__output_dir=str(tmp_path)))
    best.resume()
    assert best.best is None
    saved(folder, "best_global_step8", key="eval_loss", value=0.5)
    saved(folder, "best_global_step9", key="eval_loss", value=0.25, whole=False)
    saved(folder, "global_step9", key="eval_loss", value=0.125)
    best.resume()
    assert best.best == 0.5
    assert not best.improves({"eval_loss": 0.75})
    assert best_metric(folder, key="eval_a_pass1") is None
