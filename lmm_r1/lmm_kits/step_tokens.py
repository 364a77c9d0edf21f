"""How a process reward model reads a response: each step ends with a placeholder, at which one of two tokens judges it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lmm_r1.errors import UserError
from lmm_r1.lmm_kits.kit import LmmKit

if TYPE_CHECKING:
    from transformers import PretrainedConfig

CONFIG_KEY = "process_reward"
"""The key in a checkpoint's config under which a process reward model stores its tokens."""


@dataclass(frozen=True, kw_only=True)
class StepTokens:
    """The tokens of one tokenizer, and their texts."""

    placeholder: str
    right: str
    wrong: str
    placeholder_id: int
    judging_ids: tuple[int, int]
    """For a right step and for a wrong one."""

    @classmethod
    def of(
        cls, kit: LmmKit, processor: Any, *, placeholder: str, judging: Sequence[str], flags: tuple[str, str]
    ) -> StepTokens:
        """Return the tokens with these texts; raises UserError if a text is not a single token.

        Args:
            judging: the tokens for a right step and for a wrong one.
            flags: the flags of the placeholder and of the other two, for messages.
        """
        right, wrong = judging
        found = [
            _token_id(kit.tokenizer_of(processor), text, flag=flag)
            for text, flag in ((placeholder, flags[0]), (right, flags[1]), (wrong, flags[1]))
        ]
        if found[0] in kit.placeholder_ids(processor):
            raise UserError(f"{flags[0]} {placeholder} represents an image or a video; name a token without a meaning")
        if len(set(found)) < len(found):
            raise UserError(
                f"{flags[0]} {placeholder} and {flags[1]} {right} {wrong} must be three different tokens; two are the same"
            )
        return cls(
            placeholder=placeholder,
            right=right,
            wrong=wrong,
            placeholder_id=found[0],
            judging_ids=(found[1], found[2]),
        )

    @property
    def in_config(self) -> dict[str, object]:
        """The entry in a checkpoint's config."""
        return {"placeholder_token": self.placeholder, "reward_tokens": [self.right, self.wrong]}

    def behind(
        self, prompt: Sequence[int], steps: Sequence[str], *, tokenize: Callable[[str], list[int]], end: int
    ) -> tuple[list[int], list[int]]:
        """Return the ids of a prompt and the steps after it, and the positions of their placeholders.

        Steps are lines. An end token follows the last one, so that every placeholder has a next token.
        """
        ids, places = list(prompt), []
        for number, step in enumerate(steps):
            ids += tokenize(f"\n{step}" if number else step)
            places.append(len(ids))
            ids.append(self.placeholder_id)
        return [*ids, end], places

    def split(self, response: str) -> list[str]:
        """Return the steps of a response that its placeholders separate, or its lines without any; blank ones are dropped."""
        parts = response.split(self.placeholder) if self.placeholder in response else response.split("\n")
        return [part.strip() for part in parts if part.strip()]


def stored_tokens(config: PretrainedConfig) -> Mapping[str, Any] | None:
    """Return the tokens in the config of a process reward model; None for any other checkpoint."""
    stored = getattr(config, CONFIG_KEY, None)
    return stored if isinstance(stored, Mapping) else None


def forget_tokens(config: PretrainedConfig) -> None:
    """Remove the tokens from a config, because a model trained from a process reward model no longer judges steps."""
    if CONFIG_KEY in vars(config):
        delattr(config, CONFIG_KEY)


def _token_id(tokenizer: Any, text: str, *, flag: str) -> int:
    """Return the id of a text that is tokenized as a single token or is an entry of the vocabulary."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(ids) == 1:
        return ids[0]
    known = tokenizer.get_vocab().get(text)
    if known is None:
        raise UserError(
            f"{flag} {text} is {len(ids)} tokens of this model's tokenizer; name one that is a single token"
        )
    return known
