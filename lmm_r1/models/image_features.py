"""Cached features of images, for vision towers whose weights do not change: each machine computes an image once per run.

They are found by the tower's input pixels, so an image that is changed or cropped differently has other features.
"""

from __future__ import annotations

import fcntl
import inspect
import json
import logging
import mmap
import os
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from lmm_r1.files.atomic import own_folder
from lmm_r1.lmm_kits import LmmKit
from lmm_r1.lmm_kits.features import FeaturePoint, Item, Parts

KEY_BYTES = 16
# Tensors of all types begin at multiples of it.
ALIGNED = 64
_NAME = "lmm-r1-features"
# The run whose processes read each other's features; None for a single process.
_run: str | None = None


def share_features(run: str) -> None:
    """Let this process read the features that other processes of the same run have on this machine."""
    global _run
    _run = blake2b(run.encode(), digest_size=8).hexdigest()


@cache
def process_store(limit: int) -> FeatureStore:
    """Return the store of this process, which all its models share, with room for `limit` bytes."""
    return FeatureStore(limit, links=None if _run is None else Links.of(_run))


@dataclass(frozen=True, kw_only=True)
class Place:
    """The place of an entry in a process, and the types and shapes of its tensors."""

    process: int
    file: int
    """The memory's descriptor in that process."""
    start: int
    """The start of the key, which is followed by the tensors."""
    tensors: Sequence[tuple[str, Sequence[int]]]
    """Types and shapes."""

    @property
    def spans(self) -> list[tuple[int, torch.dtype, Sequence[int]]]:
        """The start, type and shape of each tensor."""
        found, offset = [], self.start + ALIGNED
        for name, shape in self.tensors:
            dtype = getattr(torch, name)
            found.append((offset, dtype, shape))
            offset += _aligned(torch.Size(shape).numel() * dtype.itemsize)
        return found

    @property
    def size(self) -> int:
        sizes = [_aligned(torch.Size(shape).numel() * dtype.itemsize) for _, dtype, shape in self.spans]
        return ALIGNED + sum(sizes)

    @property
    def end(self) -> int:
        return self.start + self.size

    def tensors_in(self, memory: mmap.mmap, *, device: torch.device) -> Parts:
        return tuple(
            torch.frombuffer(memory, dtype=dtype, count=torch.Size(shape).numel(), offset=offset)
            .view(tuple(shape))
            .to(device, copy=True)
            for offset, dtype, shape in self.spans
        )


class FeatureStore:
    """A ring buffer, which overwrites the oldest entries first."""

    def __init__(self, limit: int, *, links: Links | None) -> None:
        self.limit = limit
        self.nbytes = 0
        self._links = links
        # The system allocates its pages when they are written.
        self._file = os.memfd_create(_NAME)
        weakref.finalize(self, os.close, self._file)
        os.ftruncate(self._file, limit)
        self._memory = mmap.mmap(self._file, limit)
        self._places: OrderedDict[bytes, Place] = OrderedDict()
        self._end = 0
        self._others: dict[tuple[int, int], tuple[int, mmap.mmap]] = {}

    def find(self, key: bytes, *, device: torch.device) -> Parts | None:
        """Return copies of the features under a key, from here or from another process of the run."""
        place = self._places.get(key)
        if place is not None:
            return place.tensors_in(self._memory, device=device)
        return None if self._links is None else self._found_elsewhere(key, self._links, device=device)

    def keep(self, key: bytes, parts: Parts) -> None:
        """Keep copies of features under a new key, unless they are larger than the whole buffer."""
        tensors = [(str(part.dtype).removeprefix("torch."), list(part.shape)) for part in parts]
        place = Place(process=os.getpid(), file=self._file, start=self._end, tensors=tensors)
        if place.size > self.limit:
            return
        if place.end > self.limit:
            place = Place(process=place.process, file=self._file, start=0, tensors=tensors)
            # Entries after the end of the last one are older than those at the start.
            self._drop(from_start=self._end, until=self.limit)
        self._drop(from_start=place.start, until=place.end)
        with _locked(self._file, fcntl.LOCK_EX):
            # A process, and its lock, may end at any point: the key is written last, when its tensors are complete.
            self._memory[place.start : place.start + KEY_BYTES] = bytes(KEY_BYTES)
            for (offset, dtype, shape), part in zip(place.spans, parts, strict=True):
                there = torch.frombuffer(self._memory, dtype=dtype, count=part.numel(), offset=offset)
                there.view(tuple(shape)).copy_(part)
            self._memory[place.start : place.start + KEY_BYTES] = key
        self._places[key] = place
        self._end = place.end
        self.nbytes += place.size
        if self._links is not None:
            self._links.put(key, place)

    def _drop(self, *, from_start: int, until: int) -> None:
        """Forget the oldest entries while they overlap this range."""
        while self._places:
            key, place = next(iter(self._places.items()))
            if place.end <= from_start or place.start >= until:
                return
            del self._places[key]
            self.nbytes -= place.size
            if self._links is not None:
                self._links.remove(key, place)

    def _found_elsewhere(self, key: bytes, links: Links, *, device: torch.device) -> Parts | None:
        place = links.get(key)
        if place is None or place.process == os.getpid():
            return None
        memory = self._memory_of(place)
        if memory is None or place.end > len(memory[1]):
            return None
        with _locked(memory[0], fcntl.LOCK_SH):
            if memory[1][place.start : place.start + KEY_BYTES] != key:
                # Overwritten since.
                return None
            return place.tensors_in(memory[1], device=device)

    def _memory_of(self, place: Place) -> tuple[int, mmap.mmap] | None:
        """Return another process's memory, None if the process has ended."""
        name = (place.process, place.file)
        if name not in self._others:
            path = f"/proc/{place.process}/fd/{place.file}"
            try:
                if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
                    return None
                # It is never written here, but PyTorch has no read-only tensors.
                file = os.open(path, os.O_RDWR)
            except OSError:
                return None
            weakref.finalize(self, os.close, file)
            self._others[name] = (file, mmap.mmap(file, os.fstat(file).st_size))
        return self._others[name]


