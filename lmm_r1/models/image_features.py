"""Features of images, kept for towers whose weights stay: each image of a run goes through such a tower once a machine.

They are found by the pixels that the tower gets, so that whatever changes an image, or cuts it otherwise, makes another of it.
"""

from __future__ import annotations

import fcntl
import inspect
import json
import logging
import mmap
import os
import tempfile
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from lmm_r1.lmm_kits import LmmKit
from lmm_r1.lmm_kits.features import FeaturePoint, Item, Parts

if TYPE_CHECKING:
    from lmm_r1.lmm_kits.features import Parts


KEY_BYTES = 16
# Numbers of all types begin at multiples of it.
ALIGNED = 64
_NAME = "lmm-r1-features"
# The run whose processes read each other's features; None where there is but one.
_run: str | None = None


def share_features(run: str) -> None:
    """Let this process read what others of the same run, whatever its name, keep of images on this machine."""
    global _run
    _run = blake2b(run.encode(), digest_size=8).hexdigest()


@cache
def process_store(limit: int) -> FeatureStore:
    """Return the store of this process, which its models share, with room for so many bytes."""
    return FeatureStore(limit, links=None if _run is None else Links.of(_run))


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a process keeps an entry, and what its tensors are like."""

    process: int
    file: int
    """The memory's descriptor in that process."""
    start: int
    """Of the key, behind which the tensors lie."""
    tensors: Sequence[tuple[str, Sequence[int]]]
    """Types and shapes."""

    @property
    def spans(self) -> list[tuple[int, torch.dtype, Sequence[int]]]:
        """Where each tensor begins, its type and its shape."""
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
        """Return copies of the tensors."""
        return tuple(
            torch.frombuffer(memory, dtype=dtype, count=torch.Size(shape).numel(), offset=offset)
            .view(tuple(shape))
            .to(device, copy=True)
            for offset, dtype, shape in self.spans
        )


class FeatureStore:
    """A ring of memory: what was kept first is written over first."""

    def __init__(self, limit: int, *, links: Links | None) -> None:
        self.limit = limit
        self.nbytes = 0
        self._links = links
        # Its pages are taken one by one, as they are written.
        self._file = os.memfd_create(_NAME)
        weakref.finalize(self, os.close, self._file)
        os.ftruncate(self._file, limit)
        self._memory = mmap.mmap(self._file, limit)
        self._places: OrderedDict[bytes, Place] = OrderedDict()
        self._end = 0
        self._others: dict[tuple[int, int], tuple[int, mmap.mmap]] = {}

    def find(self, key: bytes, *, device: torch.device) -> Parts | None:
        """Return copies of what is kept under a key, here or in another process of the run."""
        place = self._places.get(key)
        if place is not None:
            return place.tensors_in(self._memory, device=device)
        return None if self._links is None else self._found_elsewhere(key, self._links, device=device)

    def keep(self, key: bytes, parts: Parts) -> None:
        """Keep copies of features under a key that has none here; nothing where they are larger than all of the memory."""
        tensors = [(str(part.dtype).removeprefix("torch."), list(part.shape)) for part in parts]
        place = Place(process=os.getpid(), file=self._file, start=self._end, tensors=tensors)
        if place.size > self.limit:
            return
        if place.end > self.limit:
            place = Place(process=place.process, file=self._file, start=0, tensors=tensors)
            # What lies behind the end of the last one is older than what lies at the start.
            self._drop(from_start=self._end, until=self.limit)
        self._drop(from_start=place.start, until=place.end)
        with _locked(self._file, fcntl.LOCK_EX):
            # A process may end at any point, and its lock with it: the key stands there only with all that it is the key of.
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
        """Forget the oldest entries as long as they lie, in part, between these places."""
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
                # Written over since.
                return None
            return place.tensors_in(memory[1], device=device)

    def _memory_of(self, place: Place) -> tuple[int, mmap.mmap] | None:
        """Return another process's memory, None where that has ended."""
        name = (place.process, place.file)
        if name not in self._others:
            path = f"/proc/{place.process}/fd/{place.file}"
            try:
                if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
                    return None
                # Written to by nobody here: PyTorch has no tensors that can only be read.
                file = os.open(path, os.O_RDWR)
            except OSError:
                return None
            weakref.finalize(self, os.close, file)
            self._others[name] = (file, mmap.mmap(file, os.fstat(file).st_size))
        return self._others[name]


@dataclass(frozen=True, kw_only=True)
class Links:
    """The places of a run's entries, which a folder holds as symbolic links."""

    folder: Path
    run: str

    @classmethod
    def of(cls, run: str) -> Links | None:
        """Return those of a run, without those of processes that have ended; None where the folder is another user's."""
        folder = Path(tempfile.gettempdir()) / f"{_NAME}-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            return None
        for link in folder.iterdir():
            place = _read(link)
            if place is None or not Path(f"/proc/{place.process}").exists():
                link.unlink(missing_ok=True)
        return cls(folder=folder, run=run)

    def get(self, key: bytes) -> Place | None:
        return _read(self._link(key))

    def put(self, key: bytes, place: Place) -> None:
        """Point to a place, also where there was another one."""
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
    """Hold a lock between processes on a memory."""
    fcntl.flock(file, kind)
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)


