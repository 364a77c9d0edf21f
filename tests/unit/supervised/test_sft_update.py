"""One supervised update: the loss is the mean over all loss tokens, however they fall into micro-batches."""

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from helpers.character_kit import CharacterKit
from helpers.conversations import message, row
from helpers.sessions import POLICY, AccumulatingStrategy, TableActor, configured, session_of, updated

from lmm_r1.config import SFTConfig
from lmm_r1.data.messages import Row
from lmm_r1.models.packed.packing import ModelSample
from lmm_r1.supervised.samples import SFTSample
from lmm_r1.supervised.sft import RowEncoder, SFTRun


def batch(*rows: tuple[list[int], list[int]]) -> list[ModelSample]:
    samples = [SFTSample(token_ids=ids, loss_mask=list(map(bool, mask)), media=None) for ids, mask in rows]
    return [sample.for_model() for sample in samples]


def sft_run(strategy: AccumulatingStrategy, actor: TableActor, *, rows: Sequence[Row] = (), **flags: float) -> SFTRun:
    config = configured(SFTConfig, **flags)
    kit = CharacterKit()
    encode = RowEncoder.of(config, kit=kit, processor=None)
    filler = SFTSample(token_ids=[1, 1], loss_mask=[False, False], media=None)
    return SFTRun(session_of(config, strategy, kit=kit), actor, rows=list(rows), encode=encode, filler=filler)


@pytest.mark.usefixtures("one_process")
def test_the_loss_is_the_mean_over_all_loss_tokens_of_the_update():
    batches = [
        batch(([1, 2, 3], [0, 1, 1]), ([1, 1], [0, 1])),  # loss tokens: 2, 3 and 1
        batch(([3, 3, 3, 2], [0, 0, 0, 1])),  # loss tokens: 2
    ]
    strategy, actor = AccumulatingStrategy(), TableActor(POLICY)
    made = updated(sft_run(strategy, actor), batches)

    assert made.tokens == 4
    assert made.loss == pytest.approx((2 + 4 + 1 + 2) / 4)
    assert (strategy.steps, actor.boundaries) == (1, [False, True])
    # The gradient of a token mean: each loss token counts a quarter, in whichever micro-batch it stands.
    assert actor.table.grad.tolist() == pytest.approx([0, -1 / 4, -2 / 4, -1 / 4])


class BalancedActor(TableActor):
    """Its load-balancing loss is the sum of the table, whatever the batch."""

    def __call__(self, *arguments: torch.Tensor, return_output: bool, **settings: object) -> object:
        log_probs = super().__call__(*arguments, **settings)
        return (log_probs, SimpleNamespace(aux_loss=self.table.sum())) if return_output else log_probs


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("coef", [0.0, 0.5])
def test_the_loss_of_the_experts_load_is_a_mean_over_micro_batches(coef):
    batches = [batch(([1, 2, 3], [0, 1, 1]), ([1, 1], [0, 1])), batch(([3, 3, 3, 2], [0, 0, 0, 1]))]
    actor = BalancedActor(POLICY)
    made = updated(sft_run(AccumulatingStrategy(), actor, model__aux_loss_coef=coef), batches)
    assert made.loss == pytest.approx((2 + 4 + 1 + 2) / 4), "what is logged is that of the tokens"
    assert actor.table.grad.tolist() == pytest.approx(
        [coef + value for value in (0, -1 / 4, -2 / 4, -1 / 4)], abs=1e-6
    )


@pytest.mark.usefixtures("one_process")
def test_an_update_has_all_its_micro_batches_where_rows_are_too_long_or_few():
    rows = [row(message("user", text), message("assistant", "b")) for text in ("a", "a" * 50, "a", "a" * 50)]
    rows += [row(message("user", "a"), message("assistant", "b"))] * 2
    flags = {"train__batch_size": 4, "train__micro_batch_size": 1, "data__max_len": 20}
    run = sft_run(AccumulatingStrategy(), TableActor(POLICY), rows=rows, data__keep_order=True, **flags)
    # "b" and the end token of each of the two rows that fit; the others' places teach nothing.
    assert sorted(run.counts(batch).tokens for batch in run._micro_batches(0)) == [0, 0, 2, 2]
    assert run.skipped == 2
    # The epoch's last update has two rows.
    assert [run.counts(batch).tokens for batch in run._micro_batches(1)] == [2, 2, 0, 0]
    assert run.skipped == 2