@dataclass(frozen=True, kw_only=True)
class Links:
    """The places of a run's entries, as symbolic links in a folder."""

    folder: Path
    run: str

    @classmethod
    def of(cls, run: str) -> Links | None:
        """Return the links of a run, and delete those of processes that have ended; None if the folder is another user's."""
        folder = own_folder(_NAME)
        if folder is None:
            return None
        for link in folder.iterdir():
            place = _read(link)
            if place is None or not Path(f"/proc/{place.process}").exists():
                link.unlink(missing_ok=True)
        return cls(folder=folder, run=run)

    def get(self, key: bytes) -> Place | None:
        return _read(self._link(key))

    def put(self, key: bytes, place: Place) -> None:
        link = self._link(key)
        new = link.with_name(f"{link.name}.{place.process}")
        new.symlink_to(json.dumps([place.process, place.file, place.start, place.tensors]))
        new.replace(link)

    def remove(self, key: bytes, place: Place) -> None:
        if self.get(key) == place:
            self._link(key).unlink(missing_ok=True)

    def _link(self, key: bytes) -> Path:
        return self.folder / f"{self.run}-{key.hex()}"


def _read(link: Path) -> Place | None:
    try:
        values: list[Any] = json.loads(os.readlink(link))
    except OSError:
        return None
    process, file, start, tensors = values
    return Place(process=process, file=file, start=start, tensors=[(name, shape) for name, shape in tensors])


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


@contextmanager
def _locked(file: int, kind: int) -> Iterator[None]:
    fcntl.flock(file, kind)
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)


# Words of 16 bits are summed in lines of this many, each multiplied by a random number of 64 bits for its place. The sums
# are again split into words and summed, until one line is left.
LINE = 4096
ROUNDS = 5
# Lines at a time: a word of 16 bits takes 64 while it is multiplied.
CHUNK = 1024


def fingerprints(tensors: Iterable[torch.Tensor]) -> list[tuple[int, int]]:
    """Return a hash of each tensor's bits, which ignores shape and type and is the same in all processes.

    Different contents have the same hash with a probability below 2 ** -80 (multilinear hashing,
    https://arxiv.org/abs/1202.4961). All tensors take one synchronization with the GPU.
    """
    found = [_hashes(tensor) for tensor in tensors]
    return [(one, other) for one, other in torch.stack(found).tolist()] if found else []


def _hashes(tensor: torch.Tensor) -> torch.Tensor:
    words = _words(tensor)
    for numbers in _numbers(str(tensor.device)):
        lines = torch.nn.functional.pad(words, (0, -len(words) % LINE)).view(-1, LINE)
        sums = torch.cat([_sums(chunk, numbers) for chunk in lines.split(CHUNK)])  # (lines, 2)
        if len(sums) == 1:
            return sums[0]
        words = _words(sums)
    raise AssertionError("no tensor has so many lines")


