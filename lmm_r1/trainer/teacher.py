"""The teacher of a distillation: that it reads the student's tokens and images as the student does, and its passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from PIL import Image, ImageChops
from transformers import PreTrainedTokenizerBase

from lmm_r1.config import KDConfig
from lmm_r1.data.messages import ImagePart, Message, Row, TextPart, VideoPart, images_of, videos_of
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits import Checkpoint, EncodedPrompt
from lmm_r1.lmm_kits.checkpoint import check_images_taken, encode_row
from lmm_r1.lmm_kits.weight_files import check_weights
from lmm_r1.models.actor import KitActor
from lmm_r1.models.distillation import TeacherTokens
from lmm_r1.models.packed.self_check import check_packing
from lmm_r1.models.packed.sequence_parallel import check_heads
from lmm_r1.models.rope_scaling import check_rope
from lmm_r1.trainer.sft_samples import SFTBatch
from lmm_r1.trainer.strategy import KitStrategy
from lmm_r1.trainer.supervised_models import load_settings

# What is shown to both models, to see whether their processors make the same of it.
_WIDTH, _HEIGHT, _FRAMES = 280, 196, 4


def teacher_path(config: KDConfig) -> str:
    """Return the checkpoint of the teacher."""
    path = config.teacher.model_name_or_path
    assert path is not None, "required by config.resolve"
    return path


def check_teacher(config: KDConfig, student: Checkpoint, rows: Sequence[Row]) -> None:
    """Raise UserError where the teacher cannot grade what the student's kit makes of the rows.

    Its tokenizer must give every token the student's id, and its processor must make the same tensors of images and videos.
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
    """Raise UserError, naming the first token that differs, where two tokenizers do not give the same ids.

    Args:
        teacher_flag: the flag and the path, for the message.
    """
    ours, theirs = ({index: token for token, index in one.get_vocab().items()} for one in (student, teacher))
    for index in range(max(*ours, *theirs) + 1):
        if ours.get(index) != theirs.get(index):
            named = " and ".join(
                f"{table[index]!r} of the {whose}" if index in table else f"none of the {whose}"
                for table, whose in ((ours, "student"), (theirs, "teacher"))
            )
            raise UserError(
                f"{teacher_flag}: it has another tokenizer than --model.model_name_or_path, so that its distributions are "
                f"over other tokens: id {index} is {named}; take a teacher with the student's tokenizer, or learn its "
                "responses with lmm-r1 batch_inference and train_sft"
            )


def _probes(rows: Sequence[Row]) -> list[ImagePart | VideoPart]:
    """Return an image and a video, as far as the rows have any."""
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
    if _placeholders(ours, student) != _placeholders(theirs, teacher):
        difference = "other tokens"
    elif not _same_tensors(ours, theirs):
        difference = "other tensors"
    else:
        return
    kind = "images" if isinstance(part, ImagePart) else "videos"
    raise UserError(
        f"{flag}: its processor makes {difference} of {kind} than that of --model.model_name_or_path {student.path}, which "
        "encodes the rows for both; take a teacher of the same family and processor settings"
    )


def _placeholders(encoded: EncodedPrompt, checkpoint: Checkpoint) -> list[int]:
    """Return the ids from the first placeholder of a prompt to the last one."""
    known = checkpoint.kit.placeholder_ids(checkpoint.processor)
    places = [place for place, token in enumerate(encoded.token_ids) if token in known]
    return encoded.token_ids[places[0] : places[-1] + 1] if places else []


def _same_tensors(ours: EncodedPrompt, theirs: EncodedPrompt) -> bool:
    first, second = ours.media or {}, theirs.media or {}
    return first.keys() == second.keys() and all(
        value.shape == second[name].shape and torch.allclose(value.double(), second[name].double(), atol=1e-5)
        for name, value in first.items()
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Teacher:
    """A model that stays as it is; every rank asks it equally often."""

    actor: KitActor
    group: dist.ProcessGroup | None
    """The ranks that share sequences."""

    @classmethod
    def prepared(cls, config: KDConfig, strategy: KitStrategy) -> Teacher:
        """Return the teacher under DeepSpeed, sharded with ZeRO-3."""
        offload = config.teacher.offload
        settings = {**load_settings(config), "ds_config": strategy.get_ds_eval_config(offload=offload)}
        actor = KitActor(teacher_path(config), **settings)
        # Where upstream's strategy looks.
        actor._offload = offload
        actor = strategy.prepare(actor)
        actor.eval()
        check_packing(actor, group=strategy.ring_attn_group, longest=config.data.max_len)
        return cls(actor=actor, group=strategy.ring_attn_group)

    def tokens(self, batch: SFTBatch) -> TeacherTokens:
        """Return what makes its logits at the batch's loss tokens."""
        device = torch.cuda.current_device()
        return self.actor.teacher_tokens(
            batch.sequences.to(device),
            batch.loss_mask.to(device),
            attention_mask=batch.attention_mask.to(device),
            ring_attn_group=self.group,
            media=batch.media,
        )
