"""A prompt that is sent to an engine: how its responses are sampled, and what is known of them so far."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from lmm_r1.agents.environment import TurnOptions
from lmm_r1.config.ppo import ThoughtConfig
from lmm_r1.data.sample import WHOLE, Segment, WeightSpan
from lmm_r1.errors import UserError
from lmm_r1.generation.engine import SamplingSettings, TokenEngine

if TYPE_CHECKING:
    from vllm.inputs import TokensPrompt
    from vllm.outputs import CompletionOutput, RequestOutput


# The most tokens of a request's logit_bias that vLLM's sampler on GPUs takes; a longer one ends the engine.
LOGIT_BIASES = 1024


def sampling_params(
    sampling: SamplingSettings,
    *,
    max_tokens: int,
    end_token_id: int,
    output_per: Literal["token", "response", "prompt"],
    logprobs: bool = False,
    ignore_eos: bool = False,
    stops: Sequence[str] = (),
    regex: str | None = None,
) -> SamplingParams:
    """Return vLLM's parameters for all responses to one prompt.

    Args:
        max_tokens: longest response to this prompt.
        output_per: what the engine gives at once: every token, each response when it ends (and its first token before),
            or all responses when the last has ended.
        logprobs: the engine reports the log-probs of the sampled tokens.
        ignore_eos: responses run to `max_tokens`.
        stops: texts that end a response, which belong to it.
        regex: what the whole response matches, unless its longest length cuts it off.
    """
    return SamplingParams(
        n=sampling.n_samples,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=max_tokens,
        # No seed per request: vLLM's CPU backend fails on it. The engine's own seed makes runs repeatable.
        # In addition to those of the checkpoint's generation config, which some released checkpoints fill in wrongly.
        stop_token_ids=[] if ignore_eos else [end_token_id],
        ignore_eos=ignore_eos,
        skip_special_tokens=False,
        # Where the engine looks for texts it must know them.
        detokenize=bool(stops),
        stop=list(stops),
        include_stop_str_in_output=bool(stops),
        structured_outputs=None if regex is None else StructuredOutputsParams(regex=regex),
        # Only the sampled token's log-prob, without the most likely tokens.
        logprobs=0 if logprobs else None,
        output_kind=RequestOutputKind.FINAL_ONLY if output_per == "prompt" else RequestOutputKind.DELTA,
        stream_interval=max_tokens if output_per == "response" else None,
    )


def as_asked(asked: Any, *, needed: SamplingParams, engine_guesses: bool = False) -> SamplingParams:
    """Return the parameters that an agent asks for, changed where training would not be token-exact with them.

    One response, of no more tokens than `needed` allows, which ends at its end token, with the log-probs and in the pieces
    that `needed` asks for. All else is as the agent asks: temperature, stop texts, and so on. The engine's workers ban tokens.

    Args:
        engine_guesses: the engine guesses tokens ahead.

    Raises:
        UserError: they are no vLLM parameters, or none that vLLM takes.
    """
    if not isinstance(asked, SamplingParams):
        raise UserError(f"the agent's sampling_params are a {type(asked).__name__}; give a vllm.SamplingParams")
    if asked.structured_outputs is not None or asked.allowed_token_ids is not None:
        raise UserError(
            "the agent's sampling_params bound what may be sampled (structured_outputs or allowed_token_ids), and the "
            "policy gradient would take that for the policy's choice; write an environment with TurnOptions.regex"
        )
    if engine_guesses and (asked.min_p or asked.logit_bias):
        raise UserError(
            "the agent's sampling_params ask for min_p or logit_bias, which vLLM does not apply to tokens that it guesses; "
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
    texts = [asked.stop] if isinstance(asked.stop, str) else list(asked.stop or ())
    stops = list(dict.fromkeys([*texts, *(needed.stop or ())]))
    log_probs = asked.logprobs if needed.logprobs is None else max(asked.logprobs or 0, needed.logprobs)
    changed = {
        "n": 1,
        "max_tokens": most,
        "min_tokens": min(asked.min_tokens, most),
        "logprobs": log_probs,
        "stop_token_ids": sorted({*(asked.stop_token_ids or ()), *(needed.stop_token_ids or ())}),
        "ignore_eos": needed.ignore_eos,
        "stop": stops,
        "structured_outputs": needed.structured_outputs,
        # Where the engine looks for texts it must know them.
        "detokenize": asked.detokenize or bool(stops),
        "output_kind": needed.output_kind,
        "stream_interval": needed.stream_interval,
    }
    try:
        return SamplingParams(**{**given, **changed})
    except ValueError as error:
        raise UserError(f"the agent's sampling_params are none that vLLM takes: {error}") from error


@dataclass(kw_only=True)
class EngineWeights:
    """The weights of one engine: their version, and the requests that they generate for."""

    version: int = 0
    """How many updates of the run they have had."""
    _under_way: dict[str, Request] = field(default_factory=dict)

    @contextmanager
    def generating(self, request_id: str, request: Request) -> Iterator[None]:
        """Tell a request, while the block runs, of each update that comes in the middle of its responses."""
        self._under_way[request_id] = request
        try:
            yield
        finally:
            del self._under_way[request_id]

    def replaced(self, counts: Mapping[str, Mapping[int, int]]) -> None:
        """Count an update.

        Args:
            counts: how many tokens the unfinished responses had before it, by request and place; a request that the engine
                has not begun is not among them.
        """
        self.version += 1
        for request_id, request in self._under_way.items():
            request.note_update(counts.get(request_id, {}), version=self.version)


def tokens_under_way(engine: Any) -> dict[str, dict[int, int]]:
    """Return how many tokens each unfinished response has that a vLLM engine generates, by request and place.

    Of an engine that is paused: of one with a process of its own, what has come from there by then.
    """
    counts: dict[str, dict[int, int]] = {}
    for state in engine.output_processor.request_states.values():
        counts.setdefault(state.external_req_id, {})[state.request_index] = state.detokenizer.num_output_tokens()
    return counts


@dataclass(kw_only=True)
class Response:
    """What the engine has given of one response so far."""

    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    """Of every token, where the request asks for them."""
    finish_reason: Literal["stop", "length", "abort", "error", "repetition"] | None = None
    """How it has ended, in vLLM's words."""
    stop_text: str | None = None
    """The text that has ended it, where one did: the last token is then no end token."""
    begins: list[tuple[int, int]] = field(default_factory=list)
    """From which token on it came of which weight version; empty where nobody notes that."""

    @property
    def weights(self) -> tuple[WeightSpan, ...]:
        """Which weight versions its tokens came of, as far as that is noted."""
        bounds = pairwise([*self.begins, (len(self.token_ids), 0)])
        spans = (WeightSpan(version, end - start) for (start, version), (end, _) in bounds)
        return tuple(span for span in spans if span.tokens > 0)

    def add(self, part: CompletionOutput) -> None:
        self.token_ids.extend(part.token_ids)
        if part.logprobs is not None:
            pairs = zip(part.token_ids, part.logprobs, strict=True)
            self.log_probs.extend(logprobs[token].logprob for token, logprobs in pairs)
        self.finish_reason = part.finish_reason
        self.stop_text = part.stop_reason if isinstance(part.stop_reason, str) else None