# Numbers of 16 bits are added up, each times a random number of 64 bits of its place in a line of so many; then so are the
# sums of all lines, as numbers of 16 bits, until one is left.
LINE = 4096
ROUNDS = 5
# So many lines at a time: a number of 16 bits takes 64 while it is multiplied.
CHUNK = 1024


def fingerprints(tensors: Iterable[torch.Tensor]) -> list[tuple[int, int]]:
    """Return a name of each tensor's bits, whatever their shape and type.

    Two contents that differ have the same name with a probability below 2 ** -80 (multilinear hashing,
    https://arxiv.org/abs/1202.4961), over the random numbers, which are the same in all processes. A GPU is waited for once.
    """
    found = [_hashes(tensor) for tensor in tensors]
    return [(one, other) for one, other in torch.stack(found).tolist()] if found else []


def _hashes(tensor: torch.Tensor) -> torch.Tensor:
    """Return both hashes, (2,)."""
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
    """Yield the name of each module with such a number, the module, its attribute and the number, 0 or more."""
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if isinstance(value, float) and _is_chance(module, attribute):
                yield name, module, attribute, value


def chances(model: torch.nn.Module) -> list[str]:
    """Return the names of the attributes by which something of the model is left to chance."""
    return [f"{name}.{attribute}" for name, _, attribute, value in settings_of_chance(model) if value]


def _is_chance(module: torch.nn.Module, name: str) -> bool:
    """Whether an attribute is the probability of a dropout or the strength of a noise."""
    return any(word in name for word in ("drop", "jitter", "noise")) or (
        name == "p" and "Dropout" in type(module).__name__
    )


GIB = 2**30

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class FeatureCounts:
    """How often a model's pass needed features, and what is kept of them."""

    needed: int = 0
    """Images, crops and videos, as often as a pass had them."""
    computed: int = 0
    """How many of these went through the tower."""
    kept_bytes: int = 0
    """Of all models of the process."""

    @classmethod
    def total(cls, counts: Sequence[FeatureCounts]) -> FeatureCounts:
        """Return the counts of several processes together."""
        return cls(
            needed=sum(one.needed for one in counts),
            computed=sum(one.computed for one in counts),
            kept_bytes=sum(one.kept_bytes for one in counts),
        )

    def metrics(self, role: str) -> dict[str, float]:
        """Return what is logged of them; nothing of a model that keeps none, or had no images."""
        if not self.needed:
            return {}
        return {
            f"image_cache/{role}_found": 1 - self.computed / self.needed,
            f"image_cache/{role}_gib": self.kept_bytes / GIB,
        }


class KeptFeatures:
    """Stands in the place of the method at a model's feature point, and calls it for items that it has not seen.

    With ZeRO-3 it calls it in every pass, as the ranks do whose images are new, with an item of the least work if need be:
    the ranks gather a layer's weights together, and would wait for one that has all it needs.
    """

    def __init__(
        self, model: PreTrainedModel, point: FeaturePoint, weights: tuple[str, ...], store: FeatureStore
    ) -> None:
        """Args: weights: the beginnings of the names of all weights that the features are made with."""
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
        """Take nothing for granted of the weights: others may have been loaded."""
        self._origin = None

    def take_counts(self) -> FeatureCounts:
        """Return the counts since this was called last."""
        counts, self.counts = self.counts, FeatureCounts()
        return replace(counts, kept_bytes=self.store.nbytes)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let the model compute everything anew, and keep nothing of it, while the block runs."""
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
        """Return the features of each item."""
        output = self._original(**{**arguments, **self.point.joined(items)})
        rows = [self.point.rows(self._owner, item) for item in items]
        return list(zip(*(part.split(rows) for part in self.point.take(output)), strict=True))

    def _settings(self, arguments: Mapping[str, Any]) -> list[tuple[str, str]]:
        """Return what the features depend on beside the items."""
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
        """Return what tells these features from those of other weights, or of other ways to compute with them."""
        if self._origin is None:
            # DeepSpeed may have put others in the place of those that were loaded.
            weights = [value for name, value in self._model.named_parameters() if name.startswith(self._weights)]
            self._sharded = any(hasattr(value, "ds_tensor") for value in weights)
            prints: Any = fingerprints(value.ds_tensor if self._sharded else value for value in weights)
            if self._sharded:
                # All ranks are in their first pass with a vision tower. Their parts together are the weights.
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
    """Let a model keep features of its images up to `limit` bytes; None where their weights change, or it has no images.

    Args:
        trained: whether its weights that take gradients get them.
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
    """Return a call's arguments by their names, which the call takes all of them by."""
    named: dict[str, object] = {}
    for name, value in signature.bind(*args, **kwargs).arguments.items():
        if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            named |= value
        else:
            named[name] = value
    return named
