"""A distillation: its update is the mean over loss tokens of a mixed loss, and its teacher reads what the student reads."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.character_kit import IMAGE, CharacterKit
from helpers.conversations import message, row
from helpers.sessions import POLICY, AccumulatingStrategy, TableActor, configured, session_of, updated

from lmm_r1.config import KDConfig
from lmm_r1.data.messages import ImagePart
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits import EncodedPrompt
from lmm_r1.models.distillation import Divergence
from lmm_r1.models.packed.packing import ModelSample
from lmm_r1.supervised import sft
from lmm_r1.supervised.samples import SFTSample
from lmm_r1.supervised.sft import KDRun, RowEncoder, check_same_tokens


class TaughtActor(TableActor):
    """A model whose log-prob of a token is its entry in a table, and its distance from a teacher half of its square."""

    def __init__(self) -> None:
        super().__init__(POLICY)
        self.asked: list[Any] = []

    def __call__(self, samples: list[ModelSample], *, distillation: Any, **arguments: Any) -> Any:
        self.asked.append(distillation)
        log_probs = super().__call__(samples)
        return log_probs, SimpleNamespace(divergence=log_probs.square() / 2, aux_loss=self.table.sum())


def kd_run(**flags: object) -> KDRun:
    config = configured(KDConfig, **flags)
    kit = CharacterKit()
    return KDRun(
        session_of(config, AccumulatingStrategy(), kit=kit),
        TaughtActor(),
        rows=[],
        encode=RowEncoder.of(config, kit=kit, processor=None),
        filler=SFTSample(token_ids=[1, 1], loss_mask=[False, False], media=None),
        teacher=SimpleNamespace(teacher_tokens=lambda batch, ring_attn_group: ("tokens of", batch)),
    )


def batch(*rows: tuple[list[int], list[int]]) -> list[ModelSample]:
    samples = [SFTSample(token_ids=ids, loss_mask=list(map(bool, mask)), media=None) for ids, mask in rows]
    return [sample.for_model() for sample in samples]


@pytest.mark.usefixtures("one_process")
def test_the_loss_is_the_mean_over_all_loss_tokens_of_what_the_coefficient_mixes():
    batches = [batch(([1, 2, 3], [0, 1, 1]), ([1, 1], [0, 1])), batch(([3, 3, 3, 2], [0, 0, 0, 1]))]
    run = kd_run(model__kd_coef=0.25)
    made = updated(run, batches)
    # Loss tokens 2, 3, 1 and 2: cross-entropies 2, 4, 1 and 2, distances 2, 8, 1/2 and 2.
    assert made.tokens == 4
    assert made.means == {"kd_loss": pytest.approx(12.5 / 4), "nll_loss": pytest.approx(9 / 4)}
    assert made.loss == pytest.approx(0.25 * 12.5 / 4 + 0.75 * 9 / 4)
    slopes = [0.25 * value - 0.75 for value in (-1.0, -2.0, -4.0)]
    assert run.actor.table.grad.tolist() == pytest.approx([0, slopes[0] / 4, 2 * slopes[1] / 4, slopes[2] / 4])
    assert [compared.teacher for compared in run.actor.asked] == [("tokens of", one) for one in batches]


@pytest.mark.usefixtures("one_process")
def test_the_distance_is_the_one_that_the_flags_name():
    run = kd_run(model__kd_loss="jsd", model__kd_beta=0.1, model__kd_temperature=2.0, model__aux_loss_coef=0.5)
    losses = run.token_losses(batch(([1, 2], [0, 1])))
    assert run.actor.asked[0].divergence == Divergence(name="jsd", beta=0.1, temperature=2.0)
    assert losses.aux_loss == -7
    assert kd_run().token_losses(batch(([1, 2], [0, 1]))).aux_loss == 0


@pytest.mark.usefixtures("one_process")
def test_held_out_rows_are_measured_by_the_loss_and_by_both_of_its_parts():
    run = kd_run(model__kd_coef=0.5, eval__dataset="held.jsonl", train__micro_batch_size=2)
    run.actor.table = -torch.arange(128.0)
    run.evaluate_on([row(message("user", "q"), message("assistant", "\4"))])
    metrics = run.evaluation.evaluate(run.actor)
    # The tokens 4 and 1, which ends the response.
    assert metrics == {
        "eval_loss": pytest.approx(0.5 * (8 + 0.5) / 2 + 0.5 * 5 / 2),
        "eval_kd_loss": pytest.approx((8 + 0.5) / 2),
        "eval_nll_loss": pytest.approx(5 / 2),
        "eval_overlong_rows": 0,
    }


class Vocabulary:
    def __init__(self, **ids: int) -> None:
        self.ids = ids

    def get_vocab(self) -> dict[str, int]:
        return self.ids


def test_another_tokenizer_is_refused():
    check_same_tokens(Vocabulary(a=0, b=1), Vocabulary(a=0, b=1), teacher_flag="--teacher")
    with pytest.raises(UserError, match="^--teacher: it has another tokenizer"):
        check_same_tokens(Vocabulary(a=0, b=1, c=2), Vocabulary(a=0, c=1, b=2), teacher_flag="--teacher")


class PictureKit(CharacterKit):
    """Its images are placeholders and a tensor with a scale."""

    def __init__(self, *, patches: int = 3, scale: float = 1.0) -> None:
        super().__init__()
        self.patches, self.scale = patches, scale

    def encode(self, processor: object, messages: Any, **settings: Any) -> EncodedPrompt:
        pixels = torch.full((self.patches, 2), self.scale)
        return EncodedPrompt(
            token_ids=[7] * len(messages) + [2] * self.patches,
            engine_token_ids=[2],
            images=[],
            media={"pixels": pixels},
        )


@pytest.mark.parametrize("teacher", [PictureKit(patches=4), PictureKit(scale=0.5)])
def test_a_processor_that_makes_something_else_of_images_is_refused(teacher):
    ours, theirs = (SimpleNamespace(kit=kit, processor=None, path="s") for kit in (PictureKit(), teacher))
    sft._check_same_media(ImagePart(IMAGE), ours, ours, flag="--teacher.model_name_or_path t")
    with pytest.raises(
        UserError, match="^--teacher.model_name_or_path t: its processor makes other tokens or tensors of images "
    ):
        sft._check_same_media(ImagePart(IMAGE), ours, theirs, flag="--teacher.model_name_or_path t")
