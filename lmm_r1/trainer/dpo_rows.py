"""The rows of a run that learns from pairs: which columns they are read from, and how they become samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lmm_r1.config import DPOConfig, RMConfig
from lmm_r1.config.rows import named_reading
from lmm_r1.data.messages import Row
from lmm_r1.data.preferences import PREFERENCE, PreferenceRow
from lmm_r1.data.training_rows import KeptRows
from lmm_r1.trainer.preference_samples import PairSample, check_pair, encode_pair
from lmm_r1.trainer.supervised_rows import RowCheck, SampleEncoder, blended_rows, judged_rows, passes


def training_pairs(
    config: DPOConfig | RMConfig, *, check: RowCheck[PreferenceRow] = passes
) -> KeptRows[PreferenceRow]:
    """Return the pairs of `--data.dataset`; raises UserError where they cannot be learned from, or are too few."""
    return blended_rows(config, lambda path: _load(config, path, split=config.data.dataset_split, check=check))


def evaluation_pairs(
    config: DPOConfig | RMConfig, *, check: RowCheck[PreferenceRow] = passes
) -> KeptRows[PreferenceRow]:
    """Return the pairs of `--eval.dataset`, none without."""
    path = config.eval.dataset
    return KeptRows() if path is None else _load(config, path, split=config.eval.split, check=check)


def _load(
    config: DPOConfig | RMConfig, path: str, *, split: str, check: RowCheck[PreferenceRow]
) -> KeptRows[PreferenceRow]:
    data = config.data
    reading = named_reading(data, prompt=data.prompt_key, prefix="--data.")
    names = replace(reading.names, chosen=data.chosen_key, rejected=data.rejected_key, prompt_flag="--data.prompt_key")
    # As in OpenRLHF, a column of text that is named goes in as it stands where no chat template is asked for.
    is_plain = data.prompt_key is not None and not data.apply_chat_template
    template = (data.input_template or "{}") if is_plain else None
    reading = replace(reading, names=names, plain_template=template)
    return judged_rows(path, PREFERENCE, split=split, reading=reading, bad_rows=data.bad_rows, check=check)


def sides_of(rows: Sequence[PreferenceRow]) -> list[Row]:
    """Return the conversations of pairs, two of each."""
    return [side for row in rows for side in row.sides]


class PairEncoder(SampleEncoder):
    """Makes samples of pairs."""

    def check(self, row: PreferenceRow) -> None:
        check_pair(row, kit=self.kit, processor=self.processor)

    def __call__(self, row: PreferenceRow) -> PairSample | None:
        """Return the row's sample, None where it is too long; raises UserError for media that cannot be taken."""
        return encode_pair(row, kit=self.kit, processor=self.processor, max_len=self.max_len)
