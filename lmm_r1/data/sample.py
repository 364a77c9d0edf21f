"""Samples: a trajectory for training or a response outside of training, and the common prefixes of samples as a tree."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias

import numpy as np

from lmm_r1.data.messages import ImagePart, Message, Row, to_json, with_images
from remote_rm.verifier import Score

if TYPE_CHECKING:
    import ray
    import torch


CallEnd = Literal["done", "malformed", "failed"]
"""It was carried out; the policy had not written it correctly; or the tool failed."""


@dataclass(frozen=True, kw_only=True)
class CallOutcome:
    """The outcome of one tool call."""

    tool: str
    """Its name; empty if the call names no existing tool."""
    outcome: CallEnd
    problem: str = ""
    """What went wrong, in the words shown to the policy; empty if nothing did."""


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Where a picture was cut out of an earlier picture of its episode."""

    picture: int
    """Index of the earlier picture: first those of the prompt, then those shown by tools, in order."""
    name: str
    """The policy's name for it: `original_image`, `observation_1`."""
    box: tuple[int, int, int, int]
    """Left, upper, right and lower edge in pixels of its full resolution; right and lower are exclusive."""
    size: tuple[int, int]
    """Its width and height in full resolution."""
    keypoint: tuple[float, float] | None = None
    """x and y of the requested point in the same pixels; None if a box was requested."""


@dataclass(frozen=True)
class CutImage(ImagePart):
    """A picture that was cut out of another one."""

    _: KW_ONLY
    cut: Cut


FinishReason = Literal["stop", "length", "aborted"]
"""The model ended it, it reached its limit, or the user stopped it."""
WHOLE: Final = ("stop", "length")
"""The finish reasons of a complete response."""


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One response outside of training."""

    text: str
    """Without the end token."""
    num_tokens: int | None
    """Including the end token; None if unknown, as for many servers."""
    finish_reason: FinishReason
    image_scales: tuple[tuple[float, float], ...] = ()
    """Of the prompt's images, as in its `EncodedPrompt`; empty if the prompt was not encoded here."""
    played: EpisodeResult | None = None
    """For an episode: `text` is then that of the last turn, and `num_tokens` counts all turns of the model."""


@dataclass(frozen=True, kw_only=True)
class MediaRef:
    """A reference to media tensors that the engine has stored; only the reference passes through the driver."""

    key: str
    """Unique per media of a run: samples with the same key show the same media."""
    stored: ray.ObjectRef
    """In Ray's object store, which frees the tensors when no process holds the reference."""
    nbytes: int
    """Their size in the store."""


class WeightSpan(NamedTuple):
    """Consecutive tokens sampled with the same weights."""

    version: int
    """How many weight updates had preceded."""
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Consecutive tokens of a sample that come from one side."""

    kind: Literal["prompt", "generated", "observation"]
    """`prompt` begins the sample, `generated` is the policy's, `observation` is the environment's reply."""
    token_ids: tuple[int, ...]
    """Images and videos are expanded to their full runs of placeholder tokens, as in training."""
    log_probs: tuple[float, ...] | None = None
    """The engine's log-prob of each generated token; None if not requested."""
    media: MediaRef | None = field(default=None, compare=False)
    """The tensors of the segment's images and videos for training; a prompt's are stored once per group."""
    weights: tuple[WeightSpan, ...] = ()
    """Which weights its tokens were sampled with, if updates can happen in between; empty if not recorded."""

    def __post_init__(self) -> None:
        if self.weights:
            known = sum(span.tokens for span in self.weights)
            assert known == len(self.token_ids), "every sampled token has a version"
        if self.log_probs is not None:
            assert self.kind == "generated", f"a segment of kind {self.kind} was not sampled"
            assert len(self.log_probs) == len(self.token_ids), "every sampled token has a log-prob"


@dataclass(frozen=True)
class PlacedRef:
    """The position of one segment's media in a sample, and their reference."""

    start: int
    """Index of the segment's first token in its sample, without padding: 0 for the prompt."""
    ref: MediaRef
    end: int | None = None
    """Index after its last token; None if unknown."""

    @property
    def key(self) -> Hashable:
        return self.ref.key


@dataclass(frozen=True, eq=False)
class PlacedMedia:
    """The media tensors of one segment, in the process of a model."""

    start: int
    """As in `PlacedRef`."""
    tensors: dict[str, torch.Tensor]
    ref_key: str | None = None
    """The key of the `MediaRef` that they were loaded from; None for tensors made in this process."""
    end: int | None = None
    """As in `PlacedRef`."""

    @property
    def key(self) -> Hashable:
        """Samples with the same key show the same media."""
        return id(self.tensors) if self.ref_key is None else self.ref_key


