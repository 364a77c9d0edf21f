"""What engines give: a sampled trajectory, from the engine to the packed sequence and the records; a plain response."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias

from lmm_r1.data.messages import ImagePart, Message, Row, to_json, with_images
from remote_rm.verifier import Score

if TYPE_CHECKING:
    import ray
    import torch


CallEnd = Literal["done", "malformed", "failed"]
"""It was carried out; or it could not be, as the policy had written it; or the tool failed."""


@dataclass(frozen=True, kw_only=True)
class CallOutcome:
    """What became of one call of a tool."""

    tool: str
    """Its name; empty where the call names none that there is."""
    outcome: CallEnd
    problem: str = ""
    """What went wrong, as the policy is told it; empty where nothing did."""


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Where a picture was cut out of another one of its episode."""

    picture: int
    """The other one, from 0: those of the prompt first, then those that tools have shown, in their order."""
    name: str
    """What the policy calls it: `original_image`, `observation_1`."""
    box: tuple[int, int, int, int]
    """Left, upper, right and lower edge in pixels of the other one's full resolution; right and lower are outside."""
    size: tuple[int, int]
    """The other one's width and height in full resolution."""
    keypoint: tuple[float, float] | None = None
    """The point that was asked for, where one was and not a box: x and y in the same pixels."""


@dataclass(frozen=True)
class CutImage(ImagePart):
    """A picture that knows where it was cut out."""

    _: KW_ONLY
    cut: Cut


FinishReason = Literal["stop", "length", "aborted"]
"""The model ended it, it reached its limit, or the user stopped it."""
WHOLE: Final = ("stop", "length")
"""How a response that is whole has ended."""


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One response outside of training."""

    text: str
    """Without the end token."""
    num_tokens: int | None
    """The end token counts; None where nobody counted, as with many a server and every file of predictions."""
    finish_reason: FinishReason | Literal["unknown"]
    """`unknown` only for a response that was read from a file which does not say."""
    image_scales: tuple[tuple[float, float], ...] = ()
    """Of the prompt's images, as its `EncodedPrompt` has them; empty where nobody encoded it here."""
    played: Played | None = None
    """Of an episode: `text` is then its last turn's, and `num_tokens` are those of all turns of the model."""

    def behind(self, prefill: str) -> Completion:
        """Return the response with what it was begun with in front of its text; the model wrote none of those tokens."""
        return replace(self, text=prefill + self.text) if prefill else self


@dataclass(frozen=True, kw_only=True)
class MediaRef:
    """Media tensors that stay where the engine has put them: all of them that passes through the driver."""

    key: str
    """Samples that have it in common are shown the same media; no other media of a run have it."""
    stored: ray.ObjectRef
    """Stands for them in Ray's object store, which frees them when no process holds it any more."""
    nbytes: int
    """How much of the store they take."""


class WeightSpan(NamedTuple):
    """Consecutive tokens that came of the same weights."""

    version: int
    """How many updates these had had."""
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Consecutive tokens of a sample that come from one side."""

    kind: Literal["prompt", "generated", "observation"]
    """`prompt` begins the sample, `generated` is the policy's, `observation` is what an environment answers to it."""
    token_ids: tuple[int, ...]
    """Images and videos are expanded to their full runs of placeholder tokens, as training sees them."""
    log_probs: tuple[float, ...] | None = None
    """The engine's, of each generated token; None where it was not asked for them."""
    media: MediaRef | None = field(default=None, compare=False)
    """The tensors for the training forward of the segment's images and videos, put once per group for a prompt's."""
    constrained: bool = False
    """Whether a regular expression bounded what could be sampled, in which case the loss leaves the tokens out.

    The engine's log-probs are then those of a distribution that holds the allowed tokens alone, which the trainer does
    not compute: a ratio of the two is none of two policies, and the choice between allowed tokens was not the policy's.
    """
    weights: tuple[WeightSpan, ...] = ()
    """Which weights its tokens came of, where updates may come in between; empty where nobody has noted it."""

    def __post_init__(self) -> None:
        if self.weights:
            assert sum(span.tokens for span in self.weights) == len(
                self.token_ids
            ), "every sampled token has a version"
        if self.log_probs is not None:
            assert self.kind == "generated", f"a segment of kind {self.kind} was not sampled"
            assert len(self.log_probs) == len(self.token_ids), "every sampled token has a log-prob"
        if self.constrained:
            assert self.kind == "generated", f"a segment of kind {self.kind} was not sampled"

    @property
    def in_loss(self) -> bool:
        """Whether its tokens are loss tokens: sampled, and from the policy's own distribution."""
        return self.kind == "generated" and not self.constrained


