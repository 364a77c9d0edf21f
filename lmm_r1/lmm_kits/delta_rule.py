"""The gated delta rule (https://arxiv.org/abs/2412.06464) and its short convolution, over trees of segments.

Transformers and vLLM compute one sequence at a time on CPUs. Here the chunks of all segments are computed together, and
each segment starts from the state at the end of its prefix.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch.nn.functional import pad
from transformers import PretrainedConfig

LINEAR_LAYER = "linear_attention"
"""What the configs of transformers call a layer with this rule in `layer_types`."""
REPLACED_FUNCTIONS = ("causal_conv1d_fn", "torch_chunk_gated_delta_rule")
"""What layers with this rule call in their module of transformers: the convolution and the rule.

`models.packed.attention` replaces both, because transformers passes the state of a packed sample on to the next.
"""
PACKED_MODULES = (
    "transformers.models.qwen3_5.modeling_qwen3_5",
    "transformers.models.qwen3_5_moe.modeling_qwen3_5_moe",
    "transformers.models.qwen3_next.modeling_qwen3_next",
)
"""The modules whose models take packed sequences (tests/contracts/test_kit_linear_layers.py); no other one is tested."""
CHUNK = 32
"""Tokens of a chunk, within which the rule is a few products of matrices. On CPUs, 16 and 64 were slower."""
_NORM_EPSILON = 1e-6


def linear_layers(text: PretrainedConfig) -> int:
    """Return how many layers of a language model keep a state instead of keys and values."""
    return list(getattr(text, "layer_types", None) or ()).count(LINEAR_LAYER)


def state_numbers(text: PretrainedConfig) -> int:
    """Return how many numbers the linear layers of a language model keep of a sequence, however long it is."""
    layers = linear_layers(text)
    if not layers:
        return 0
    keys, values = text.linear_num_key_heads, text.linear_num_value_heads
    matrices = values * text.linear_key_head_dim * text.linear_value_head_dim
    channels = 2 * keys * text.linear_key_head_dim + values * text.linear_value_head_dim
    return layers * (matrices + (text.linear_conv_kernel_dim - 1) * channels)


@dataclass(frozen=True, kw_only=True, eq=False)
class SegmentTree:
    """Segments of a sequence of T tokens, in order and without gaps; each follows a prefix or nothing."""

    lengths: tuple[int, ...]
    prefixes: tuple[int | None, ...]
    """The index of the earlier segment that a segment follows; None for the first one of a sequence."""
    device: torch.device

    @property
    def length(self) -> int:
        return sum(self.lengths)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        ends = torch.tensor((0, *self.lengths)).cumsum(0).tolist()
        return tuple(ends[:-1])

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """How many segments each one's prefix consists of."""
        depths: list[int] = []
        for prefix in self.prefixes:
            depths.append(0 if prefix is None else depths[prefix] + 1)
        return tuple(depths)

    def last_tokens(self, segment: int | None, count: int) -> list[int]:
        """Return the last tokens of a segment with its prefix, `count` at most, in order."""
        tokens: list[int] = []
        while segment is not None and len(tokens) < count:
            start, end = self.starts[segment], self.starts[segment] + self.lengths[segment]
            tokens = [*range(max(start, end - count + len(tokens)), end), *tokens]
            segment = self.prefixes[segment]
        return tokens

    @cached_property
    def chunks(self) -> ChunkTree:
        return ChunkTree.of(self, size=CHUNK)


