"""Supervised fine-tuning, and distillation, which trains on a teacher's token distributions instead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from PIL import Image, ImageChops
from transformers import PreTrainedTokenizerBase

from lmm_r1.config import KDConfig, SFTConfig
from lmm_r1.config.run_rows import read_conversations
from lmm_r1.data.messages import ImagePart, Message, Row, TextPart, VideoPart, demonstration, images_of, videos_of
from lmm_r1.data.training_rows import KeptRows
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits import Checkpoint, EncodedPrompt, LmmKit
from lmm_r1.lmm_kits.checkpoint import ImageFitting, check_images_taken, check_weights, encode_row
from lmm_r1.models.actor import KitActor
from lmm_r1.models.distillation import Distillation, Divergence
from lmm_r1.models.packed.packing import ModelSample
from lmm_r1.models.packed.sequence_parallel import check_heads
from lmm_r1.models.rope_scaling import check_rope
from lmm_r1.supervised import RowCheck, SampleEncoder, kept
from lmm_r1.supervised.loop import LOSS, HeldOut, SupervisedRun, TokenTerms
from lmm_r1.supervised.samples import SFTSample, check_sample, encode_sample, loss_turns
from lmm_r1.supervised.start import prepare_frozen, prepare_policy
from lmm_r1.train.start import Frame
from lmm_r1.train.update import Counts, Terms

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True, kw_only=True)
class RowEncoder(SampleEncoder):
    """Encodes conversations and plain texts."""

    every_turn: bool
    every_token: bool

    @classmethod
    def of(cls, config: SFTConfig, *, kit: LmmKit, processor: Any) -> RowEncoder:
        return cls(
            kit=kit,
            processor=processor,
            max_len=config.data.max_len,
            every_turn=config.data.multiturn,
            every_token=config.model.pretrain_mode_enable,
        )

    def check(self, row: Row, fitting: ImageFitting | None) -> Row:
        outline = check_sample(
            row, kit=self.kit, processor=self.processor, every_turn=self.every_turn, every_token=self.every_token
        )
        return row if fitting is None else fitting.fitted(row, outline)

    def __call__(self, row: Row) -> SFTSample | None:
        return encode_sample(
            row,
            kit=self.kit,
            processor=self.processor,
            max_len=self.max_len,
            every_turn=self.every_turn,
            every_token=self.every_token,
        )


class SFTEvaluation(HeldOut["SFTRun[Any]", SFTSample]):
    """The mean loss per loss token of all ranks' rows."""

    parts: tuple[str, ...] = ()
    """The names of other measured values; known after the first pass."""

    def _measured(self, samples: Sequence[SFTSample]) -> torch.Tensor:
        batch = self.run.collate(samples)
        tokens = torch.stack([sample.loss_mask.sum() for sample in batch])
        found = self.run.token_losses(batch)
        self.parts = tuple(found.parts)
        sums = [values.double().sum(-1) for values in (found.loss, *found.parts.values())]
        return torch.stack([*sums, tokens.to(sums[0])], dim=-1)

    def _metrics(self, sums: torch.Tensor) -> dict[str, float]:
        *totals, tokens = sums.tolist()
        names = (LOSS, *self.parts)
        return {name: total / tokens for name, total in zip(names, totals, strict=True)} if tokens else {}


SFTConfigT = TypeVar("SFTConfigT", bound=SFTConfig)


class SFTRun(SupervisedRun[SFTConfigT, Row, SFTSample, list[ModelSample]]):
    """The loss is the mean over all loss tokens."""

    kind = "sft"
    encoder = RowEncoder
    evaluator = SFTEvaluation

    @classmethod
    def load(cls, config: SFTConfigT, path: str, *, split: str, check: RowCheck[Row]) -> KeptRows[Row]:
        def check_row(row: Row) -> Row:
            learned = demonstration(row)
            if not config.model.pretrain_mode_enable:
                loss_turns(learned, every_turn=config.data.multiturn)
            return check(learned)

        return kept(read_conversations(config, path, split=split, check=check_row))

    @classmethod
    def of(cls, session: Frame[SFTConfigT], **learned: Any) -> Self:
        return cls(session, prepare_policy(session), **learned)

    def collate(self, samples: Sequence[SFTSample]) -> list[ModelSample]:
        return [sample.for_model() for sample in samples]

    def counts(self, batch: list[ModelSample]) -> Counts:
        tokens = sum(int(sample.loss_mask.sum()) for sample in batch)
        return Counts(units=tokens, tokens=tokens, samples=len(batch))

    def terms(self, batch: list[ModelSample]) -> Terms:
        found = self.token_losses(batch)
        sums = {name: values.detach().sum() for name, values in found.parts.items()}
        return Terms(loss=found.loss.sum(), aux_loss=found.aux_loss, sums=sums)

    def token_losses(self, batch: list[ModelSample]) -> TokenTerms:
        """Return the negative log-likelihood of each loss token."""
        log_probs, aux_loss = self.policy_log_probs(batch)
        return TokenTerms(loss=-log_probs, aux_loss=aux_loss)


# The size of the probes that compare the processors of both models.
_WIDTH, _HEIGHT, _FRAMES = 280, 196, 4


def teacher_path(config: KDConfig) -> str:
    """Return the teacher's checkpoint."""
    path = config.teacher.model_name_or_path
    assert path is not None, "required by config.resolve"
    return path


