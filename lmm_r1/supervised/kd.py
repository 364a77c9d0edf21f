"""Distillation: a student is trained on the token distributions of a teacher."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image, ImageChops
from transformers import PreTrainedTokenizerBase

from lmm_r1.config import KDConfig
from lmm_r1.data.messages import ImagePart, Message, Row, TextPart, VideoPart, images_of, videos_of
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits import Checkpoint, EncodedPrompt
from lmm_r1.lmm_kits.checkpoint import check_images_taken, check_weights, encode_row
from lmm_r1.models.actor import KitActor
from lmm_r1.models.distillation import Distillation, Divergence
from lmm_r1.models.packed.packing import ModelSample
from lmm_r1.models.packed.sequence_parallel import check_heads
from lmm_r1.models.rope_scaling import check_rope
from lmm_r1.supervised.loop import TokenTerms
from lmm_r1.supervised.models import prepare_frozen, prepare_policy
from lmm_r1.supervised.sft import SFTRun
from lmm_r1.train.start import Frame

if TYPE_CHECKING:
    from typing_extensions import Self


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
