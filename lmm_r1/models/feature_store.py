"""Features of images by their keys, in memory that the processes of a run on one machine read of each other.

Each process writes to memory of its own, which has no name and is gone with the last process that reads it, however they
end. Where an entry lies stands in a symbolic link: `RUN-KEY` points to the process and the place in its memory.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import tempfile
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

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
