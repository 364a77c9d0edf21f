"""Turns of an episode: how they are sampled, in one piece or several, and what an agent may ask of the sampling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm import SamplingParams

from lmm_r1.config.shared import ThoughtConfig
from lmm_r1.data.sample import Segment, WeightSpan
from lmm_r1.errors import UserError
from lmm_r1.generation.request import Response

# The most entries of a request's logit_bias that vLLM's sampler on GPUs takes; more of them stop the engine.
LOGIT_BIASES = 1024


def as_asked(asked: Any, *, needed: SamplingParams, engine_guesses: bool = False) -> SamplingParams:
    """Return the parameters that an agent asks for, changed so that training is token-exact.

    There is one response, at most as long as in `needed`. It ends at the end token, with the log-probs and outputs of
    `needed`. All other parameters, such as temperature and stop texts, are the agent's. The engine's workers ban tokens.

    Args:
        engine_guesses: the engine uses speculative decoding.

    Raises:
        UserError: they are not vLLM parameters, or vLLM refuses them.
    """
    if not isinstance(asked, SamplingParams):
        raise UserError(f"the agent's sampling_params are a {type(asked).__name__}; give a vllm.SamplingParams")
    if asked.structured_outputs is not None or asked.allowed_token_ids is not None:
        raise UserError(
            "the agent's sampling_params limit what may be sampled (structured_outputs or allowed_token_ids), which the "
            "policy gradient would take for the policy's choice; leave them out"
        )
    if engine_guesses and (asked.min_p or asked.logit_bias):
        raise UserError(
            "the agent's sampling_params contain min_p or logit_bias, which vLLM does not apply with speculative decoding; "
            "leave them out, or --vllm.speculative_tokens"
        )
    if (biased := len(asked.logit_bias or ())) > LOGIT_BIASES:
        raise UserError(
            f"the agent's sampling_params give logit_bias for {biased:,} tokens, and vLLM takes {LOGIT_BIASES:,}; leave some "
            "of them out"
        )
    derived = {"output_text_buffer_length"}
    given = {
        name: getattr(asked, name)
        for name in asked.__struct_fields__
        if not name.startswith("_") and name not in derived
    }
    most = needed.max_tokens if asked.max_tokens is None else min(asked.max_tokens, needed.max_tokens)
    # An agent's own seed would be the same for all samples of a group, or that of the previous turn.
    seed = asked.seed if needed.seed is None else needed.seed
    texts = [asked.stop] if isinstance(asked.stop, str) else list(asked.stop or ())
    stops = list(dict.fromkeys([*texts, *(needed.stop or ())]))
    log_probs = asked.logprobs if needed.logprobs is None else max(asked.logprobs or 0, needed.logprobs)
    changed = {
        "n": 1,
        "seed": seed,
        "max_tokens": most,
        "min_tokens": min(asked.min_tokens, most),
        "logprobs": log_probs,
        "stop_token_ids": sorted({*(asked.stop_token_ids or ()), *(needed.stop_token_ids or ())}),
        "ignore_eos": needed.ignore_eos,
        "stop": stops,
        # The engine can only find stop texts in text.
        "detokenize": asked.detokenize or bool(stops),
        "output_kind": needed.output_kind,
        "stream_interval": needed.stream_interval,
    }
    try:
        return SamplingParams(**{**given, **changed})
    except ValueError as error:
        raise UserError(f"vLLM refuses the agent's sampling_params: {error}") from error


@dataclass(kw_only=True)
class TurnPieces:
    """A turn so far, and the parameters of its next piece; without budget forcing, a turn is one piece.

    Budget forcing (s1, arXiv:2501.19393), token-exact: the first generated ids of a piece are kept, whose log-probs do not
    depend on what follows. If a thought is continued, the ids of its end are removed. Appended text is not in the loss,
    because it is not the policy's choice.
    """

    own_stops: tuple[str, ...]
    """Texts that end the turn."""
    room: int
    """The longest turn in tokens, including appended ones."""
    thought: ThoughtConfig | None
    """None once the thought has ended, or if thoughts are not forced."""
    ids_of: Callable[[str], Sequence[int]]
    """Tokenizes appended text."""
    text_of: Callable[[Sequence[int]], str]
    """Decodes generated tokens."""
    segments: list[Segment] = field(default_factory=list)
    finish_reason: str | None = None
    """Why the turn ended, in vLLM's words; None before its end."""
    ended_by_text: bool = False
    """Whether a text ended it; its last token is then no end token."""
    _continuations: int = 0
    """How often its thought was continued."""
    _thought_tokens: int = 0

    def __post_init__(self) -> None:
        if self.thought is not None and not self.thought.forces:
            self.thought = None

    @property
    def token_ids(self) -> list[int]:
        """All tokens of the turn so far, including appended ones."""
        return [token for segment in self.segments for token in segment.token_ids]

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that end the next piece."""
        if self.thought is None or self.thought.end in self.own_stops:
            return self.own_stops
        return (*self.own_stops, self.thought.end)

    @property
    def max_tokens(self) -> int:
        """The longest next piece."""
        if self.thought is None or self.thought.max_tokens is None:
            return self._left
        return min(self._left, self.thought.max_tokens - self._thought_tokens)

    def add(self, response: Response) -> None:
        """Add a complete piece and the text that is appended to it."""
        thought = self.thought
        if thought is not None and response.stop_text == thought.end:
            self._end_thought(response, thought)
        elif thought is not None and response.finish_reason == "length" and len(response.token_ids) < self._left:
            self._cut_thought(response, thought)
        else:
            self._end(response)

    def _end_thought(self, response: Response, thought: ThoughtConfig) -> None:
        """Add a piece that ends a thought; continue the thought if that is due, otherwise the turn."""
        kept = tokens_before(thought.end, response.token_ids, text_of=self.text_of)
        appended = self.ids_of(thought.continue_with)
        tokens = self._thought_tokens + kept
        too_early = thought.min_tokens is None or tokens < thought.min_tokens
        longer = tokens + len(appended)
        fits = kept + len(appended) < self._left and (thought.max_tokens is None or longer < thought.max_tokens)
        if self._continuations < thought.continuations and too_early and fits:
            self._keep(response, count=kept)
            self.segments.append(Segment(kind="observation", token_ids=tuple(appended)))
            self._continuations += 1
            self._thought_tokens = longer
            return
        self.thought = None
        if thought.end in self.own_stops:
            self._end(response)
            return
        self._keep(response)
        if not self._left:
            self.finish_reason = "length"

    def _cut_thought(self, response: Response, thought: ThoughtConfig) -> None:
        """Add a piece that reached the longest thought, and end the thought if there is room for an answer."""
        appended = self.ids_of(thought.end)
        if len(response.token_ids) + len(appended) >= self._left:
            self._end(response)
            return
        self._keep(response)
        self.segments.append(Segment(kind="observation", token_ids=tuple(appended)))
        self.thought = None

    @property
    def _left(self) -> int:
        return self.room - len(self.token_ids)

    def _keep(self, response: Response, *, count: int | None = None) -> None:
        """Add the first `count` tokens of a piece, or all; adjacent pieces become one segment."""
        ids, log_probs = tuple(response.token_ids[:count]), tuple(response.log_probs[:count])
        weights = first_tokens(response.weights, len(ids))
        if not ids:
            return
        known = len(log_probs) == len(ids)
        if self.segments and self.segments[-1].kind == "generated":
            before = self.segments.pop()
            ids, log_probs = (*before.token_ids, *ids), (*(before.log_probs or ()), *log_probs)
            weights = (*before.weights, *weights)
        self.segments.append(
            Segment(kind="generated", token_ids=ids, log_probs=log_probs if known else None, weights=weights)
        )

    def _end(self, response: Response) -> None:
        """Add the last piece."""
        self._keep(response)
        self.finish_reason = response.finish_reason
        self.ended_by_text = response.stop_text is not None


def first_tokens(spans: Sequence[WeightSpan], count: int) -> tuple[WeightSpan, ...]:
    """Return the spans of the first `count` tokens: ((1, 4), (2, 3)) and 5 → ((1, 4), (2, 1))."""
    kept: list[WeightSpan] = []
    for span in spans:
        tokens = min(span.tokens, count)
        count -= tokens
        if tokens:
            kept.append(WeightSpan(span.version, tokens))
    return tuple(kept)


def tokens_before(text: str, token_ids: Sequence[int], *, text_of: Callable[[Sequence[int]], str]) -> int:
    """Return the number of a piece's first tokens that hold nothing of a text; all if the text is not in it.

    A token that holds something before the text as well, as in `." </`, goes with it.
    """
    whole = text_of(token_ids)
    place = whole.find(text)
    if place < 0:
        return len(token_ids)
    heads = ((count, text_of(token_ids[:count])) for count in range(len(token_ids) - 1, 0, -1))
    return next((count for count, head in heads if len(head) <= place and whole.startswith(head)), 0)