class Request:
    """One prompt and its responses."""

    def __init__(
        self, prompt: TokensPrompt, parameters: SamplingParams, *, weights: EngineWeights | None = None
    ) -> None:
        """Args: weights: of the engine that it will be sent to; None where nobody updates them."""
        self.prompt = prompt
        self.parameters = parameters
        self._weights = weights
        self.responses = [Response() for _ in range(parameters.n)]
        self.read_token_ids: list[int] | None = None
        """The prompt as the engine has read it, its placeholders expanded; None until it has said so."""
        self.output: RequestOutput | None = None
        """What the engine has given last, as it gave it."""

    async def sent_to(self, engine: TokenEngine) -> AsyncGenerator[Response, None]:
        """Yield each response whenever it has grown, for the last time when it has ended; leaving early aborts them all.

        How often that is, is the parameters' `output_kind` and `stream_interval`.
        """
        request_id = uuid.uuid4().hex
        with self._noting_weights(request_id):
            async with aclosing(engine.generate(self.prompt, self.parameters, request_id)) as outputs:
                async for output in outputs:
                    self.output, self.read_token_ids = output, output.prompt_token_ids
                    for part in output.outputs:
                        response = self.responses[part.index]
                        response.add(part)
                        yield response

    def _noting_weights(self, request_id: str) -> AbstractContextManager[None]:
        if self._weights is None:
            return nullcontext()
        for response in self.responses:
            response.begins = [(0, self._weights.version)]
        return self._weights.generating(request_id, self)

    def note_update(self, counts: Mapping[int, int], *, version: int) -> None:
        """Note that what the engine generates from now on comes of new weights.

        Args:
            counts: how many tokens the unfinished responses have; none where the engine has not begun.
        """
        for place, response in enumerate(self.responses):
            # One that is not among the others has ended.
            if response.finish_reason is None and (place in counts or not counts):
                response.begins.append((counts.get(place, 0), version))

    @property
    def broken(self) -> Counter[str | None]:
        """How the responses ended that are not whole; None for those that never did."""
        return Counter(response.finish_reason for response in self.responses if response.finish_reason not in WHOLE)


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