def _sums(lines: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Return both sums of each line (L, LINE), (L, 2); they wrap around at 64 bits."""
    wide = lines.long()
    return torch.stack([(wide * row).sum(dim=1) for row in numbers], dim=1)


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
            if isinstance(value, float) and _is_chance(module, attribute):
                yield name, module, attribute, value


def chances(model: torch.nn.Module) -> list[str]:
    """Return the names of the settings that make the model's passes random."""
    return [f"{name}.{attribute}" for name, _, attribute, value in settings_of_chance(model) if value]


def _is_chance(module: torch.nn.Module, name: str) -> bool:
    return any(word in name for word in ("drop", "jitter", "noise")) or (
        name == "p" and "Dropout" in type(module).__name__
    )


GIB = 2**30

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class FeatureCounts:
    """How often a model's passes needed features, and how many bytes of them are kept."""

    needed: int = 0
    """Images, crops and videos, counted once per pass."""
    computed: int = 0
    """How many of them went through the tower."""
    kept_bytes: int = 0
    """The bytes of all models of the process."""

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

    def __init__(
        self, model: PreTrainedModel, point: FeaturePoint, weights: tuple[str, ...], store: FeatureStore
    ) -> None:
        """Args: weights: the prefixes of the names of all weights that the features depend on."""
        self.point = point
        self.store = store
        self.counts = FeatureCounts()
        self._model, self._weights = model, weights
        self._owner = model.get_submodule(point.owner)
        self._origin: bytes | None = None
        self._sharded = False
        self._paused = False
        self._original: Callable[..., Any] = getattr(self._owner, point.method)
        self._signature = inspect.signature(self._original)
        setattr(self._owner, point.method, self._call)

    def forget(self) -> None:
        """Hash the weights again before the next pass, because others may have been loaded."""
        self._origin = None

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

    def _settings(self, arguments: Mapping[str, Any]) -> list[tuple[str, str]]:
        """Return the arguments besides the items that the features depend on."""
        point = self.point
        others = {
            name: value
            for name, value in arguments.items()
            if name not in (point.pixels, *point.beside, *point.unread)
        }
        tensors = [name for name, value in others.items() if isinstance(value, torch.Tensor)]
        assert not tensors, f"{point.owner}.{point.method} gets {tensors}, of which its feature point says nothing"
        return sorted((name, repr(value)) for name, value in others.items())

    def _keys(self, items: Sequence[Item], arguments: Mapping[str, Any]) -> list[bytes]:
        common = (self._made_by(), self._settings(arguments))
        names = list(items[0])
        prints = iter(fingerprints(item[name] for item in items for name in names))
        return [
            _digest(common, [(name, next(prints), item[name].shape, item[name].dtype) for name in names])
            for item in items
        ]

    def _made_by(self) -> bytes:
        """Return a digest of the weights and of the way in which they compute."""
        if self._origin is None:
            # DeepSpeed may have replaced the loaded parameters.
            weights = [value for name, value in self._model.named_parameters() if name.startswith(self._weights)]
            self._sharded = any(hasattr(value, "ds_tensor") for value in weights)
            prints: Any = fingerprints(value.ds_tensor if self._sharded else value for value in weights)
            if self._sharded:
                # All ranks are in their first pass with a vision tower; their shards together are the weights.
                ranks: list[Any] = [None] * dist.get_world_size()
                dist.all_gather_object(ranks, prints)
                prints = ranks
            config = self._owner.config
            kind = (type(self._owner).__qualname__, self.point.method, config._attn_implementation)
            self._origin = _digest(kind, config.to_json_string(), prints)
        return self._origin


def _digest(*parts: Any) -> bytes:
    return blake2b(repr(parts).encode(), digest_size=KEY_BYTES).digest()


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
        by_chance = [name for name in chances(model) if name.startswith(weights)]
        if trained and by_chance:
            logger.warning(
                "features of images are not kept: %s of the frozen vision tower leaves something to chance",
                by_chance[0],
            )
            return None
        return KeptFeatures(model, point, weights, process_store(limit))
    return None


def _named(signature: inspect.Signature, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, object]:
    named: dict[str, object] = {}
    for name, value in signature.bind(*args, **kwargs).arguments.items():
        if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            named |= value
        else:
            named[name] = value
    return named
