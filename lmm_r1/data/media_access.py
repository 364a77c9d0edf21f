"""What images of rows may cost and reach: how large they may be, and which files and addresses rows may name."""

from __future__ import annotations

import functools
import math
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from lmm_r1.errors import UserError

MEGAPIXELS = 64.0
"""The largest image that is decoded if no flag says otherwise; 8,000 x 8,000 pixels need 190 MB in RGB."""
_MOST_MEGAPIXELS = "LMM_R1_MAX_IMAGE_MEGAPIXELS"
_PRIVATE_URLS = "LMM_R1_ALLOW_PRIVATE_URLS"
VARIABLES = (_MOST_MEGAPIXELS, _PRIVATE_URLS)


@dataclass(frozen=True, kw_only=True)
class MediaLimits:
    """Limits that all processes of a run find in their environment."""

    max_megapixels: float = MEGAPIXELS
    """Images with more pixels are refused before they are decoded."""
    allow_private_urls: bool = False
    """Whether images are fetched from this machine and from private networks."""

    @property
    def max_pixels(self) -> int:
        return round(self.max_megapixels * 1_000_000)

    def apply(self) -> None:
        """Let them hold for this process, and for those that get its environment."""
        changed = {
            _MOST_MEGAPIXELS: None if self.max_megapixels == MEGAPIXELS else repr(self.max_megapixels),
            _PRIVATE_URLS: "1" if self.allow_private_urls else None,
        }
        for name, value in changed.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def media_limits() -> MediaLimits:
    """Return the limits of this process; raises UserError for a number of megapixels that is none."""
    given = os.environ.get(_MOST_MEGAPIXELS) or MEGAPIXELS
    try:
        megapixels = float(given)
    except ValueError:
        megapixels = math.nan
    if not 0 < megapixels < math.inf:
        raise UserError(f"{_MOST_MEGAPIXELS}={given} must be a number above 0; correct or unset it")
    return MediaLimits(max_megapixels=megapixels, allow_private_urls=os.environ.get(_PRIVATE_URLS) == "1")


def limits_environment() -> dict[str, str]:
    """Return the variables with which another process has the same limits."""
    return {name: os.environ[name] for name in VARIABLES if os.environ.get(name)}


_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def _check_regular(mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "something else")
        raise OSError(f"it is {kind}, not a file")


def open_file(path: Path) -> IO[bytes]:
    """Return a regular file, opened for reading; raises OSError for a pipe, a device and the like, at once.

    It is looked at before it is opened, because opening a device may have an effect, and afterwards, because it may have
    been replaced in between.
    """
    _check_regular(os.stat(path).st_mode)
    # Opening a pipe does not wait for a writer then.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check_regular(os.fstat(descriptor).st_mode)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def media_roots(base_dir: Path, *, image_dir: Path | None = None) -> tuple[Path, ...] | None:
    """Return the folders below which rows may name files; None if they may name all, because the user has written them.

    Rows of a downloaded dataset are somebody else's: one could show a private file to a model, or to who reads its answers.

    Args:
        base_dir: the folder of the row file.
        image_dir: the folder of images that the user has named.
    """
    dataset = downloaded_folder(base_dir)
    if dataset is None:
        return None
    return (dataset,) if image_dir is None else (dataset, image_dir)


def downloaded_folder(base_dir: Path) -> Path | None:
    """Return the folder of the dataset if a row file's folder was downloaded from the Hugging Face hub, else None.

    These are the folders of its caches, and those that `hf download --local-dir` has filled.
    """
    return _downloaded(os.path.abspath(base_dir), *_caches())


def hub_folder(name: str) -> Path:
    """Return a folder that stands for a dataset on the hub whose rows are read by its name."""
    return Path(_caches()[1]) / name.replace("/", "___")


def _caches() -> tuple[str, str, str]:
    """Return the folders of Hugging Face: of the hub's files, of prepared datasets, and of both."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    home = os.path.expanduser(os.environ.get("HF_HOME") or os.path.join(cache, "huggingface"))
    hub = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or os.path.join(home, "hub")
    prepared = os.environ.get("HF_DATASETS_CACHE") or os.path.join(home, "datasets")
    return os.path.abspath(hub), os.path.abspath(prepared), os.path.abspath(home)


@functools.lru_cache(maxsize=1024)
def _downloaded(base_dir: str, hub: str, prepared: str, home: str) -> Path | None:
    path = Path(base_dir)
    for cache in (Path(hub), Path(prepared)):
        if path.is_relative_to(cache) and path != cache:
            return cache / path.relative_to(cache).parts[0]
    for folder in (path, *path.parents):
        kept = folder / ".cache" / "huggingface"
        if kept != Path(home) and (kept / "download").is_dir():
            return folder
    return None


def is_below(path: str, roots: Sequence[Path]) -> bool:
    """Return whether a path is below one of the folders when links are followed."""
    try:
        found = Path(path).resolve()
        return any(found.is_relative_to(root.resolve()) for root in roots)
    except (OSError, ValueError, RuntimeError):
        # A null byte, or a loop of links.
        return False