@dataclass(frozen=True, kw_only=True, eq=False)
class ChunkTree:
    """The C chunks of all segments, those that follow the fewest others first."""

    tokens: torch.Tensor
    """The token at each place of each chunk, (C, size); T at places that the chunk's segment does not fill."""
    places: torch.Tensor
    """Where each token is among the C * size places, (T,)."""
    levels: tuple[ChunkLevel, ...]
    last: torch.Tensor
    """The last chunk of each segment, (S,)."""

    @classmethod
    def of(cls, tree: SegmentTree, *, size: int) -> ChunkTree:
        levels: list[list[tuple[int, int]]] = []  # of chunks: their segment, and their number within it
        ends: list[tuple[int, int]] = []  # of segments: the level and the number of the last chunk
        for segment, (length, prefix) in enumerate(zip(tree.lengths, tree.prefixes, strict=True)):
            first, count = 0 if prefix is None else ends[prefix][0] + 1, max(1, -(-length // size))
            levels += [[] for _ in range(first + count - len(levels))]
            for number in range(count):
                levels[first + number].append((segment, number))
            ends.append((first + count - 1, count - 1))
        order = {chunk: place for place, chunk in enumerate(chunk for level in levels for chunk in level)}
        starts = torch.tensor([tree.starts[segment] + number * size for segment, number in order])
        stops = torch.tensor([tree.starts[segment] + tree.lengths[segment] for segment, _ in order])
        tokens = starts[:, None] + torch.arange(size)
        tokens = torch.where(tokens < stops[:, None], tokens, tree.length)
        places = torch.empty(tree.length, dtype=torch.long)
        filled = tokens.flatten() < tree.length
        places[tokens.flatten()[filled]] = filled.nonzero().flatten()
        made, start, before = [], 0, 0
        for level in levels:
            parents = []
            for segment, number in level:
                prefix = tree.prefixes[segment]
                parent = (segment, number - 1) if number else None if prefix is None else (prefix, ends[prefix][1])
                # It is in the level before.
                parents.append(-1 if parent is None else order[parent] - before)
            chunks = slice(start, start + len(level))
            made.append(ChunkLevel(chunks=chunks, parents=torch.tensor(parents, device=tree.device)))
            start, before = chunks.stop, start
        last = [order[segment, number] for segment, (_, number) in enumerate(ends)]
        return cls(
            tokens=tokens.to(tree.device),
            places=places.to(tree.device),
            levels=tuple(made),
            last=torch.tensor(last, device=tree.device),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class ChunkLevel:
    """Chunks that follow as many others."""

    chunks: slice
    parents: torch.Tensor
    """The place within the level before of the chunk that each one follows, (n,); -1 for the first of a sequence."""


def gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    tree: SegmentTree,
    *,
    initial: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs (T, H, V) of T tokens, and the states (S, H, K, V) at the ends of the segments.

    Queries and keys are normalised here. States and all sums are in single precision at least.

    Args:
        query, key: (T, H, K).
        value: (T, H, V).
        decay: logarithms of the share of the state that each token keeps, (T, H).
        beta: how much of a key's old value is replaced, (T, H).
        initial: the states before segments without a prefix, in their order, (R, H, K, V); zeros by default.
    """
    chunks, wide = tree.chunks, torch.promote_types(value.dtype, torch.float32)
    query, key, value, beta = (
        _in_chunks(tensor.to(wide), chunks) for tensor in (query, key, value, beta.unsqueeze(-1))
    )  # (C, H, size, D)
    decay = _in_chunks(decay.to(wide).unsqueeze(-1), chunks).squeeze(-1).cumsum(-1)  # (C, H, size)
    query, key = _normalised(query) * query.shape[-1] ** -0.5, _normalised(key)
    between = (decay.unsqueeze(-1) - decay.unsqueeze(-2)).tril().exp().tril()
    kept = decay.exp().unsqueeze(-1)
    # What the tokens of a chunk overwrite of one another, solved for all of them at once.
    mixing = (((key * beta) @ key.transpose(-1, -2)) * between).tril(-1)
    mixed = torch.linalg.solve_triangular(
        mixing, torch.cat([value * beta, key * beta * kept], dim=-1), upper=False, unitriangular=True
    )
    new, read = mixed.split([value.shape[-1], key.shape[-1]], dim=-1)
    attended = (query @ key.transpose(-1, -2)) * between
    asked = query * kept
    written = (key * (decay[..., -1:] - decay).exp().unsqueeze(-1)).transpose(-1, -2)
    outputs, states = _through_levels(chunks, new, read, attended, asked, written, kept[:, :, -1:], initial)
    places = outputs.transpose(1, 2).flatten(0, 1)  # (C * size, H, V)
    return places.index_select(0, chunks.places), states.index_select(0, chunks.last)


def _through_levels(
    chunks: ChunkTree,
    new: torch.Tensor,
    read: torch.Tensor,
    attended: torch.Tensor,
    asked: torch.Tensor,
    written: torch.Tensor,
    kept: torch.Tensor,
    initial: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs (C, H, size, V) of all chunks, and the states (C, H, K, V) after them."""
    sizes = [level.chunks.stop - level.chunks.start for level in chunks.levels]
    parts = zip(*(tensor.split(sizes) for tensor in (new, read, attended, asked, written, kept)), strict=True)
    outputs, states = [], []
    state = new.new_zeros(0, new.shape[1], read.shape[-1], new.shape[-1])
    first = 0
    for level, (new_, read_, attended_, asked_, written_, kept_) in zip(chunks.levels, parts, strict=True):
        roots = int((level.parents < 0).sum())
        begun = state.new_zeros(roots, *state.shape[1:]) if initial is None else initial[first : first + roots].to(new)
        first += roots
        # The states of first chunks follow those of the level before, in their order.
        above = level.parents.clone()
        above[level.parents < 0] = torch.arange(len(state), len(state) + roots, device=above.device)
        state = torch.cat([state, begun]).index_select(0, above)
        values = new_ - read_ @ state
        outputs.append(asked_ @ state + attended_ @ values)
        state = state * kept_ + written_ @ values
        states.append(state)
    return torch.cat(outputs), torch.cat(states)


def _in_chunks(tensor: torch.Tensor, chunks: ChunkTree) -> torch.Tensor:
    """Return (C, H, size, D) for (T, H, D), zeros where a chunk has no token."""
    padded = pad(tensor, (0, 0, 0, 0, 0, 1))
    return padded.index_select(0, chunks.tokens.flatten()).unflatten(0, chunks.tokens.shape).transpose(1, 2)


def _normalised(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * torch.rsqrt((tensor * tensor).sum(-1, keepdim=True) + _NORM_EPSILON)


@dataclass(frozen=True, kw_only=True, eq=False)
class Borders:
    """The B first tokens of segments, whose convolution takes inputs of the prefix or nothing."""

    tokens: torch.Tensor  # (B,)
    inputs: torch.Tensor
    """The tokens that each convolution takes, its own last, (B, W); T if there is no token."""

    @classmethod
    def of(cls, tree: SegmentTree, *, width: int) -> Borders:
        tokens, inputs = [], []
        for segment, (start, length, prefix) in enumerate(zip(tree.starts, tree.lengths, tree.prefixes, strict=True)):
            if segment == 0:
                # Before the first one there is nothing anyway.
                continue
            before = tree.last_tokens(prefix, width - 1)
            before = [tree.length] * (width - 1 - len(before)) + before
            for place in range(min(length, width - 1)):
                tokens.append(start + place)
                inputs.append([*before, *range(start, start + place + 1)][-width:])
        return cls(
            tokens=torch.tensor(tokens, dtype=torch.long, device=tree.device),
            inputs=torch.tensor(inputs, dtype=torch.long, device=tree.device).view(-1, width),
        )


def convolved_at_borders(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, borders: Borders
) -> torch.Tensor:
    """Return a causal convolution over each channel, without activation, at the borders, (B, D).

    Args:
        inputs: (T, D).
        weight: (D, W).
    """
    wide = torch.promote_types(inputs.dtype, torch.float32)
    # What a prefix's last tokens get from many segments is summed in single precision.
    taken = pad(inputs, (0, 0, 0, 1)).to(wide).index_select(0, borders.inputs.flatten())
    convolved = (taken.unflatten(0, borders.inputs.shape) * weight.to(wide).t()).sum(1)
    return convolved if bias is None else convolved + bias.to(wide)


def one_token_each(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs (N, H, V) and states (N, H, K, V) of N sequences after a further token.

    The arguments are those of `gated_delta_rule`, with the states (N, H, K, V) before.
    """
    wide = states.dtype
    query, key = _normalised(query.to(wide)) * query.shape[-1] ** -0.5, _normalised(key.to(wide))
    states = states * decay.to(wide).exp()[..., None, None]
    known = (key.unsqueeze(-2) @ states).squeeze(-2)
    change = (value.to(wide) - known) * beta.to(wide).unsqueeze(-1)
    states = states + key.unsqueeze(-1) * change.unsqueeze(-2)
    return (query.unsqueeze(-2) @ states).squeeze(-2), states
