"""Vision towers: how they compute, and the features of images, which each model with an unchanged tower computes once.

Convolutions over patches are products; windows of attention go through one kernel. Features are found by the tower's
input pixels, so an image that is changed or cropped differently has other features.
"""

from __future__ import annotations

import inspect
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import groupby
from typing import Any, TypeAlias

import torch
from torch.nn.functional import linear
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from lmm_r1.lmm_kits import LmmKit
from lmm_r1.lmm_kits.features import FeaturePoint, Item, Parts
from lmm_r1.models.packed.layout import Stretches, kernel_for


class _PatchProduct(torch.nn.Conv3d):
    """A convolution that takes its kernel's size as a whole; five times as fast on a CPU as PyTorch's own."""

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        if tuple(patches.shape[2:]) != self.kernel_size:
            return super().forward(patches)
        products = linear(patches.flatten(1), self.weight.flatten(1), self.bias)
        return products[:, :, None, None, None]


def multiply_patches(model: torch.nn.Module) -> None:
    """Let a model's three-dimensional convolutions multiply patches of their kernel's size; weights keep their names."""
    for module in model.modules():
        plain = type(module) is torch.nn.Conv3d and module.groups == 1
        if plain and module.padding == (0, 0, 0) and module.dilation == (1, 1, 1):
            module.__class__ = _PatchProduct


# An attention with "flash" in its name gets all windows of a layer at once, with their borders; one without gets them
# one by one.
WINDOW_ATTENTION = "lmm_flash_windows"


