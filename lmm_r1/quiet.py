"""What libraries print that no user can do anything about, kept off the terminal: each with its reason, all in one place."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable
from typing import Any

# OpenRLHF requires the shim `pynvml`, at which every process warns that imports torch.
_PYNVML = "The pynvml package is deprecated"
# Bars of transformers: of a model that is in memory, and of a save that a line of ours tells of. One for each rank.
_BARS = ("Loading weights", "Writing model shards")


def begin() -> None:
    """Keep what torch prints while it is imported off the terminal; called before anything large is imported."""
    warnings.filterwarnings("ignore", message=_PYNVML, category=FutureWarning)


def prepare_process() -> None:
    """Keep what libraries print while a model is loaded, trained and saved off the terminal, here and in processes started here."""
    known = os.environ.get("PYTHONWARNINGS", "")
    if _PYNVML not in known:
        # An engine's own process imports torch before it imports anything of ours.
        os.environ["PYTHONWARNINGS"] = ",".join(filter(None, (known, f"ignore:{_PYNVML}:FutureWarning")))
    # On CPUs with bfloat16 instructions it warns, when imported, of a 4-bit kernel, which layers of ours do not use.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    from huggingface_hub.utils import disable_progress_bars
    from transformers.utils import logging as transformers_logging

    if os.environ.get("RANK", "0") != "0":
        # All ranks download the same files, and one shows how far it is.
        disable_progress_bars()
    transformers_logging.set_tqdm_hook(_without_bars)


def _without_bars(make: Callable[..., Any], args: tuple[Any, ...], settings: dict[str, Any]) -> Any:
    """Make a bar of transformers; those of `_BARS` are never shown."""
    return make(*args, **(settings | {"disable": True} if settings.get("desc") in _BARS else settings))
