"""How many tokens rows have for a model, compared with a training's budget."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from lmm_r1.data.messages import Row, demonstration
from lmm_r1.data.preferences import StepRow
from lmm_r1.data_check.contents import Finding, JudgedView, is_conversation
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits.checkpoint import Checkpoint, check_images_taken, encode_row
from lmm_r1.lmm_kits.plain_text import control_texts
from lmm_r1.supervised.dpo import check_response
from lmm_r1.supervised.samples import check_sample


@dataclass(frozen=True, kw_only=True)
class TokenBudget:
    """The token limits of a training."""

    max_len: int
    """The most tokens of prompt, images and response together, in the trainer and in the engine."""
    max_new_tokens: int | None
    """Tokens reserved for a response; None reserves one."""

    @property
    def prompt(self) -> int:
        """The most tokens of a prompt in RL."""
        return self.max_len - (self.max_new_tokens or 1)


class Lengths:
    """Encodes rows as training and engine do, and compares them with a budget."""

    def __init__(self, model: str, budget: TokenBudget, *, trust_remote_code: bool = False) -> None:
        self._model = model
        self._checkpoint = Checkpoint(model, trust_remote_code=trust_remote_code)
        self.budget = budget
        self.prompts: list[int] = []
        """Tokens of each prompt that was encoded, images included."""
        self.conversations: list[int] = []
        """The same for rows that end with a turn to train on, including that turn."""

    def finding(self, index: int, row: Row) -> Finding | None:
        """Encode one row as RL and as SFT take it, or with each of its judged responses; return the first problem."""
        if isinstance(row, JudgedView):
            # The steps of a solution are encoded without the template, which alone ends turns.
            check = None if isinstance(row.judged, StepRow) else partial(check_response, first=len(row.messages))
            found = [self._finding(index, whole, name=name, check=check) for name, whole in row.conversations]
            return next((finding for finding in found if finding is not None), None)
        check = partial(check_sample, every_turn=True)
        if row.response is None:
            return self._finding(index, row, check=check)
        return self._finding(index, row, check=check) or self._finding(index, demonstration(row), check=check)

    def _finding(self, index: int, row: Row, *, check: Callable[..., None] | None, name: str = "") -> Finding | None:
        """Args: check: what a training requires of a conversation in addition to its encoding."""
        kit, processor, whole = self._checkpoint.kit, self._checkpoint.processor, is_conversation(row)
        try:
            check_images_taken([row], kit=kit, model=self._model)
            encoded = encode_row(row, kit=kit, processor=processor, add_generation_prompt=not whole)
            if whole and check is not None:
                check(row, kit=kit, processor=processor)
        except UserError as error:
            what = str(error).removeprefix(f"{row.location}: ")
            return Finding(kind="encoding", index=index, location=row.location, what=what)
        tokens = len(encoded.token_ids)
        (self.conversations if whole else self.prompts).append(tokens)
        if whole and tokens > self.budget.max_len:
            too_long = f"takes {tokens} tokens, more than --max_len {self.budget.max_len}"
            what = f"the prompt with {name} {too_long}" if name else f"{too_long}: SFT leaves it out"
        elif not whole and tokens > self.budget.prompt:
            room = self.budget.max_new_tokens or 1
            what = f"the prompt takes {tokens} tokens and a response {room}, more than --max_len {self.budget.max_len}"
        else:
            return None
        return Finding(kind="length", index=index, location=row.location, what=what)

    @property
    def control_texts(self) -> re.Pattern[str]:
        """Matches the texts that only the model's chat template may write."""
        return control_texts(self._checkpoint.kit, self._checkpoint.processor)

    @property
    def too_long_for_model(self) -> str | None:
        """A sentence if the budget exceeds the model's positions."""
        known = self._checkpoint.config.get_text_config().max_position_embeddings
        if self.budget.max_len <= known:
            return None
        return f"--max_len {self.budget.max_len} is more than the {known} positions of {self._model}; lower it"
