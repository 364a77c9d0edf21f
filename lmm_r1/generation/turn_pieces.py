"""A turn of the policy as engines make it: in one piece, or in several where its thought is gone on with or cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lmm_r1.agents.environment import TurnOptions
from lmm_r1.config.ppo import ThoughtConfig
from lmm_r1.data.sample import Segment, WeightSpan
from lmm_r1.generation.request import Response


@dataclass(frozen=True, kw_only=True)
class TurnSettings:
    """How a turn is sampled, whoever says so."""

    stops: tuple[str, ...]
    regex: str | None
    room: int
    """Longest turn in tokens, those included that are appended to it."""
    thought: ThoughtConfig | None
    """None where thoughts are as the policy has them."""

    @classmethod
    def of(cls, options: TurnOptions, *, stops: tuple[str, ...], thought: ThoughtConfig, room: int) -> TurnSettings:
        """Return a turn's settings: its own, else the environment's stops and the run's thought."""
        free = options.regex is None
        forced = options.thought or (thought if free else None)
        return cls(
            stops=options.stops if options.stops is not None else stops if free else (),
            regex=options.regex,
            room=room if options.max_tokens is None else min(room, options.max_tokens),
            thought=forced if forced is not None and forced.forces else None,
        )


@dataclass(kw_only=True)
class TurnPieces:
    """A turn so far, and what its next piece is asked for with.

    Budget forcing (s1, arXiv:2501.19393), token-exact: what stays of a piece are the first ids that were generated, whose
    log-probs nothing that follows changes. The ids that hold the end of a thought are taken back where it is gone on with,
    and appended text is no token of the loss: neither is the policy's choice.
    """

    settings: TurnSettings
    ids_of: Callable[[str], Sequence[int]]
    """Tokenizes what is appended."""
    text_of: Callable[[Sequence[int]], str]
    """Decodes what was generated."""
    segments: list[Segment] = field(default_factory=list)
    finish_reason: str | None = None
    """How the turn has ended, in vLLM's words; None while it goes on."""
    ended_by_text: bool = False
    """Whether a text has ended it: its last token is then no end token."""
    _continuations: int = 0
    """How often its thought was gone on with."""
    _thought_tokens: int = 0
    _thinks: bool = field(init=False)

    def __post_init__(self) -> None:
        self._thinks = self.settings.thought is not None

    @property
    def token_ids(self) -> list[int]:
        """All tokens of the turn so far, those included that were appended."""
        return [token for segment in self.segments for token in segment.token_ids]

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that end the next piece."""
        thought = self.settings.thought
        if thought is None or not self._thinks or thought.end in self.settings.stops:
            return self.settings.stops
        return (*self.settings.stops, thought.end)

    @property
    def max_tokens(self) -> int:
        """Longest next piece."""
        thought = self.settings.thought
        if thought is None or not self._thinks or thought.max_tokens is None:
            return self._left
        return min(self._left, thought.max_tokens - self._thought_tokens)

    def add(self, response: Response) -> None:
        """Add a piece that has come whole, and what is appended to it."""
        thought = self.settings.thought if self._thinks else None
        if thought is not None and response.stop_text == thought.end:
            self._end_thought(response, thought)
        elif thought is not None and response.finish_reason == "length" and len(response.token_ids) < self._left:
            self._cut_thought(response, thought)
        else:
            self._keep(response)
            self._end(response)

    def _end_thought(self, response: Response, thought: ThoughtConfig) -> None:
        """Add a piece that ends with the end of a thought: go on with the thought, or else with what follows it."""
        kept = tokens_before(thought.end, response.token_ids, text_of=self.text_of)
        appended = self.ids_of(thought.continue_with)
        tokens = self._thought_tokens + kept
        too_early = thought.min_tokens is None or tokens < thought.min_tokens
        longer = tokens + len(appended)
        fits = kept + len(appended) < self._left and (thought.max_tokens is None or longer < thought.max_tokens)
        if self._continuations < thought.continuations and too_early and fits:
            self._keep(response, count=kept)
            self._append(appended)
            self._continuations += 1
            self._thought_tokens = longer
            return
        self._keep(response)
        self._thinks = False
        if thought.end in self.settings.stops:
            self._end(response)
        elif not self._left:
            self.finish_reason = "length"

    def _cut_thought(self, response: Response, thought: ThoughtConfig) -> None:
        """Add a piece that reached the longest thought, and end the thought where an answer has room behind it."""
        self._keep(response)
        appended = self.ids_of(thought.end)
        if len(appended) >= self._left:
            self._end(response)
            return
        self._append(appended)
        self._thinks = False

    @property
    def _left(self) -> int:
        return self.settings.room - len(self.token_ids)

    def _keep(self, response: Response, *, count: int | None = None) -> None:
        """Add the first `count` tokens of a piece, or all; with the piece before where nothing stands between them."""
        ids, log_probs = tuple(response.token_ids[:count]), tuple(response.log_probs[:count])
        weights = first_tokens(response.weights, len(ids))
        if not ids:
            return
        before = self.segments[-1] if self.segments and self.segments[-1].kind == "generated" else None
        known = len(log_probs) == len(ids)
        if before is not None:
            self.segments.pop()
            ids, log_probs = (*before.token_ids, *ids), (*(before.log_probs or ()), *log_probs)
            weights = (*before.weights, *weights)
        self.segments.append(
            Segment(
                kind="generated",
                token_ids=ids,
                log_probs=log_probs if known else None,
                constrained=self.settings.regex is not None,
                weights=weights,
            )
        )

    def _append(self, token_ids: Sequence[int]) -> None:
        self.segments.append(Segment(kind="observation", token_ids=tuple(token_ids)))

    def _end(self, response: Response) -> None:
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
    """Return how many of a piece's first tokens hold nothing of a text in it; all where the text is not in it.

    A token that holds something before the text as well, as in `." </`, goes with it.
    """
    whole = text_of(token_ids)
    place = whole.find(text)
    if place < 0:
        return len(token_ids)
    heads = ((count, text_of(token_ids[:count])) for count in range(len(token_ids) - 1, 0, -1))
    return next((count for count, head in heads if len(head) <= place and whole.startswith(head)), 0)
