"""KTO: the loss by hand, the KL of an update's rows however they are spread, mismatched conversations, and its rows."""

import math
from functools import partial

import pytest
import torch
from helpers.character_kit import END, IMAGE, NEWLINE, PLACEHOLDER, CharacterKit
from helpers.conversations import message, write_rows
from helpers.sessions import (
    POLICY,
    AccumulatingStrategy,
    TableActor,
    TableReference,
    configured,
    responding,
    session_of,
)
from PIL import Image

from lmm_r1 import dotted
from lmm_r1.config import KTOConfig, resolve
from lmm_r1.data.messages import ImagePart, Message, TextPart, images_of
from lmm_r1.data.preferences import UnpairedRow
from lmm_r1.data.training_rows import rows_digest
from lmm_r1.errors import UserError
from lmm_r1.supervised import read_ahead
from lmm_r1.supervised.kto import (
    KTORun,
    NeighbourRows,
    Neighbours,
    UnpairedBatch,
    UnpairedEncoder,
    UnpairedSample,
    collate_unpaired,
    kto_loss,
)


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


config = partial(configured, KTOConfig)


def sample(own: list[int], other: list[int], *, desirable: bool) -> UnpairedSample:
    return UnpairedSample(chosen=responding(own), rejected=responding(other), desirable=desirable)


def batch(*samples: UnpairedSample) -> UnpairedBatch:
    return collate_unpaired(samples, pad_token_id=0)


def encoder(max_len: int = 32) -> UnpairedEncoder:
    return UnpairedEncoder(kit=CharacterKit(), processor=None, max_len=max_len)


def kto_run(*, micro_batches: int = 1, rows: tuple[UnpairedRow, ...] = (), **flags: object) -> KTORun:
    return KTORun(
        session_of(config(**flags), AccumulatingStrategy(micro_batches=micro_batches), kit=CharacterKit()),
        TableActor(POLICY),
        reference=TableReference(),
        rows=NeighbourRows(rows),
        encode=encoder(),
        filler=sample([1], [2], desirable=True).filler,
    )


def row(response: str, *, desirable: bool = True, prompt: str = "q", **given: object) -> UnpairedRow:
    return UnpairedRow(
        messages=(message("user", prompt),),
        response=(message("assistant", response),),
        desirable=desirable,
        **{"location": "rows.jsonl line 1"} | given,
    )


def test_the_loss_is_that_of_the_paper_by_hand():
    # The formula is that of TRL's KTOTrainer too, which is not installed here: 1 - s(b (r - KL)) of a desirable
    # response, 1 - s(b (KL - r)) of another. s(0.2) = 0.549834, s(-0.5) = 0.377541, s(0.05) = 0.512497.
    ratios = torch.tensor([3.0, -4.0, 0.5], requires_grad=True)
    kl = torch.tensor(1.0, requires_grad=True)
    given = {"desirable_weight": 1.5, "undesirable_weight": 0.5}
    loss = kto_loss(ratios, torch.tensor([True, True, False]), kl=kl, beta=0.1, **given)
    assert loss.tolist() == pytest.approx([1.5 * (1 - 0.549834), 1.5 * (1 - 0.377541), 0.5 * (1 - 0.512497)], abs=1e-6)
    loss.sum().backward()
    slopes = [s * (1 - s) for s in (0.549834, 0.377541, 0.512497)]
    assert ratios.grad.tolist() == pytest.approx([-0.15 * slopes[0], -0.15 * slopes[1], 0.05 * slopes[2]], abs=1e-6)
    assert kl.grad is None