SampleMedia: TypeAlias = "dict[str, torch.Tensor] | tuple[PlacedMedia, ...] | None"
"""All media of a sample as a model takes them; plain tensors are the prompt's, None is for text only."""
SentMedia: TypeAlias = "tuple[PlacedRef, ...] | None"
"""All media of a sample on their way to a model; None is for text only."""


def placed(media: SampleMedia) -> tuple[PlacedMedia, ...]:
    """Return a sample's media per segment."""
    if isinstance(media, tuple):
        return media
    return () if media is None else (PlacedMedia(0, media),)


EpisodeEnd = Literal["over", "turns", "images", "tokens", "failed"]
"""The environment ended it; it reached its limit of turns, images or tokens; or the environment failed."""


class Said(NamedTuple):
    """One turn of an episode, for display."""

    role: str
    text: str
    """With the mark `<image>` for each picture."""
    images: tuple[ImagePart, ...] = ()
    """The pictures of the marks, in order; empty if pictures are not kept."""
    calls: tuple[CallOutcome, ...] = ()
    """The outcomes of the tool calls in a turn of the policy."""
    rewards: tuple[tuple[str, float], ...] = ()
    """The named parts of the reward that a turn of the policy earned."""


@dataclass(frozen=True, kw_only=True)
class EpisodeResult:
    """How an episode with an environment went."""

    end: EpisodeEnd
    images: int
    """How many images the environment has shown, not counting the prompt's."""
    rewards: Mapping[str, float]
    """The named parts of the environment's reward, each summed over the turns."""
    counts: Mapping[str, int]
    said: tuple[Said, ...]
    """The turns after the prompt, the policy's and the environment's."""
    number: int = 0
    """The episode's index among those of its row."""
    shown: tuple[Message, ...] = ()
    """The prompt as shown to the policy; empty if pictures are not kept."""
    pictures: ray.ObjectRef | None = field(default=None, compare=False)
    """`shown` and the pictures of `said`, if they stay with the engine: see `picture_store`."""
    score: float | None = None
    """How correct it was, if the environment reports that in addition to its rewards."""
    logs: Mapping[str, float] = field(default_factory=dict)
    """Other values to log, under names that the environment has not declared."""
    problem: str = ""
    """How the environment failed, as a clause; empty if it has not."""

    @property
    def over_turn(self) -> bool:
        """Whether a limit ended it, instead of the policy or the environment."""
        return self.end in ("turns", "images", "tokens")

    @property
    def turns(self) -> int:
        """The number of turns of the policy."""
        return sum(said.role == "assistant" for said in self.said)

    def with_images(self, change: Callable[[ImagePart], ImagePart]) -> EpisodeResult:
        """Return the episode with each shown picture changed, including those of the prompt."""
        said = tuple(one._replace(images=tuple(map(change, one.images))) for one in self.said)
        return replace(self, said=said, shown=with_images(self.shown, change))


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A prompt with one generated segment, or with several turns and observations between them."""

    row: Row
    segments: tuple[Segment, ...]
    response: str
    """The generated text as it is scored and shown: it begins with the row's prefill."""
    finish_reason: str
    """How the last generated segment ended, in vLLM's words: `stop`, or `length` if it was cut off."""
    weight_version: int
    """The number of weight updates before the engine began to generate the sample."""
    image_scales: tuple[tuple[float, float], ...] = ()
    """Of the prompt's images, as in its `EncodedPrompt`."""
    reward: Score | None = None
    """With the named parts that are logged; None until it has been scored."""
    played: EpisodeResult | None = None
    """For several turns with an environment; `response` is then that of the last turn."""
    masked: bool = False
    """Whether it is left out of the loss and of the comparison within its group."""
    greedy: Sample | None = None
    """The greedy response to its prompt, a baseline for its reward that is not trained on; None without one."""

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
        """Which weights its generated tokens were sampled with, as far as recorded."""
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
        """Which tokens are in the loss, (T,)."""
        return [segment.kind == "generated" for segment in self.segments for _ in segment.token_ids]

    @property
    def action_ranges(self) -> list[tuple[int, int]]:
        """The first token of each generated segment, and the index after its last one."""
        bounds = pairwise(accumulate((len(segment.token_ids) for segment in self.segments), initial=0))
        return [span for span, segment in zip(bounds, self.segments, strict=True) if segment.kind == "generated"]

    @property
    def log_probs(self) -> list[float] | None:
        """The engine's log-prob of each loss token, (T,), 0 for all others; None if it returned none."""
        if any(segment.log_probs is None for segment in self.generated):
            return None
        return list(chain.from_iterable(part.log_probs or (0.0,) * len(part.token_ids) for part in self.segments))

    @property
    def media(self) -> tuple[PlacedRef, ...]:
        """The media of all segments that have some, in the order in which the model reads them."""
        spans = pairwise(accumulate((len(segment.token_ids) for segment in self.segments), initial=0))
        places = zip(spans, self.segments, strict=True)
        return tuple(
            PlacedRef(start, segment.media, end=end) for (start, end), segment in places if segment.media is not None
        )

    @property
    def generated_tokens(self) -> int:
        """The number of tokens that the policy generated, end tokens included."""
        return sum(len(segment.token_ids) for segment in self.generated)

    @property
    def truncated(self) -> bool:
        """Whether generation was cut off at its limit."""
        return self.finish_reason == "length"

    @property
    def prompt(self) -> str:
        """The prompt's messages as JSON, for OpenRLHF and reward functions."""
        return to_json(self.row.messages)

    @property
    def scored(self) -> Score:
        """The reward, which must be known."""
        assert self.reward is not None, f"{self.row.location}: a sample has no reward"
        return self.reward

    @property
    def label(self) -> str:
        return self.row.answer


