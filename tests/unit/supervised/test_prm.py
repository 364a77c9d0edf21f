"""A process reward model's training: where a step is judged, the loss by hand, its evaluation, and its rows."""

import math

import pytest
import torch
from helpers.character_kit import END, IMAGE, NEWLINE, PLACEHOLDER, CharacterKit
from helpers.conversations import message, write_rows
from helpers.sessions import AccumulatingStrategy, configured, session_of
from PIL import Image

from lmm_r1.config import PRMConfig
from lmm_r1.data.messages import ImagePart, Message, TextPart, images_of
from lmm_r1.data.preferences import StepRow
from lmm_r1.data.training_rows import rows_digest
from lmm_r1.errors import UserError
from lmm_r1.supervised import read_ahead
from lmm_r1.supervised.prm import PRMRun, StepEncoder, collate_steps, step_losses


class Actor:
    """A model that judges a step by the letter before its placeholder: its place behind a, times a weight."""

    def __init__(self) -> None:
        self.weight = torch.tensor(1.0, requires_grad=True)
        self.asked: list[list[int]] = []

    def token_logits(
        self, sequences: torch.Tensor, wanted: torch.Tensor, token_ids: torch.Tensor, **given: object
    ) -> tuple[torch.Tensor, float]:
        self.asked.append(token_ids.tolist())
        right = self.weight * (sequences.roll(1, dims=1)[:, :-1] - ord("a"))
        return torch.where(wanted[..., None], torch.stack([right, torch.zeros_like(right)], dim=-1), 0.0), 0.0

    def eval(self) -> None:
        pass

    def train(self) -> None:
        pass


def config(**flags: object) -> PRMConfig:
    return configured(PRMConfig, **{"model__placeholder_token": "*"} | flags)


def encoder(**flags: object) -> StepEncoder:
    return StepEncoder.of(config(**flags), kit=CharacterKit(), processor=None)


def row(*steps: str, labels: tuple[float, ...], **given: object) -> StepRow:
    return StepRow(
        steps=steps, labels=labels, **{"messages": (message("user", "q"),), "location": "rows.jsonl line 1"} | given
    )


def prm_run(*, micro_batches: int = 1, **flags: object) -> PRMRun:
    encode = encoder(**flags)
    return PRMRun(
        session_of(config(**flags), AccumulatingStrategy(micro_batches=micro_batches), kit=CharacterKit()),
        Actor(),
        rows=[],
        encode=encode,
        filler=encode(row("a", labels=(1.0,))).filler,
    )


def loss(difference: float) -> float:
    return math.log1p(math.exp(-difference))


def test_a_placeholder_stands_behind_each_step_and_is_where_it_is_judged():
    asked = Message(role="user", parts=(ImagePart(IMAGE), TextPart("q")))
    sample = encoder()(row("b c", "d", labels=(1.0, 0.25), messages=(asked,)))
    tokens = sample.tokens
    assert tokens.token_ids[-9:] == [ord("a"), *b"b c*", NEWLINE, *b"d*", END]
    assert tokens.token_ids.count(PLACEHOLDER) == 3
    # What follows a placeholder is predicted at it.
    first, second = (place for place, judged in enumerate(tokens.loss_mask) if judged)
    assert [tokens.token_ids[place - 1] for place in (first, second)] == [ord("*")] * 2
    batch = collate_steps([sample, sample.filler], pad_token_id=0)
    assert batch.tokens.loss_mask.sum(-1).tolist() == [2, 0]
    assert batch.labels[batch.tokens.loss_mask].tolist() == [1.0, 0.25]
    assert encoder(data__max_len=10)(row("b c", "d", labels=(1.0, 0.25))) is None


def test_the_loss_is_the_cross_entropy_of_the_two_judging_tokens_by_hand():
    logits = torch.tensor([[2.0, 0.0], [1.0, 2.0], [0.5, 0.5]])
    found = step_losses(logits, torch.tensor([1.0, 0.0, 0.7]))
    # -log s(2), -log s(1), and log 2 whatever the label.
    assert found.tolist() == pytest.approx([0.126928, 0.313262, 0.693147], abs=1e-6)
    soft = step_losses(torch.tensor([[2.0, 0.0]]), torch.tensor([0.75]))
    assert soft.item() == pytest.approx(0.75 * 0.126928 + 0.25 * 2.126928, abs=1e-6)
    # What torch makes of the same as classes with probabilities, which OpenRLHF's PRM trainer took.
    whole = torch.nn.functional.cross_entropy(logits, torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.7, 0.3]]))
    assert found.mean().item() == pytest.approx(whole.item())


