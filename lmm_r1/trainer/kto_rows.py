"""The rows of a run that learns from single responses: each with the next one's of its batch, by which a KL is estimated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from lmm_r1.config import KTOConfig
from lmm_r1.config.rows import named_reading
from lmm_r1.data.messages import Row
from lmm_r1.data.preferences import UNPAIRED, PreferenceRow, UnpairedRow
from lmm_r1.data.training_rows import KeptRows
from lmm_r1.errors import UserError
from lmm_r1.trainer.preference_samples import PairSample, check_response, collate_pairs, encode_pair
from lmm_r1.trainer.sft_samples import SFTBatch
from lmm_r1.trainer.supervised_rows import RowCheck, SampleEncoder, blended_rows, judged_rows, passes


@dataclass(frozen=True, kw_only=True)
class Neighbours:
    """A row, and the one whose response stands in for its own where the KL is estimated."""

    row: UnpairedRow
    following: UnpairedRow


@dataclass(frozen=True)
class NeighbourRows:
    """Gives the rows at two places, as a run takes them from its batches."""

    rows: Sequence[UnpairedRow]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Neighbours]:
        """Give each row with the one after it, and the last with the first."""
        return map(self.__getitem__, shifted(range(len(self.rows))))

    def __getitem__(self, places: tuple[int, int]) -> Neighbours:
        first, second = places
        return Neighbours(row=self.rows[first], following=self.rows[second])


@dataclass(frozen=True, kw_only=True)
class UnpairedSample:
    pair: PairSample
    """The row's conversation, called chosen, and its prompt with the following row's response, called rejected."""
    desirable: bool

    @property
    def filler(self) -> UnpairedSample:
        """A sample that teaches nothing."""
        return replace(self, pair=self.pair.filler)


@dataclass(frozen=True, kw_only=True)
class UnpairedBatch:
    both: SFTBatch
    """Of 2 B conversations: those of the rows, and then their prompts with the following rows' responses."""
    desirable: torch.Tensor
    """Bool, (B,)."""
    reference: torch.Tensor | None = None
    """The reference's log-prob of each response, (2 B,), once it is known."""

    @property
    def matched(self) -> SFTBatch:
        """The rows' own conversations."""
        return self._half(slice(0, len(self.desirable)))

    @property
    def mismatched(self) -> SFTBatch:
        """The prompts with the following rows' responses."""
        return self._half(slice(len(self.desirable), None))

    @property
    def weights(self) -> torch.Tensor:
        """Which conversations count, (2, B): 1, or 0 for one that only fills the batch or was too long."""
        return self.both.loss_mask.any(-1).float().view(2, -1)

    def _half(self, rows: slice) -> SFTBatch:
        return SFTBatch(
            sequences=self.both.sequences[rows],
            attention_mask=self.both.attention_mask[rows],
            loss_mask=self.both.loss_mask[rows],
            media=self.both.media[rows],
        )


class UnpairedEncoder(SampleEncoder):
    """Makes samples of rows and their neighbours."""

    def check(self, row: UnpairedRow) -> None:
        """Raise UserError for a row, without its neighbour, that cannot be encoded."""
        conversation = row.conversation(row.response)
        check_response(conversation, first=len(row.messages), kit=self.kit, processor=self.processor)

    def __call__(self, found: Neighbours) -> UnpairedSample | None:
        """Return the row's sample, None where it is too long; raises UserError for media that cannot be taken.

        Where only the mismatched conversation is too long, or cannot be encoded, the row takes no part in the estimate of
        the KL.
        """
        row, other = found.row, found.following.response
        try:
            pair = self._pair(row, other)
        except UserError:
            # What is wrong with the row itself is told below.
            pair = None
        if pair is None:
            alone = self._pair(row, row.response)
            if alone is None:
                return None
            pair = PairSample(chosen=alone.chosen, rejected=alone.filler.rejected)
        return UnpairedSample(pair=pair, desirable=row.desirable)

    def _pair(self, row: UnpairedRow, other: tuple[Any, ...]) -> PairSample | None:
        sides = PreferenceRow(
            messages=row.messages,
            chosen=row.response,
            rejected=other,
            margin=None,
            location=row.location,
            datasource=row.datasource,
            plain=row.plain,
        )
        return encode_pair(sides, kit=self.kit, processor=self.processor, max_len=self.max_len)


def collate_unpaired(samples: Sequence[UnpairedSample], *, pad_token_id: int) -> UnpairedBatch:
    """Pad samples on the right into one batch."""
    return UnpairedBatch(
        both=collate_pairs([sample.pair for sample in samples], pad_token_id=pad_token_id).tokens,
        desirable=torch.tensor([sample.desirable for sample in samples]),
    )


def shifted(rows: Sequence[Any]) -> list[tuple[Any, Any]]:
    """`[1, 2, 3]` → `[(1, 2), (2, 3), (3, 1)]`."""
    return list(zip(rows, [*rows[1:], *rows[:1]], strict=True))


def training_rows(config: KTOConfig, *, check: RowCheck[UnpairedRow] = passes) -> KeptRows[UnpairedRow]:
    """Return the rows of `--data.dataset`; raises UserError where they cannot be learned from, or are too few."""
    return blended_rows(config, lambda path: _load(config, path, split=config.data.dataset_split, check=check))


def evaluation_rows(config: KTOConfig, *, check: RowCheck[UnpairedRow] = passes) -> KeptRows[UnpairedRow]:
    """Return the rows of `--eval.dataset`, none without; raises UserError for a single one."""
    path = config.eval.dataset
    rows = KeptRows() if path is None else _load(config, path, split=config.eval.split, check=check)
    if len(rows) == 1:
        raise UserError(
            f"--eval.dataset {path} has one row; the KL is estimated by the responses to others, so add some"
        )
    return rows


def conversations_of(rows: Sequence[UnpairedRow]) -> list[Row]:
    """Return the conversations of rows."""
    return [row.conversation(row.response) for row in rows]


def _load(config: KTOConfig, path: str, *, split: str, check: RowCheck[UnpairedRow]) -> KeptRows[UnpairedRow]:
    data = config.data
    reading = named_reading(data, prompt=data.input_key, answer=data.label_key, prefix="--data.")
    # As in OpenRLHF, a column of text that is named goes in as it stands where no chat template is asked for.
    is_plain = data.input_key is not None and not data.apply_chat_template
    reading = replace(
        reading,
        names=replace(reading.names, response=data.output_key),
        plain_template=(data.input_template or "{}") if is_plain else None,
    )
    return judged_rows(path, UNPAIRED, split=split, reading=reading, bad_rows=data.bad_rows, check=check)