# The fewest tokens for which a prefix shared by only some samples becomes a node: the keys of all tokens before a node
# are copied once more for it. Shorter prefixes stay with each sample.
LEAST_SHARED = 16


@dataclass(frozen=True, kw_only=True)
class TreeSample:
    """The tokens of a sample, and its media with their positions."""

    token_ids: np.ndarray
    """Without padding, (L,)."""
    media: Sequence[PlacedRef | PlacedMedia] = ()


@dataclass(frozen=True, kw_only=True)
class PrefixNode:
    """Tokens `start` to `end`, which are the same in all `samples` of the node, as are all tokens before them."""

    start: int
    end: int
    parent: int | None
    """Index of the node whose tokens come before `start`; None for a root."""
    samples: tuple[int, ...]

    @property
    def length(self) -> int:
        return self.end - self.start


def prefix_tree(samples: Sequence[TreeSample], *, known: int) -> tuple[PrefixNode, ...]:
    """Return the nodes of a tree in pre-order: each comes after its parent, followed by its own children.

    The first node holds the prefix of all samples. Media are shared with their whole segment or not at all: no node ends
    within a segment with media.

    Args:
        known: the number of tokens at the start that are known to be equal, with their media.
    """
    grown = _Tree(_comparable(samples, known=known), known=known)
    grown.grow(tuple(range(len(samples))), start=0, parent=None)
    return tuple(grown.nodes)


def _comparable(samples: Sequence[TreeSample], *, known: int) -> list[np.ndarray]:
    """Return each sample's tokens after the first `known`, (L - known,); a segment with media has one number per content."""
    numbers: dict[Hashable, int] = {}
    rows = []
    for sample in samples:
        row = sample.token_ids.astype(np.int64)
        items = [item for item in sample.media if item.start >= known]
        # A segment without a known end may reach up to the next one.
        ends = [*(item.start for item in items[1:]), len(row)]
        for item, latest in zip(items, ends, strict=False):
            end = latest if item.end is None else item.end
            content = (item.key, sample.token_ids[item.start : end].tobytes())
            row[item.start : end] = -1 - numbers.setdefault(content, len(numbers))
        rows.append(row[known:])
    return rows


class _Tree:

    def __init__(self, rows: Sequence[np.ndarray], *, known: int) -> None:
        self.rows = rows
        self.known = known
        self.nodes: list[PrefixNode] = []

    def grow(self, members: tuple[int, ...], *, start: int, parent: int | None) -> None:
        """Add a node for the common prefix from `start` on, if it is long enough, and the nodes below it."""
        end = self.known + common_length([self.rows[member] for member in members])
        ended = [member for member in members if self._length(member) == end]
        is_worth_it = parent is None or len(ended) == len(members) or end - start >= LEAST_SHARED
        if end > start and is_worth_it:
            self.nodes.append(PrefixNode(start=start, end=end, parent=parent, samples=members))
            start, parent = end, len(self.nodes) - 1
        parts: dict[int | None, list[int]] = {}
        for member in members:
            if self._length(member) > end:
                parts.setdefault(int(self.rows[member][end - self.known]), []).append(member)
            elif start < end:
                # A sample that ends with a run too short for a node keeps the run to itself.
                parts.setdefault(None, []).append(member)
        for part in parts.values():
            self.grow(tuple(part), start=start, parent=parent)

    def _length(self, member: int) -> int:
        return self.known + len(self.rows[member])


def common_length(rows: Sequence[np.ndarray]) -> int:
    """Return the length of the common prefix of all rows."""
    first, length = rows[0], min(map(len, rows))
    for row in rows[1:]:
        different = np.flatnonzero(first[:length] != row[:length])
        if len(different):
            length = int(different[0])
    return length
