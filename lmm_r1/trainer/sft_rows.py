"""The rows of supervised fine-tuning: which columns they are read from, and how they become samples."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from lmm_r1.config import SFTConfig
from lmm_r1.config.rows import row_reading
from lmm_r1.data.files import read_row_file
from lmm_r1.data.messages import Row, demonstration
from lmm_r1.data.training_rows import SKIP_BAD_ROWS, KeptRows
from lmm_r1.lmm_kits import LmmKit
from lmm_r1.trainer.sft_samples import SFTSample, check_sample, encode_sample, loss_turns
from lmm_r1.trainer.supervised_rows import RowCheck, SampleEncoder, blended_rows
from lmm_r1.trainer.supervised_rows import chat_template as chat_template
from lmm_r1.trainer.supervised_rows import kept, passes
from lmm_r1.trainer.supervised_rows import read_ahead as read_ahead


def training_rows(config: SFTConfig, *, check: RowCheck[Row] = passes) -> KeptRows[Row]:
    """Return the rows of `--data.dataset`; raises UserError where they cannot be learned from, or are too few."""
    return blended_rows(config, lambda path: _load(config, path, split=config.data.dataset_split, check=check))


def evaluation_rows(config: SFTConfig, *, check: RowCheck[Row] = passes) -> KeptRows[Row]:
    """Return the rows of `--eval.dataset`, none without; they have answers where a verifier is to judge by them."""
    if config.eval.dataset is None:
        return KeptRows()
    judged = config.eval.verifier is not None
    return _load(config, config.eval.dataset, split=config.eval.split, check=check, judged=judged)


def _load(config: SFTConfig, path: str, *, split: str, check: RowCheck[Row], judged: bool = False) -> KeptRows[Row]:
    def check_row(row: Row) -> None:
        learned = demonstration(row)
        _check_turns(config, learned)
        check(learned)

    reading = row_reading(config.data, prefix="--data.")
    names = replace(reading.names, response=config.data.output_key)
    reading = replace(reading, names=names, plain_template=plain_template(config))
    file = read_row_file(
        path,
        split=split,
        reading=reading,
        answer_required=judged,
        check=check_row,
        bad_rows=config.data.bad_rows,
        skip_by=SKIP_BAD_ROWS,
    )
    return kept(file, map(demonstration, file.rows.values()))


def plain_template(config: SFTConfig) -> str | None:
    """Return what stands around a plain-text prompt, with {} in its place; None where the chat template writes it."""
    data = config.data
    if data.apply_chat_template:
        return None
    if data.output_key is not None:
        return data.input_template or "{}"
    return "{}" if config.model.pretrain_mode_enable else None


def _check_turns(config: SFTConfig, row: Row) -> None:
    if not config.model.pretrain_mode_enable:
        loss_turns(row, every_turn=config.data.multiturn)


@dataclass(frozen=True, kw_only=True)
class RowEncoder(SampleEncoder):
    """Makes samples of rows."""

    every_turn: bool
    every_token: bool

    @classmethod
    def of(cls, config: SFTConfig, *, kit: LmmKit, processor: Any) -> RowEncoder:
        """Return the encoder of a run."""
        return cls(
            kit=kit,
            processor=processor,
            max_len=config.data.max_len,
            every_turn=config.data.multiturn,
            every_token=config.model.pretrain_mode_enable,
        )

    def check(self, row: Row) -> None:
        check_sample(
            row, kit=self.kit, processor=self.processor, every_turn=self.every_turn, every_token=self.every_token
        )

    def __call__(self, row: Row) -> SFTSample | None:
        """Return the row's sample, None where it is too long; raises UserError for media that cannot be taken."""
        return encode_sample(
            row,
            kit=self.kit,
            processor=self.processor,
            max_len=self.max_len,
            every_turn=self.every_turn,
            every_token=self.every_token,
        )
