"""Tokens that engines guess ahead of a response: the flags of training, evaluation and batch inference alike."""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

from lmm_r1.errors import UserError

SpeculativeMethod = Literal["ngram", "suffix"]
# vLLM's rejection sampler asserts it.
MOST_TOKENS = 128
# Tokens at the end that must stand elsewhere, too. vLLM's own 5 finds little in short responses, and 1 guesses at random.
LOOKUP = (2, 5)


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """How an engine guesses tokens, which the model then checks in one pass."""

    method: SpeculativeMethod
    tokens: int
    """Most that are guessed at a time."""


@dataclass(frozen=True, kw_only=True)
class SpeculationFlags:
    speculative_tokens: int = 0
    """Tokens that vLLM guesses ahead of each response, from what stands in its prompt and in itself already, and lets the
    model check in one pass; what is sampled has the same distribution. 0 guesses none."""
    speculative_method: SpeculativeMethod = "ngram"
    """What is guessed from: the last place of the response and its prompt that reads alike (ngram), or earlier responses,
    too (suffix, arXiv:2411.04975), for which the package arctic-inference is needed."""

    @property
    def speculation(self) -> Speculation | None:
        """How tokens are guessed; None where they are not."""
        if not self.speculative_tokens:
            return None
        return Speculation(method=self.speculative_method, tokens=self.speculative_tokens)


def check_speculation(flags: SpeculationFlags, *, prefix: str = "", other_engine: str | None = None) -> None:
    """Raise UserError where tokens cannot be guessed as the flags say.

    Args:
        prefix: what stands in front of the flags' names.
        other_engine: the flag and its value where something else than vLLM generates.
    """
    tokens, method = flags.speculative_tokens, flags.speculative_method
    given = f"--{prefix}speculative_tokens {tokens}"
    if not 0 <= tokens <= MOST_TOKENS:
        raise UserError(f"{given} must be between 0, which guesses none, and vLLM's most, {MOST_TOKENS}")
    if tokens == 0:
        if method != SpeculationFlags.speculative_method:
            raise UserError(
                f"--{prefix}speculative_method {method} says how tokens are guessed; give --{prefix}speculative_tokens, too"
            )
        return
    if other_engine is not None:
        raise UserError(f"{given} has vLLM guess tokens, and {other_engine} generates without it; leave it out")
    if method == "suffix" and find_spec("arctic_inference") is None:
        raise UserError(
            f"--{prefix}speculative_method suffix needs the package arctic-inference, which is not installed; run `pip "
            f"install arctic-inference==0.1.1`, or take --{prefix}speculative_method ngram"
        )