@pytest.mark.usefixtures("one_process")
def test_an_update_estimates_the_kl_over_all_its_rows_however_they_fall_into_micro_batches():
    # Log-ratios of the tokens 1, 2 and 3: 0.5, 0 and -1.
    first = sample([1, 1], [2], desirable=True)
    second = sample([3], [1], desirable=False)
    third = sample([2], [1, 1], desirable=True)
    run = kto_run(micro_batches=2, model__beta=0.5, model__undesirable_loss_weight=2.0)
    loss, tokens = run._update([batch(first, second), batch(third, run.filler)])
    assert run.kl.item() == pytest.approx((0 + 0.5 + 1.0) / 3)
    logits = [0.25, 0.75, -0.25]
    losses = [1 - sigmoid(0.25), 2 * (1 - sigmoid(0.75)), 1 - sigmoid(-0.25)]
    assert loss == pytest.approx(sum(losses) / 3)
    assert tokens == 2 + 1 + 1
    assert run.means == {
        "accuracy": pytest.approx(2 / 3),
        "logits": pytest.approx(sum(logits) / 3),
        "desirable_reward": pytest.approx(0.5 * (1 + 0) / 2),
        "desirable_log_prob": pytest.approx(-2.0),
        "undesirable_reward": pytest.approx(-0.5),
        "undesirable_log_prob": pytest.approx(-4.0),
        "reward_margin": pytest.approx(0.75),
        "kl": pytest.approx(0.5),
    }
    slopes = [0.5 * sigmoid(logit) * sigmoid(-logit) / 3 for logit in logits]
    # Nothing flows through the KL, which the token 1 of mismatched responses is a part of.
    expected = [0.0, -2 * slopes[0], -slopes[2], 2 * slopes[1]]
    assert run.actor.table.grad.tolist() == pytest.approx(expected)
    assert run.reference.asked == [4, 4], "the reference computes both conversations of a row together"
    assert run.actor.modes == ["eval", "train"]


@pytest.mark.usefixtures("one_process")
def test_the_kl_is_never_negative_and_an_update_of_one_kind_says_nothing_of_the_other():
    run = kto_run(model__desirable_loss_weight=3.0)
    loss, _ = run._update([batch(sample([2], [3], desirable=True), sample([2], [3, 3], desirable=True))])
    assert run.kl.item() == 0.0
    assert loss == pytest.approx(3.0 * 0.5)
    assert {"desirable_reward", "undesirable_reward", "reward_margin"} & set(run.means) == {"desirable_reward"}


@pytest.mark.usefixtures("one_process")
def test_a_row_is_mismatched_with_the_next_one_of_its_batch():
    rows = tuple(row(letter) for letter in "abcd")
    run = kto_run(rows=rows, data__keep_order=True, train__batch_size=4, train__micro_batch_size=2)
    assert run.indices(0) == [(0, 1), (1, 2), (2, 3), (3, 0)]
    first, second = run._micro_batches(0)
    prompt = [*b"uq", END, NEWLINE, *b"a"]
    assert first.matched.sequences.tolist() == [[*prompt, *letter, END, NEWLINE] for letter in (b"a", b"b")]
    assert first.mismatched.sequences.tolist() == [[*prompt, *letter, END, NEWLINE] for letter in (b"b", b"c")]
    assert second.mismatched.sequences[:, 5].tolist() == list(b"da")
    ahead = list(read_ahead(run.rows, run.encode, indices=run.indices(0)[2:], workers=1))
    assert [sample.rejected.token_ids[5] for sample in ahead] == list(b"da")


def test_a_mismatched_conversation_keeps_the_images_of_its_own_prompt():
    asked = Message(role="user", parts=(ImagePart(IMAGE), TextPart("q")))
    pictured = UnpairedRow(
        messages=(asked,), response=(message("assistant", "a"),), desirable=True, location="rows.jsonl line 1"
    )
    found = encoder()(Neighbours(row=pictured, following=row("bb", prompt="other")))
    assert found.rejected.media is found.chosen.media is not None
    assert found.rejected.token_ids.count(PLACEHOLDER) == found.chosen.token_ids.count(PLACEHOLDER) == 3
    assert bytes(found.rejected.token_ids[-4:-2]) == b"bb"
    assert [place for place, counts in enumerate(found.rejected.loss_mask) if counts] == [9, 10, 11]


def test_a_row_whose_mismatched_conversation_is_too_long_takes_no_part_in_the_kl():
    short, long = row("a", desirable=False), row("a" * 20)
    encode = encoder(max_len=12)
    found = encode(Neighbours(row=short, following=long))
    assert batch(found).weights.tolist() == [[1.0], [0.0]]
    assert not found.desirable
    assert encode(Neighbours(row=long, following=short)) is None
    assert batch(found.filler).weights.tolist() == [[0.0], [0.0]]