def join_windows(model: PreTrainedModel, kit: LmmKit) -> None:
    """Let the vision tower of a loaded model attend within all of a layer's windows in as few calls as there can be.

    Only in the place of SDPA, which would be called for each window; an implementation that the user chose stays.
    """
    tower: Any = model.get_submodule(kit.windowed_tower) if kit.windowed_tower else None
    if tower is None or tower.config._attn_implementation != "sdpa":
        return
    parts = {key: config for key in model.config.sub_configs if (config := getattr(model.config, key)) is not None}
    model.set_attn_implementation(
        {
            key: WINDOW_ATTENTION if config is tower.config else config._attn_implementation
            for key, config in parts.items()
        }
    )
    assert tower.config._attn_implementation == WINDOW_ATTENTION, "a part of the model's config"


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Return the outputs (1, P, H, D) of queries (1, H, P, D) over keys and values of P patches, as transformers asks.

    Args:
        cu_seq_lens_q, cu_seq_lens_k: where the windows end, from 0 on, (W + 1,); queries and keys have the same.
    """
    settings = {"dropout": dropout, "scaling": scaling, **kwargs}
    if cu_seq_lens_q is None or cu_seq_lens_k is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **settings)
    assert attention_mask is None, "windows are all that keeps patches apart"
    kernel = kernel_for(query, value, dropout=dropout)
    if kernel is not None and max_length_q is not None and max_length_k is not None:
        stretches = Stretches(
            query_ends=cu_seq_lens_q.to(query.device, torch.int32),
            key_ends=cu_seq_lens_k.to(query.device, torch.int32),
            longest_query=max_length_q,
            longest_key=max_length_k,
        )
        queries, keys, values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))  # (P, H, D)
        output = kernel.attend(queries, keys, values, stretches, causal=False, window=None, scaling=scaling)
        return output[None], None
    runs = [(length, len(list(alike))) for length, alike in groupby(cu_seq_lens_q.diff().tolist())]
    parts = zip(*(_batches(tensor, runs) for tensor in (query, key, value)), strict=True)
    outputs = [sdpa_attention_forward(module, *part, None, **settings)[0].flatten(0, 1) for part in parts]
    return torch.cat(outputs)[None], None


def _batches(tensor: torch.Tensor, runs: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
    """Return a tensor (1, H, P, D) as a batch (W, H, L, D) for each run of W consecutive windows of L patches."""
    parts = tensor[0].split([length * count for length, count in runs], dim=1)
    return [
        part.unflatten(1, (count, length)).transpose(0, 1) for part, (length, count) in zip(parts, runs, strict=True)
    ]


AttentionInterface.register(WINDOW_ATTENTION, _attention)


GIB = 2**30
Key: TypeAlias = tuple[object, ...]

logger = logging.getLogger(__name__)


class FeatureStore:
    """Features in host memory; the oldest are dropped first."""

    def __init__(self, limit: int) -> None:
        """Args: limit: in bytes."""
        self.limit = limit
        self.nbytes = 0
        self._entries: OrderedDict[Key, Parts] = OrderedDict()

    def find(self, key: Key, *, device: torch.device) -> Parts | None:
        """Return the features under a key."""
        parts = self._entries.get(key)
        return None if parts is None else tuple(part.to(device) for part in parts)

    def keep(self, key: Key, parts: Parts) -> None:
        """Keep copies of features under a new key, unless they are larger than the limit."""
        size = sum(part.nbytes for part in parts)
        if size > self.limit:
            return
        while self.nbytes + size > self.limit:
            _, oldest = self._entries.popitem(last=False)
            self.nbytes -= sum(part.nbytes for part in oldest)
        self._entries[key] = tuple(part.to("cpu", copy=True) for part in parts)
        self.nbytes += size

    def clear(self) -> None:
        self._entries.clear()
        self.nbytes = 0


# Words of 16 bits are summed in lines of this many, each multiplied by a random number of 64 bits for its place. The sums
# are again split into words and summed, until one line is left.
LINE = 4096
ROUNDS = 5
# Lines at a time: a word of 16 bits takes 64 while it is multiplied.
CHUNK = 1024


def fingerprints(tensors: Iterable[torch.Tensor]) -> list[tuple[int, int]]:
    """Return a hash of each tensor's bits, which ignores shape and type.

    Different contents have the same hash with a probability below 2 ** -80 (multilinear hashing,
    https://arxiv.org/abs/1202.4961). All tensors take one synchronization with the GPU.
    """
    found = [_hashes(tensor) for tensor in tensors]
    return [(one, other) for one, other in torch.stack(found).tolist()] if found else []


def _hashes(tensor: torch.Tensor) -> torch.Tensor:
    words = _words(tensor)
    for numbers in _numbers(str(tensor.device)):
        lines = torch.nn.functional.pad(words, (0, -len(words) % LINE)).view(-1, LINE)
        # Both sums of each line, (lines, 2); they wrap around at 64 bits.
        sums = torch.cat(
            [torch.stack([(chunk.long() * row).sum(1) for row in numbers], 1) for chunk in lines.split(CHUNK)]
        )
        if len(sums) == 1:
            return sums[0]
        words = _words(sums)
    raise AssertionError("no tensor has so many lines")


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bits as integers of 16 bits, (W,)."""
    flat = tensor.detach().contiguous().flatten()
    if not flat.numel():
        flat = flat.new_zeros(1)
    return flat.to(torch.int16) if flat.element_size() == 1 else flat.view(torch.int16)


@cache
def _numbers(device: str) -> torch.Tensor:
    """Return the random numbers of each round and hash, (ROUNDS, 2, LINE)."""
    generator = torch.Generator().manual_seed(0x1F3A)
    numbers = torch.randint(-(2**63), 2**63 - 1, (ROUNDS, 2, LINE), dtype=torch.int64, generator=generator)
    return numbers.to(device)


def settings_of_chance(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, str, float]]:
    """Yield the dropout and noise settings of a model: the module's name, the module, the attribute and its value."""
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            is_dropout = attribute == "p" and "Dropout" in type(module).__name__
            named = is_dropout or any(word in attribute for word in ("drop", "jitter", "noise"))
            if isinstance(value, float) and named:
                yield name, module, attribute, value


@dataclass(frozen=True, kw_only=True)
class FeatureCounts:
    """How often a model's passes needed features, and how many bytes of them are kept."""

    needed: int = 0
    """Images, crops and videos, counted once per pass."""
    computed: int = 0
    """How many of them went through the tower."""
    kept_bytes: int = 0

    @classmethod
    def total(cls, counts: Sequence[FeatureCounts]) -> FeatureCounts:
        return cls(
            needed=sum(one.needed for one in counts),
            computed=sum(one.computed for one in counts),
            kept_bytes=sum(one.kept_bytes for one in counts),
        )

    def metrics(self, role: str) -> dict[str, float]:
        """Return the logged metrics; none for a model without images."""
        if not self.needed:
            return {}
        return {
            f"image_cache/{role}_found": 1 - self.computed / self.needed,
            f"image_cache/{role}_gib": self.kept_bytes / GIB,
        }


