"""Supervised trainers: SFT, preference training, reward models, distillation.

This module holds their rows: blended from datasets, in an order that a resumed run repeats, encoded ahead.
"""

from __future__ import annotations

import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from lmm_r1.config import DPOConfig, RMConfig, SupervisedConfig
from lmm_r1.config.run_rows import read_judged
from lmm_r1.data.files import RowFile
from lmm_r1.data.messages import BadRows, PreferenceRow
from lmm_r1.data.training_rows import KeptRows, stopped_by, with_left_out
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits import LmmKit
from lmm_r1.lmm_kits.checkpoint import ImageFitting
from lmm_r1.train.start import say

if TYPE_CHECKING:
    from typing_extensions import Self


RowT = TypeVar("RowT")
SampleT = TypeVar("SampleT")
RowCheck: TypeAlias = Callable[[RowT], RowT]
"""Returns a row as a run uses it; raises UserError for one that it cannot use."""

# Rows that each worker encodes ahead.
_AHEAD = 16


@dataclass(frozen=True, kw_only=True)
class SampleEncoder(ABC):
    """Encodes the rows of a trainer."""

    kit: LmmKit
    processor: Any
    max_len: int

    @classmethod
    def of(cls, config: Any, *, kit: LmmKit, processor: Any) -> Self:
        """Return the encoder of a run; raises UserError if the processor lacks what the flags need."""
        return cls(kit=kit, processor=processor, max_len=config.data.max_len)

    @abstractmethod
    def __call__(self, row: Any) -> Any:
        """Return the row's sample, None if it is too long; raises UserError for media that cannot be used."""

    @abstractmethod
    def check(self, row: Any, fitting: ImageFitting | None) -> Any:
        """Return the row, with images that fit; raises UserError if a call with it would, as far as sizes and texts tell.

        All rows are checked before a run, in a small part of the time that encoding takes.
        """


def passes(row: RowT) -> RowT:
    """Accept every row."""
    return row


def judged_rows(
    config: DPOConfig | RMConfig, path: str, *, split: str, check: RowCheck[PreferenceRow]
) -> KeptRows[PreferenceRow]:
    """Return the pairs of a file, and print its summary; see `read_pairs`."""
    return kept(read_judged(config, path, split=split, check=check))


def kept(file: RowFile[Any]) -> KeptRows[Any]:
    """Return the rows of a file, and print its summary."""
    say(with_left_out(file.summary, file.skipped))
    return KeptRows.of(file.path, file.rows, file.skipped)


def first_fitting(config: SupervisedConfig, rows: Iterable[RowT], encode: Callable[[RowT], SampleT | None]) -> SampleT:
    """Return the sample of the first row that is not too long; raises UserError if there is none.

    A row that cannot be encoded stops the run or is skipped, by `--data.bad_rows`.
    """
    for row in rows:
        sample = attempt(encode, row)
        if isinstance(sample, UserError):
            check_left_out(sample, bad_rows=config.data.bad_rows)
        elif sample is not None:
            return sample
    raise UserError(
        f"every row of --data.dataset {config.data.dataset} is longer than --data.max_len {config.data.max_len}; raise it"
    )


def attempt(encode: Callable[[RowT], SampleT | None], row: RowT) -> SampleT | UserError | None:
    """Return a row's sample, None if it is too long, or the error if it cannot be encoded."""
    try:
        return encode(row)
    except UserError as error:
        return error


def check_left_out(error: UserError, *, bad_rows: BadRows) -> None:
    """Raise UserError for a row that cannot be encoded, unless the run continues without it."""
    if bad_rows == "stop":
        raise stopped_by(error) from error


def chat_template(config: SupervisedConfig) -> str | None:
    """Return the template of `--data.tokenizer_chat_template`, which is a template or names a file with one.

    Raises UserError if it is neither.
    """
    given = config.data.tokenizer_chat_template
    if given is None or "{" in given:
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"--data.tokenizer_chat_template {given} is no template, which has {{ in it, and no file that can be read "
            f"({error})"
        ) from error


def updates_per_epoch(num_rows: int, batch_size: int) -> int:
    """Return the updates of one pass over the rows, the last of which may have fewer."""
    return -(-num_rows // batch_size)


def batch_indices(*, num_rows: int, batch_size: int, seed: int, step: int, keep_order: bool) -> list[int]:
    """Return the row indices of update `step` (from 0); the last batch of each epoch may be smaller.

    Each epoch is a new permutation, or with `keep_order` the order of the rows. The indices depend only on the step, so
    that a resumed run sees the same rows.
    """
    epoch, position = divmod(step, updates_per_epoch(num_rows, batch_size))
    if keep_order:
        return list(range(num_rows))[position * batch_size : (position + 1) * batch_size]
    order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed + epoch))
    return order[position * batch_size : (position + 1) * batch_size].tolist()


class _EncodedRows(Dataset):
    """Rows as a worker process encodes them. Errors are returned, because a raised one arrives as a traceback."""

    def __init__(self, rows: Sequence[Any], encode: Callable[[Any], Any]) -> None:
        self.rows = rows
        self.encode = encode

    def __getitem__(self, index: int) -> Any:
        return attempt(self.encode, self.rows[index])


def read_ahead(
    rows: Sequence[RowT], encode: Callable[[RowT], SampleT | None], *, indices: Iterable[int], workers: int
) -> Generator[SampleT | UserError | None, None, None]:
    """Yield `attempt` of rows in the order of `indices`, encoded ahead by worker processes, which `close` ends."""
    loader: DataLoader[Any] = DataLoader(
        _EncodedRows(rows, encode),
        batch_size=None,
        sampler=indices,
        num_workers=workers,
        # A fork has the rows already; sending them would read each image from its file.
        multiprocessing_context="fork",
        prefetch_factor=_AHEAD,
        collate_fn=lambda item: item,
        worker_init_fn=_begin_worker,
        # A generator of its own, so that dropout is the same with any number of workers.
        generator=torch.Generator().manual_seed(0),
    )
    yield from loader


def _begin_worker(number: int) -> None:
    """Ignore Ctrl-C, which reaches all processes of the group; the training process handles it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