def check_teacher(config: KDConfig, student: Checkpoint, rows: Sequence[Row]) -> None:
    """Raise UserError if the teacher cannot read the rows as the student's kit encodes them.

    Its tokenizer must have the student's ids, and its processor must make the same tensors of images and videos.
    """
    path = teacher_path(config)
    flag = f"--teacher.model_name_or_path {path}"
    teacher = Checkpoint(path, trust_remote_code=config.train.trust_remote_code)
    _ = teacher.kit, teacher.processor
    check_weights(path)
    check_heads(teacher.config, size=config.ds.ulysses_size, model=flag)
    check_rope(teacher.config, model=flag)
    check_same_tokens(student.tokenizer, teacher.tokenizer, teacher_flag=flag)
    check_images_taken(rows, kit=teacher.kit, model=flag)
    for part in _probes(rows):
        _check_same_media(part, student, teacher, flag=flag)


def check_same_tokens(
    student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase, *, teacher_flag: str
) -> None:
    """Raise UserError if two tokenizers do not have the same ids.

    Args:
        teacher_flag: the flag and the path, for the message.
    """
    if student.get_vocab() != teacher.get_vocab():
        raise UserError(
            f"{teacher_flag}: it has another tokenizer than --model.model_name_or_path, so that its distributions are over "
            "other tokens; take a teacher with the student's tokenizer, or learn its responses with lmm-r1 "
            "batch_inference and train_sft"
        )


def _probes(rows: Sequence[Row]) -> list[ImagePart | VideoPart]:
    """Return an image if the rows have images, and a video if they have videos."""
    still = Image.linear_gradient("L").resize((_WIDTH, _HEIGHT)).convert("RGB")
    pictures = [ImageChops.offset(still, 9 * number) for number in range(_FRAMES)]
    probes: list[ImagePart | VideoPart] = []
    if any(images_of(row.messages) for row in rows):
        probes.append(ImagePart(pictures[0]))
    if any(videos_of(row.messages) for row in rows):
        probes.append(VideoPart(tuple(pictures)))
    return probes


def _check_same_media(part: ImagePart | VideoPart, student: Checkpoint, teacher: Checkpoint, *, flag: str) -> None:
    asked = Message(role="user", parts=(part, TextPart("?")))
    row = Row(messages=(asked,), answer="", datasource="", location="a picture that both models are shown")
    ours, theirs = (
        encode_row(row, kit=one.kit, processor=one.processor, add_generation_prompt=False)
        for one in (student, teacher)
    )
    if _placeholders(ours, student) == _placeholders(theirs, teacher) and _same_tensors(ours, theirs):
        return
    kind = "images" if isinstance(part, ImagePart) else "videos"
    raise UserError(
        f"{flag}: its processor makes other tokens or tensors of {kind} than that of --model.model_name_or_path "
        f"{student.path}, which encodes the rows for both; take a teacher of the same family and processor settings"
    )


def _placeholders(encoded: EncodedPrompt, checkpoint: Checkpoint) -> list[int]:
    """Return the ids from the first placeholder to the last one."""
    known = checkpoint.kit.placeholder_ids(checkpoint.processor)
    places = [place for place, token in enumerate(encoded.token_ids) if token in known]
    return encoded.token_ids[places[0] : places[-1] + 1] if places else []


def _same_tensors(ours: EncodedPrompt, theirs: EncodedPrompt) -> bool:
    first, second = ours.media or {}, theirs.media or {}
    return first.keys() == second.keys() and all(
        value.shape == second[name].shape and torch.allclose(value.double(), second[name].double(), atol=1e-5)
        for name, value in first.items()
    )


DISTANCE, NLL = "kd_loss", "nll_loss"


class KDRun(SFTRun[KDConfig]):
    """The loss is the mean over all loss tokens of c times the distance and 1 - c times the cross-entropy."""

    kind = "kd"
    shown = (DISTANCE,)

    def __init__(self, *given: Any, teacher: KitActor, **learned: Any) -> None:
        super().__init__(*given, **learned)
        self.teacher = teacher

    @classmethod
    def check(cls, config: KDConfig, checkpoint: Checkpoint, rows: Sequence[Row]) -> None:
        check_teacher(config, checkpoint, rows)

    @classmethod
    def of(cls, session: Frame[KDConfig], **learned: Any) -> Self:
        student, config = prepare_policy(session), session.config
        path, offload = teacher_path(config), config.teacher.offload
        teacher = prepare_frozen(config, session.strategy, path=path, offload=offload)
        return cls(session, student, teacher=teacher, **learned)

    @property
    def divergence(self) -> Divergence:
        """The distance that the training minimizes."""
        model = self.config.model
        return Divergence(name=model.kd_loss, beta=model.kd_beta, temperature=model.kd_temperature)

    def token_losses(self, batch: list[ModelSample]) -> TokenTerms:
        """Return the loss of each loss token, and its two parts."""
        group = self.strategy.ring_attn_group
        teacher = self.teacher.teacher_tokens(batch, ring_attn_group=group)
        distillation = Distillation(teacher=teacher, divergence=self.divergence)
        log_probs, output = self.actor(batch, return_output=True, ring_attn_group=group, distillation=distillation)
        coef, distance = self.config.model.kd_coef, output.divergence
        return TokenTerms(
            loss=coef * distance - (1 - coef) * log_probs,
            parts={DISTANCE: distance, NLL: -log_probs},
            aux_loss=output.aux_loss if self.config.model.aux_loss_coef > 0 else 0.0,
        )
