"""What libraries print that no user can do anything about, kept off the terminal: each with its reason, all in one place."""

from __future__ import annotations

import io
import logging
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

# OpenRLHF requires the shim `pynvml`, at which every process warns that imports torch.
_PYNVML = "The pynvml package is deprecated"
# Bars of transformers: of a model that is in memory, and of a save that a line of ours tells of. One for each rank.
_BARS = ("Loading weights", "Writing model shards")
# Asks each of DeepSpeed's operators whether it could be compiled, none of which is: a line for each that could not be.
_PROBES = "deepspeed.git_version_info"


def begin() -> None:
    """Keep what torch and DeepSpeed print while they are imported off the terminal, before anything large is imported."""
    warnings.filterwarnings("ignore", message=_PYNVML, category=FutureWarning)
    if _QuietProbes not in sys.meta_path:
        sys.meta_path.insert(0, _QuietProbes)


class _QuietProbes:
    """Finds the module of `_PROBES`, which prints nothing here while it is imported."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _PROBES:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = partial(_silently, spec.loader.exec_module)  # type: ignore[method-assign]
        return spec


def _silently(run: Callable[[ModuleType], None], module: ModuleType) -> None:
    """Import a module; neither it nor a compiler that it starts reaches the terminal."""
    terminal, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        with redirect_stdout(io.StringIO()):
            run(module)
    finally:
        os.dup2(terminal, 2)
        os.close(terminal)
        os.close(nothing)


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