@pytest.mark.usefixtures("one_process")
def test_held_out_rows_are_measured_by_the_kl_of_all_of_them():
    rows = [row("a"), row("b", desirable=False, datasource="x"), row("a" * 30)]
    run = kto_run(model__beta=0.5, eval__dataset="held.jsonl", train__micro_batch_size=1)
    # Of letters: a has a log-ratio of 2, b of 1; END, behind both, of 0.
    run.actor.table = torch.zeros(128)
    table = [0.0] * 128
    table[ord("a")], table[ord("b")] = -2.0, -1.0
    run.reference = TableReference(table)
    run.evaluate_on(rows)
    metrics = run.evaluation.evaluate(run.actor)
    # The mismatched responses: b behind the first prompt; behind the second one the too long one, which is left out.
    losses = [1 - sigmoid(0.5 * (2 - 1)), 1 - sigmoid(0.5 * (1 - 1))]
    assert metrics == {
        "eval_loss": pytest.approx(sum(losses) / 2),
        "eval_accuracy": 0.5,
        "eval_kl": 1.0,
        "eval_desirable_reward": pytest.approx(1.0),
        "eval_undesirable_reward": pytest.approx(0.5),
        "eval_reward_margin": pytest.approx(0.5),
        "eval_overlong_rows": 1,
        "eval_default_loss": pytest.approx(losses[0]),
        "eval_default_accuracy": 1.0,
        "eval_x_loss": pytest.approx(losses[1]),
        "eval_x_accuracy": 0.0,
    }


def test_rows_are_read_from_the_columns_that_the_flags_name(tmp_path):
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    question = [{"role": "user", "content": "<image>1?"}]
    record = {"q": question, "said": "2", "good": False, "pictures": ["a.png"]}
    path = write_rows(tmp_path / "rows.jsonl", record)
    flags = {"data__input_key": "q", "data__output_key": "said", "data__label_key": "good"}
    given = {"train__batch_size": 1, "data__dataset": path, "data__image_key": "pictures"} | flags
    (found,) = KTORun.training_rows(config(**given))
    assert found.response[0].parts[0].text == "2"
    assert not found.desirable
    assert [part.source for part in images_of(found.messages)] == [str(tmp_path / "a.png")]
    with pytest.raises(UserError, match='rows.jsonl line 1: the field "answer" is empty'):
        KTORun.training_rows(config(**given | {"data__output_key": "answer"}))


def test_a_prompt_that_is_text_goes_in_plain_where_its_column_is_named_and_no_chat_template_is_asked_for(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", {"prompt": "1?", "completion": "2", "label": True})
    base = {"train__batch_size": 1, "data__dataset": path}
    named = base | {"data__input_key": "prompt"}
    found = [
        KTORun.training_rows(config(**given))[0]
        for given in (
            base,
            named,
            named | {"data__input_template": "Q: {}"},
            named | {"data__apply_chat_template": True},
        )
    ]
    assert [one.plain for one in found] == [False, True, True, False]
    assert found[2].messages[0].parts[0].text == "Q: 1?"


def test_rows_that_cannot_be_learned_from_are_refused_with_their_place(tmp_path):
    record = {"prompt": "1?", "completion": "2", "label": True}
    path = write_rows(tmp_path / "rows.jsonl", record, record | {"label": "maybe"})
    with pytest.raises(
        UserError, match="rows.jsonl line 2: the label \"label\" is 'maybe'; it must be true .desirable. or false"
    ):
        KTORun.training_rows(config(train__batch_size=1, data__dataset=path))
    single = write_rows(tmp_path / "one.jsonl", record)
    assert KTORun.evaluation_rows(config()) == []
    with pytest.raises(UserError, match="--eval.dataset .*one.jsonl has one row"):
        KTORun.evaluation_rows(config(eval__dataset=single))
    other = write_rows(tmp_path / "other.jsonl", record, record | {"label": False}, record | {"completion": "3"})
    assert len({rows_digest([one]) for one in KTORun.evaluation_rows(config(eval__dataset=other))}) == 3


def test_the_reference_is_the_model_that_the_run_starts_from_unless_another_is_named():
    given = {"model.model_name_or_path": "m", "data.dataset": "rows.jsonl", "ds.param_dtype": "fp32"}
    found = [
        resolve(dotted.replace(KTOConfig(), given | more))
        for more in ({}, {"ref.model_name_or_path": "r"}, {"ds.lora.rank": 4})
    ]
    assert [one.ref.model_name_or_path for one in found] == ["m", "r", "m"]
    assert [one.needs_reference_model for one in found] == [True, True, False]