@dataclass(frozen=True)
class PlacedRef:
    """Where the media of one segment stand in a sample, and where they are to be had."""

    start: int
    """The segment's first token in its sample, padding not counted: 0 for the prompt."""
    ref: MediaRef
    end: int | None = None
    """The token behind its last; None where nobody has said."""

    @property
    def key(self) -> Hashable:
        return self.ref.key


@dataclass(frozen=True, eq=False)
class PlacedMedia:
    """The media tensors of one segment, in the process of a model."""

    start: int
    """As that of a `PlacedRef`."""
    tensors: dict[str, torch.Tensor]
    ref_key: str | None = None
    """The key of the `MediaRef` that they came by; None for tensors that this process made itself."""
    end: int | None = None
    """As that of a `PlacedRef`."""

    @property
    def key(self) -> Hashable:
        """Samples that have it in common are shown the same media."""
        return id(self.tensors) if self.ref_key is None else self.ref_key


SampleMedia: TypeAlias = "dict[str, torch.Tensor] | tuple[PlacedMedia, ...] | None"
"""All media of a sample as a model takes them; tensors alone are the prompt's, None stands for text."""
SentMedia: TypeAlias = "tuple[PlacedRef, ...] | None"
"""All media of a sample on their way to a model; None stands for text."""


def placed(media: SampleMedia) -> tuple[PlacedMedia, ...]:
    """Return a sample's media segment by segment."""
    if isinstance(media, tuple):
        return media
    return () if media is None else (PlacedMedia(0, media),)


def media_before(media: SampleMedia | SentMedia, end: int) -> tuple[Hashable, ...]:
    """Return the keys of the media that stand before a token of a sample: samples of a group have those in common."""
    items = media if isinstance(media, tuple) else placed(media)
    return tuple(item.key for item in items if item.start < end)


EpisodeEnd = Literal["over", "turns", "images", "tokens", "failed"]
"""The environment ended it; or it would have gone on beyond its limit of turns, images or tokens; or it failed."""


class Said(NamedTuple):
    """One turn of an episode, as people are shown it."""

    role: str
    text: str
    """With the mark `<image>` in the place of each picture."""
    images: tuple[ImagePart, ...] = ()
    """The pictures of the marks, in their order; empty where they are not kept."""
    calls: tuple[CallOutcome, ...] = ()
    """What became of the calls in a turn of the policy."""
    rewards: tuple[tuple[str, float], ...] = ()
    """The parts of the reward that a turn of the policy has earned, with their names."""


