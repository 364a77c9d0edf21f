"""What libraries print that no user can do anything about, kept off the terminal: each with its reason, all in one place."""

from __future__ import annotations

import atexit
import functools
import io
import logging
import os
import re
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
# DeepSpeed calls both of them; on GPUs with each gathering of weights and sum of gradients.
_RENAMED = r"`torch\.distributed\.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated"
# In OpenRLHF's `"\%"`, which is what it means; from Python 3.12 on shown wherever the file has not been compiled yet.
_ESCAPE, _ESCAPED_IN = r".*invalid escape sequence", r".*openrlhf.utils.math_utils"
# vLLM wants prompts from its renderer; ours are token ids with media, which its engine takes as they are.
_RAW_PROMPTS = "Passing raw prompts to InputProcessor is deprecated"
# Bars of transformers: of a model that is in memory, and of a save that a line of ours reports. One for each rank.
# Bars of vLLM: of an engine's warm-up on GPUs, some of which no setting of its turns off.
_BARS = re.compile(
    "Loading weights|Writing model shards|"
    "Capturing .*CUDA graphs|JIT kernel warmup|DeepGEMM warmup|Compiling CuTeDSL kernels"
)
# Asks each of DeepSpeed's operators whether it could be compiled, none of which is: a line for each that could not be.
_PROBES = "deepspeed.git_version_info"
# Writes what its kernels for inference have learned of their speed, which none of ours use, into ~/.triton at the end of
# each process, with a traceback where that cannot be written.
_TABLES, _AT_EXIT = "deepspeed.ops.transformer.inference.triton.matmul_ext", "matmul_ext_update_autotune_table"


def begin() -> None:
    """Keep warnings off the terminal that come while libraries are imported, or later; called before anything large is imported."""
    warnings.filterwarnings("ignore", message=_PYNVML, category=FutureWarning)
    warnings.filterwarnings("ignore", message=_RENAMED, category=FutureWarning)
    # Before Python 3.12 it is a DeprecationWarning.
    for category in (SyntaxWarning, DeprecationWarning):
        warnings.filterwarnings("ignore", message=_ESCAPE, category=category, module=_ESCAPED_IN)
    if _QuietModules not in sys.meta_path:
        sys.meta_path.insert(0, _QuietModules)


class _QuietModules:
    """Finds modules that print, while they are imported or at the end of the process, and do not here."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        quietly = {_PROBES: _silently, _TABLES: _without_tables}.get(name)
        if quietly is None:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = partial(quietly, spec.loader.exec_module)  # type: ignore[method-assign]
        return spec


def _without_tables(run: Callable[[ModuleType], None], module: ModuleType) -> None:
    """Import a module, and take back what it has registered for the end of the process."""
    run(module)
    atexit.unregister(vars(module)[_AT_EXIT])


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
    """Keep what libraries print while a model is loaded, trained and saved off the terminal, here and in processes started here.

    vLLM's plugin calls it in an engine's own process.
    """
    known = os.environ.get("PYTHONWARNINGS", "")
    if _PYNVML not in known:
        # An engine's own process imports torch before it imports anything of ours.
        os.environ["PYTHONWARNINGS"] = ",".join(filter(None, (known, f"ignore:{_PYNVML}:FutureWarning")))
    # On CPUs with bfloat16 instructions it warns, when imported, of a 4-bit kernel, which layers of ours do not use.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    logging.getLogger("vllm.v1.engine.input_processor").addFilter(_no_raw_prompts)
    from huggingface_hub.utils import disable_progress_bars
    from tqdm.std import tqdm

    if os.environ.get("RANK", "0") != "0":
        # All ranks download the same files, and one shows how far it is.
        disable_progress_bars()
    if not hasattr(tqdm.__init__, "_of_lmm_r1"):
        tqdm.__init__ = _without_bars(tqdm.__init__)


def _no_raw_prompts(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_RAW_PROMPTS)


def _without_bars(make: Any) -> Any:
    """Return the constructor of tqdm's bars, all of whose classes call it, without those of `_BARS`."""

    @functools.wraps(make)
    def made(bar: Any, iterable: Any = None, desc: str | None = None, *args: Any, **settings: Any) -> None:
        if desc is not None and _BARS.match(desc):
            settings["disable"] = True
        make(bar, iterable, desc, *args, **settings)

    made._of_lmm_r1 = True  # type: ignore[attr-defined]
    return made
