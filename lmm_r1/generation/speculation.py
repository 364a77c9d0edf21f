"""Tokens that vLLM guesses ahead: what it is told, and how often it guessed right."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lmm_r1.config.speculation import LOOKUP, Speculation

_DRAFTED, _ACCEPTED = "vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens"


def speculative_arguments(speculation: Speculation | None) -> dict[str, Any]:
    """Return what of vLLM's `EngineArgs` says how tokens are guessed; nothing where they are not."""
    if speculation is None:
        return {}
    config = {"method": speculation.method, "num_speculative_tokens": speculation.tokens}
    if speculation.method == "ngram":
        config["prompt_lookup_min"], config["prompt_lookup_max"] = LOOKUP
    return {"speculative_config": config}


@dataclass(frozen=True, kw_only=True)
class Guesses:
    """How many tokens engines have guessed, and how many of them the model has taken."""

    drafted: int = 0
    accepted: int = 0

    def __add__(self, other: Guesses) -> Guesses:
        return Guesses(drafted=self.drafted + other.drafted, accepted=self.accepted + other.accepted)

    def since(self, before: Guesses) -> Guesses:
        """Return those that came after others, of the same engines."""
        return Guesses(drafted=self.drafted - before.drafted, accepted=self.accepted - before.accepted)

    def metrics(self) -> dict[str, float]:
        """Return what of them is logged of a rollout; no rate where nothing was guessed."""
        metrics: dict[str, float] = {
            "rollout/drafted_tokens": self.drafted,
            "rollout/accepted_tokens": self.accepted,
        }
        return metrics | ({"rollout/acceptance_rate": self.accepted / self.drafted} if self.drafted else {})


def guesses_so_far() -> Guesses:
    """Return those of this process's engine, which must keep vLLM's statistics."""
    from vllm.v1.metrics.reader import Counter, get_metrics_snapshot

    counts = [metric for metric in get_metrics_snapshot() if isinstance(metric, Counter)]
    drafted, accepted = (sum(its.value for its in counts if its.name == name) for name in (_DRAFTED, _ACCEPTED))
    return Guesses(drafted=drafted, accepted=accepted)
