"""The rows of a supervised run: which columns they are read from, how they become samples, and reading ahead."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch.utils.data import DataLoader, Dataset

from lmm_r1.config import SFTConfig
from lmm_r1.config.rows import row_reading
from lmm_r1.data.files import read_row_file
from lmm_r1.data.messages import Row, demonstration
from lmm_r1.data.training_rows import blend, parse_dataset_spec
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits import LmmKit
from lmm_r1.trainer.sft_samples import SFTSample, encode_sample, loss_turns

# Rows that each worker has encoded before they are asked for.
_AHEAD = 16


def training_rows(config: SFTConfig) -> list[Row]:
    """Return the rows of `--data.dataset`; raises UserError where they cannot be learned from, or are too few."""
    assert config.data.dataset is not None, "required by config.resolve"
    paths, probabilities = parse_dataset_spec(config.data.dataset, config.data.dataset_probs)
    row_lists = [_load(config, path, split=config.data.dataset_split) for path in paths]
    rows = blend(row_lists, probabilities, seed=config.train.seed)[: config.data.max_samples]
    if len(rows) < config.train.batch_size:
        raise UserError(
            f"--data.dataset {config.data.dataset} gives {len(rows)} rows, fewer than "
            f"--train.batch_size {config.train.batch_size}; lower it or add rows"
        )
    _check_turns(config, rows)
    return rows


def evaluation_rows(config: SFTConfig) -> list[Row]:
    """Return the rows of `--eval.dataset`, none without; they have answers where a verifier is to judge by them."""
    if config.eval.dataset is None:
        return []
    rows = _load(config, config.eval.dataset, split=config.eval.split, judged=config.eval.verifier is not None)
    _check_turns(config, rows)
    return rows


def _load(config: SFTConfig, path: str, *, split: str, judged: bool = False) -> list[Row]:
    reading = row_reading(config.data, prefix="--data.")
    names = replace(reading.names, response=config.data.output_key)
    reading = replace(reading, names=names, plain_template=plain_template(config))
    file = read_row_file(path, split=split, reading=reading, answer_required=judged)
    # Every rank reads them, and one says so.
    Console(highlight=False, quiet=os.environ.get("RANK", "0") != "0").print(file.told)
    return [demonstration(row) for row in file.rows.values()]


def plain_template(config: SFTConfig) -> str | None:
    """Return what stands around a plain-text prompt, with {} in its place; None where the chat template writes it."""
    data = config.data
    if data.apply_chat_template:
        return None
    if data.output_key is not None:
        return data.input_template or "{}"
    return "{}" if config.model.pretrain_mode_enable else None


def chat_template(config: SFTConfig) -> str | None:
    """Return the template of `--data.tokenizer_chat_template`, which is one, or names a file with one.

    Raises UserError where it is neither.
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


def _check_turns(config: SFTConfig, rows: Sequence[Row]) -> None:
    if not config.model.pretrain_mode_enable:
        for row in rows:
            loss_turns(row, every_turn=config.data.multiturn)


@dataclass(frozen=True, kw_only=True)
class RowEncoder:
    """Makes samples of rows."""

    kit: LmmKit
    processor: Any
    max_len: int
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


class _EncodedRows(Dataset):
    """What a row gives, as a worker process hands it on: what it raised would come back as a traceback."""

    def __init__(self, rows: Sequence[Row], encode: RowEncoder) -> None:
        self.rows = rows
        self.encode = encode

    def __getitem__(self, index: int) -> SFTSample | UserError | None:
        try:
            return self.encode(self.rows[index])
        except UserError as error:
            return error


def read_ahead(
    rows: Sequence[Row], encode: RowEncoder, *, indices: Iterable[int], workers: int
) -> Iterator[SFTSample | None]:
    """Yield the samples of rows in the order of `indices`, encoded ahead of it by worker processes.

    Raises UserError when a row's turn comes that cannot be taken.
    """
    loader: DataLoader[Any] = DataLoader(
        _EncodedRows(rows, encode),
        batch_size=None,
        sampler=indices,
        num_workers=workers,
        # Rows are not sent to a fork: sent, each would read its images out of their file.
        multiprocessing_context="fork",
        prefetch_factor=_AHEAD,
        collate_fn=_as_it_is,
        worker_init_fn=_begin_worker,
        # Of its own, so that dropout is the same with any number of workers.
        generator=torch.Generator().manual_seed(0),
    )
    for item in loader:
        if isinstance(item, UserError):
            raise item
        yield item


def _as_it_is(item: Any) -> Any:
    return item


def _begin_worker(number: int) -> None:
    """Leave Ctrl-C, which reaches the whole group of processes, to the one that trains."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
