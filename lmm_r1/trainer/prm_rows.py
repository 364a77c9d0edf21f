"""The rows of a process reward model's training: prompts with the steps of a response, a placeholder behind each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from lmm_r1.config import PRMConfig
from lmm_r1.config.rows import named_reading
from lmm_r1.data.messages import Row
from lmm_r1.data.preferences import STEPS, StepRow
from lmm_r1.data.training_rows import KeptRows
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits import LmmKit, Media
from lmm_r1.lmm_kits.checkpoint import encode_row, outlined_row
from lmm_r1.lmm_kits.plain_text import text_ids
from lmm_r1.lmm_kits.step_tokens import StepTokens
from lmm_r1.trainer.sft_samples import SFTBatch, SFTSample, collate
from lmm_r1.trainer.supervised_rows import RowCheck, SampleEncoder, blended_rows, judged_rows, passes

TOKEN_FLAGS = ("--model.placeholder_token", "--model.reward_tokens")


@dataclass(frozen=True, kw_only=True)
class StepSample:
    tokens: SFTSample
    """Its loss tokens are those behind the placeholders: at a placeholder the prediction of what follows is judged."""
    labels: tuple[float, ...]
    """Of each step, from 0 (wrong) to 1 (right)."""
    prompt_length: int
    """Of its tokens so many stand before the first step."""

    @property
    def filler(self) -> StepSample:
        """A sample that teaches nothing."""
        return replace(self, tokens=self.tokens.filler, labels=())


@dataclass(frozen=True, kw_only=True)
class StepBatch:
    tokens: SFTBatch
    labels: torch.Tensor
    """Of the step that is judged at each place, (B, T - 1); 0 elsewhere."""
    prompt_lengths: torch.Tensor  # (B,)


@dataclass(frozen=True, kw_only=True)
class StepEncoder(SampleEncoder):
    """Makes samples of rows."""

    tokens: StepTokens

    @classmethod
    def of(cls, config: PRMConfig, *, kit: LmmKit, processor: Any) -> StepEncoder:
        """Return the encoder of a run; raises UserError where a token of the flags is none of the tokenizer's."""
        placeholder = config.model.placeholder_token
        assert placeholder is not None, "required by resolve_prm"
        tokens = StepTokens.of(
            kit, processor, placeholder=placeholder, judging=config.model.reward_tokens, flags=TOKEN_FLAGS
        )
        return cls(kit=kit, processor=processor, max_len=config.data.max_len, tokens=tokens)

    def check(self, row: StepRow) -> None:
        prompt = row.conversation(())
        outline = outlined_row(prompt, kit=self.kit, processor=self.processor, add_generation_prompt=True)
        self._behind(outline.token_ids, row)

    def __call__(self, row: StepRow) -> StepSample | None:
        """Return the row's sample, None where it is too long.

        Raises UserError, with the row's place, for media that cannot be taken, and for a step that holds the placeholder.
        """
        prompt = encode_row(row.conversation(()), kit=self.kit, processor=self.processor, add_generation_prompt=True)
        ids, places = self._behind(prompt.token_ids, row)
        if len(ids) > self.max_len:
            return None
        mask = [False] * len(ids)
        for place in places:
            mask[place + 1] = True
        return StepSample(
            tokens=SFTSample(token_ids=ids, loss_mask=mask, media=prompt.media),
            labels=tuple(row.labels),
            prompt_length=len(prompt.token_ids),
        )

    def _behind(self, prompt: Sequence[int], row: StepRow) -> tuple[list[int], list[int]]:
        """Return the ids of a prompt and the steps of a row behind it, and the places of their placeholders."""
        return self.tokens.behind(
            prompt,
            row.steps,
            tokenize=partial(self._ids, location=row.location),
            end=self.kit.tokenizer_of(self.processor).eos_token_id,
        )

    def _ids(self, step: str, *, location: str) -> list[int]:
        # Steps that it ends were told apart by it, unless another tag was named.
        if (
            self.tokens.placeholder_id
            in self.kit.tokenizer_of(self.processor)(step, add_special_tokens=False)["input_ids"]
        ):
            raise UserError(
                f"{location}: a step holds the placeholder {self.tokens.placeholder}, which stands behind steps only; name "
                "what ends them with --data.step_tag, or take another --model.placeholder_token"
            )
        return text_ids(self.kit, self.processor, step)


def collate_steps(samples: Sequence[StepSample], *, pad_token_id: int) -> StepBatch:
    """Pad samples on the right into one batch, in which those of one prompt have one object for its media."""
    tokens = collate([sample.tokens for sample in samples], pad_token_id=pad_token_id)
    tokens = replace(tokens, media=_in_common(tokens.media))
    labels = torch.zeros(tokens.loss_mask.shape)
    labels[tokens.loss_mask] = torch.tensor([label for sample in samples for label in sample.labels])
    prompt_lengths = torch.tensor([sample.prompt_length for sample in samples])
    return StepBatch(tokens=tokens, labels=labels, prompt_lengths=prompt_lengths)


def _in_common(media: Sequence[Media | None]) -> list[Media | None]:
    """Return media with the first of those that are equal in the place of each."""
    found: list[Media] = []
    given: list[Media | None] = []
    for item in media:
        known = None if item is None else next((one for one in found if _are_equal(one, item)), item)
        if known is not None and known is item:
            found.append(known)
        given.append(known)
    return given


def _are_equal(one: Media, other: Media) -> bool:
    if one is other:
        return True
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def training_steps(config: PRMConfig, *, check: RowCheck[StepRow] = passes) -> KeptRows[StepRow]:
    """Return the rows of `--data.dataset`; raises UserError where they cannot be learned from, or are too few."""
    return blended_rows(config, lambda path: _load(config, path, split=config.data.dataset_split, check=check))


def evaluation_steps(config: PRMConfig, *, check: RowCheck[StepRow] = passes) -> KeptRows[StepRow]:
    """Return the rows of `--eval.dataset`, none without."""
    path = config.eval.dataset
    return KeptRows() if path is None else _load(config, path, split=config.eval.split, check=check)


def solutions_of(rows: Sequence[StepRow]) -> list[Row]:
    """Return the prompts of rows, which hold their images."""
    return [row.conversation(()) for row in rows]


def _load(config: PRMConfig, path: str, *, split: str, check: RowCheck[StepRow]) -> KeptRows[StepRow]:
    data = config.data
    reading = named_reading(data, prompt=data.input_key, answer=data.label_key, prefix="--data.")
    tag = data.step_tag or config.model.placeholder_token
    reading = replace(reading, names=replace(reading.names, step_tag=tag, step_flag="--data.step_tag"))
    return judged_rows(path, STEPS, split=split, reading=reading, bad_rows=data.bad_rows, check=check)