@dataclass(frozen=True, kw_only=True)
class Played:
    """How an episode went in which an environment answered the policy's turns."""

    end: EpisodeEnd
    images: int
    """How many the environment has shown, beside the prompt's."""
    rewards: Mapping[str, float]
    """The named parts of the reward that the environment gave, each summed over the turns."""
    counts: Mapping[str, int]
    said: tuple[Said, ...]
    """The turns behind the prompt, the policy's and the environment's."""
    number: int = 0
    """Which of the episodes of its row it is."""
    shown: tuple[Message, ...] = ()
    """The prompt as the policy was shown it; empty where pictures are not kept."""
    pictures: ray.ObjectRef | None = field(default=None, compare=False)
    """Stands for `shown` and the pictures of `said` where they stay with the engine: see `picture_store`."""
    score: float | None = None
    """How right it was, where the environment says so beside its rewards."""
    logs: Mapping[str, float] = field(default_factory=dict)
    """What else the environment wants logged, under names that it has not stated."""

    @property
    def over_turn(self) -> bool:
        """Whether a limit ended it, and not the policy or the environment."""
        return self.end in ("turns", "images", "tokens")

    @property
    def turns(self) -> int:
        """How often the policy has spoken."""
        return sum(said.role == "assistant" for said in self.said)

    def with_images(self, change: Callable[[ImagePart], ImagePart]) -> Played:
        """Return it with each picture changed that was shown, those of the prompt too."""
        said = tuple(one._replace(images=tuple(map(change, one.images))) for one in self.said)
        return replace(self, said=said, shown=with_images(self.shown, change))


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A prompt and what became of it: one generated segment, or several turns with observations between them."""

    row: Row
    segments: tuple[Segment, ...]
    response: str
    """The text that was generated, as it is scored and shown: with what the row says that it begins with in front."""
    finish_reason: str
    """How the last generated segment ended, in vLLM's words: `stop`, or `length` where it was cut off."""
    weight_version: int
    """How many weight updates the engine had had when it began to generate the sample."""
    image_scales: tuple[tuple[float, float], ...] = ()
    """Of the prompt's images, as its `EncodedPrompt` has them."""
    reward: Score | None = None
    """What it is worth, with the named parts that are logged; None until a reward model says it."""
    played: Played | None = None
    """Of several turns with an environment; its `response` is then the last turn's."""
    masked: bool = False
    """Whether nothing is learnt from it, and its group is compared without it."""
    greedy: Sample | None = None
    """The greedy response to its prompt, which its reward is compared with and nothing is learnt from; None without one."""

    def __post_init__(self) -> None:
        kinds = [segment.kind for segment in self.segments]
        assert kinds.index("prompt") == 0, f"a sample begins with its prompt: {kinds}"
        assert kinds.count("prompt") == 1, f"a sample has one prompt: {kinds}"
        known = {segment.log_probs is not None for segment in self.generated}
        assert len(known) <= 1, "log-probs are known of all generated segments or of none"

    @property
    def generated(self) -> tuple[Segment, ...]:
        return tuple(segment for segment in self.segments if segment.kind == "generated")

    @property
    def weights(self) -> tuple[WeightSpan, ...]:
        """Which weights its generated tokens came of, as far as that is noted."""
        spans: list[WeightSpan] = []
        for span in chain.from_iterable(segment.weights for segment in self.generated):
            if spans and spans[-1].version == span.version:
                span = WeightSpan(span.version, spans.pop().tokens + span.tokens)
            spans.append(span)
        return tuple(spans)

    @property
    def token_ids(self) -> list[int]:
        """All tokens, prompt included, (T,)."""
        return list(chain.from_iterable(segment.token_ids for segment in self.segments))

    @property
    def loss_mask(self) -> list[bool]:
        """Which tokens the policy generated as it liked, (T,): those that the loss is about."""
        return [segment.in_loss for segment in self.segments for _ in segment.token_ids]

    @property
    def action_ranges(self) -> list[tuple[int, int]]:
        """First token and the one behind the last of each generated segment."""
        bounds = pairwise(accumulate((len(segment.token_ids) for segment in self.segments), initial=0))
        return [span for span, segment in zip(bounds, self.segments, strict=True) if segment.kind == "generated"]

    @property
    def log_probs(self) -> list[float] | None:
        """The engine's log-prob of each loss token, (T,), 0 for all others; None where it gave none."""
        if any(segment.log_probs is None for segment in self.generated):
            return None
        known = (segment.log_probs if segment.in_loss else None for segment in self.segments)
        pairs = zip(self.segments, known, strict=True)
        return list(chain.from_iterable(given or (0.0,) * len(segment.token_ids) for segment, given in pairs))

    @property
    def media(self) -> tuple[PlacedRef, ...]:
        """The media of the segments that have some, in the order in which the model reads them."""
        spans = pairwise(accumulate((len(segment.token_ids) for segment in self.segments), initial=0))
        places = zip(spans, self.segments, strict=True)
        return tuple(
            PlacedRef(start, segment.media, end=end) for (start, end), segment in places if segment.media is not None
        )

    @property
    def generated_tokens(self) -> int:
        """How many tokens the policy generated, end tokens included."""
        return sum(len(segment.token_ids) for segment in self.generated)

    @property
    def truncated(self) -> bool:
        """Whether generation was cut off at its limit."""
        return self.finish_reason == "length"

    @property
    def prompt(self) -> str:
        """The prompt's messages as JSON, as OpenRLHF and reward functions take a prompt."""
        return to_json(self.row.messages)

    @property
    def scored(self) -> Score:
        """Its reward, where it must have one by now."""
        assert self.reward is not None, f"{self.row.location}: a sample has no reward"
        return self.reward

    @property
    def label(self) -> str:
        return self.row.answer