@pytest.mark.usefixtures("one_process")
def test_the_loss_is_the_mean_over_the_steps_of_the_update_however_they_fall_into_micro_batches():
    run = prm_run(micro_batches=2)
    rows = [row("c", "b", labels=(1.0, 0.0)), row("d", labels=(0.25,))]
    samples = [run.encode(one) for one in rows]
    value, tokens = run._update([run.collate(samples[:1]), run.collate([samples[1], run.filler])])
    assert value == pytest.approx((loss(2) + loss(-1) + 0.25 * loss(3) + 0.75 * loss(-3)) / 3)
    assert tokens == 3
    scores = [1 / (1 + math.exp(-difference)) for difference in (2, 1, 3)]
    assert run.means == {"step_accuracy": pytest.approx(1 / 3), "step_score": pytest.approx(sum(scores) / 3)}
    assert run.actor.asked == [[ord("+"), ord("-")]] * 2
    # s(x) - p of each step, times how much its logit grows with the weight.
    slope = (2 * (scores[0] - 1) + 1 * scores[1] + 3 * (scores[2] - 0.25)) / 3
    assert run.actor.weight.grad.item() == pytest.approx(slope)


@pytest.mark.usefixtures("one_process")
def test_held_out_steps_are_measured_without_rows_that_are_too_long():
    flags = {"eval__dataset": "held.jsonl", "train__micro_batch_size": 2, "data__max_len": 16}
    run = prm_run(**flags)
    held_out = [
        row("c", "b", labels=(1.0, 0.0)),
        row("d", labels=(1.0,), datasource="x"),
        row("d" * 20, labels=(1.0,)),
    ]
    run.evaluate_on(held_out)
    metrics = run.evaluation.evaluate(run.actor)
    scores = [1 / (1 + math.exp(-difference)) for difference in (2, 1, 3)]
    assert metrics == {
        "eval_loss": pytest.approx((loss(2) + loss(-1) + loss(3)) / 3),
        "eval_step_accuracy": pytest.approx(2 / 3),
        "eval_step_score": pytest.approx(sum(scores) / 3),
        "eval_overlong_rows": 1,
        "eval_default_loss": pytest.approx((loss(2) + loss(-1)) / 2),
        "eval_default_step_accuracy": 0.5,
        "eval_x_loss": pytest.approx(loss(3)),
        "eval_x_step_accuracy": 1.0,
    }


def test_a_step_that_holds_the_placeholder_is_refused_with_the_rows_place():
    with pytest.raises(UserError, match="^rows.jsonl line 1: a step holds the placeholder .*name what ends them with"):
        encoder()(row("b * c", labels=(1.0,)))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"model__placeholder_token": "##"}, "--model.placeholder_token ## is 2 tokens"),
        ({"model__placeholder_token": "#"}, "--model.placeholder_token # represents an image"),
        ({"model__reward_tokens": ("yes", "n")}, "--model.reward_tokens yes is 3 tokens"),
        ({"model__reward_tokens": ("*", "n")}, "must be three different tokens"),
    ],
)
def test_tokens_that_the_tokenizer_does_not_have_are_refused(flags, said, monkeypatch):
    monkeypatch.setattr("helpers.character_kit.CharacterTokenizer.get_vocab", dict, raising=False)
    with pytest.raises(UserError) as refused:
        encoder(**flags)
    assert said in str(refused.value)


def test_rows_are_read_from_the_columns_and_by_the_tag_that_the_flags_name(tmp_path):
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    question = [{"role": "user", "content": "<image>1?"}, {"role": "assistant", "content": "One. <s>\nTwo. <s>"}]
    path = write_rows(tmp_path / "rows.jsonl", {"q": question, "good": [True, 0.5], "pictures": ["a.png"]})
    given = {"train__batch_size": 1, "data__dataset": path, "data__input_key": "q", "data__label_key": "good"}
    given |= {"data__image_key": "pictures"}
    (found,) = PRMRun.training_rows(config(**given, data__step_tag="<s>"))
    assert (found.steps, found.labels) == (("One.", "Two."), (1.0, 0.5))
    assert [part.source for part in images_of(found.messages)] == [str(tmp_path / "a.png")]
    # Left out, the tag is the placeholder.
    (found,) = PRMRun.training_rows(config(**given, model__placeholder_token="<s>"))
    assert found.steps == ("One.", "Two.")
    with pytest.raises(
        UserError, match=r'rows.jsonl line 1: no step in .q. ends with the tag "\*"; .* with --data.step_tag'
    ):
        PRMRun.training_rows(config(**given))


def test_held_out_rows_come_from_their_own_dataset_and_digests_tell_labels_apart(tmp_path):
    record = {"prompt": "1?", "completions": ["One.", "Two."], "labels": [True, False]}
    path = write_rows(
        tmp_path / "rows.jsonl", record, record | {"labels": [True, True]}, record | {"completions": ["1.", "2."]}
    )
    assert PRMRun.evaluation_rows(config()) == []
    rows = PRMRun.evaluation_rows(config(eval__dataset=path))
    assert len({rows_digest([one]) for one in rows}) == 3
    encoded = list(read_ahead(rows, encoder(), indices=[2, 0], workers=1))
    assert [sample.labels for sample in encoded] == [(1.0, 0.0)] * 2
    path = write_rows(tmp_path / "bad.jsonl", record, record | {"labels": [True]})
    with pytest.raises(UserError, match='bad.jsonl line 2: "labels" has 1 labels for 2 steps'):
        PRMRun.training_rows(config(train__batch_size=1, data__dataset=path))