class KeptFeatures:
    """Replaces the method at a model's feature point, and calls it only for new items.

    With ZeRO-3 it calls the method in every pass, if need be with the smallest item. The ranks gather a layer's weights
    together, so those with new images would wait for a rank that computes nothing.
    """

    def __init__(self, model: PreTrainedModel, point: FeaturePoint, *, limit: int) -> None:
        """Args: limit: in bytes."""
        self.point = point
        self.store = FeatureStore(limit)
        self.counts = FeatureCounts()
        self._owner = model.get_submodule(point.owner)
        self._paused = False
        self._original: Callable[..., Any] = getattr(self._owner, point.method)
        self._signature = inspect.signature(self._original)
        setattr(self._owner, point.method, self._call)

    @cached_property
    def _sharded(self) -> bool:
        """Whether ZeRO-3 has sharded the weights; known in the first pass."""
        return any(hasattr(value, "ds_tensor") for value in self._owner.parameters())

    def forget(self) -> None:
        """Drop all features, because other weights may have been loaded."""
        self.store.clear()

    def take_counts(self) -> FeatureCounts:
        """Return the counts since the last call."""
        counts, self.counts = self.counts, FeatureCounts()
        return replace(counts, kept_bytes=self.store.nbytes)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Compute all features within the block, and keep none."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        if self._paused:
            return self._original(*args, **kwargs)
        arguments = _named(self._signature, args, kwargs)
        with torch.no_grad():
            return self._features(arguments)

    def _features(self, arguments: Mapping[str, Any]) -> Any:
        point = self.point
        items = point.items(arguments)
        assert items, "a pass without images has none of the arguments"
        keys = self._keys(items, arguments)
        device = items[0][point.pixels].device
        ready = {key: parts for key in set(keys) if (parts := self.store.find(key, device=device)) is not None}
        new = {key: item for key, item in zip(keys, items, strict=True) if key not in ready}
        self.counts = replace(
            self.counts, needed=self.counts.needed + len(items), computed=self.counts.computed + len(new)
        )
        if new:
            computed = self._run(list(new.values()), arguments)
            for key, parts in zip(new, computed, strict=True):
                self.store.keep(key, parts)
                ready[key] = parts
        elif self._sharded:
            self._run([point.smallest(self._owner, items)], arguments)
        columns = zip(*(ready[key] for key in keys), strict=True)
        return point.give(tuple(torch.cat(column) for column in columns))

    def _run(self, items: Sequence[Item], arguments: Mapping[str, Any]) -> list[Parts]:
        output = self._original(**{**arguments, **self.point.joined(items)})
        rows = [self.point.rows(self._owner, item) for item in items]
        return list(zip(*(part.split(rows) for part in self.point.take(output)), strict=True))

    def _keys(self, items: Sequence[Item], arguments: Mapping[str, Any]) -> list[Key]:
        """Return what each item's features depend on: the bits of its arguments, and the call's other arguments."""
        point = self.point
        beside = (point.pixels, *point.beside, *point.unread)
        others = {name: value for name, value in arguments.items() if name not in beside}
        tensors = [name for name, value in others.items() if isinstance(value, torch.Tensor)]
        assert not tensors, f"{point.owner}.{point.method} gets {tensors}, of which its feature point says nothing"
        common = tuple(sorted((name, repr(value)) for name, value in others.items()))
        names = list(items[0])
        prints = iter(fingerprints(item[name] for item in items for name in names))
        return [
            (common, *((name, next(prints), item[name].shape, item[name].dtype) for name in names)) for item in items
        ]


def keep_features(model: PreTrainedModel, kit: LmmKit, *, limit: int, trained: bool) -> KeptFeatures | None:
    """Cache the features of a model's images up to `limit` bytes; None if their weights change, or it takes no images.

    Args:
        trained: whether the model is trained, so that weights that require gradients change.
    """
    if not kit.feature_points or not limit:
        return None
    for point in kit.feature_points:
        weights = (*kit.vision_prefixes, *(kit.projector_prefixes if point.projects else ()))
        parts = [value for name, value in model.named_parameters() if name.startswith(weights)]
        if not parts or (trained and any(value.requires_grad for value in parts)):
            continue
        by_chance = [
            f"{name}.{attribute}"
            for name, _, attribute, value in settings_of_chance(model)
            if value
            if f"{name}.{attribute}".startswith(weights)
        ]
        if trained and by_chance:
            logger.warning(
                "features of images are not kept: %s of the frozen vision tower leaves something to chance",
                by_chance[0],
            )
            return None
        return KeptFeatures(model, point, limit=limit)
    return None


def _named(signature: inspect.Signature, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, object]:
    named: dict[str, object] = {}
    for name, value in signature.bind(*args, **kwargs).arguments.items():
        if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            named |= value
        else:
            named[name] = value
    return named
