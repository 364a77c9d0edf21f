"""What libraries print that no user can act on, kept off the terminal, and the garbage collector while they load."""

from __future__ import annotations

import atexit
import functools
import gc
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

# OpenRLHF requires the shim `pynvml`, and torch warns about it in every process that imports it.
_PYNVML = "The pynvml package is deprecated"
# DeepSpeed calls both, on GPUs whenever weights are gathered or gradients summed.
_RENAMED = r"`torch\.distributed\.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated"
# In OpenRLHF's `"\%"`. From Python 3.12 on it is shown whenever the file has not been compiled yet.
_ESCAPE, _ESCAPED_IN = r".*invalid escape sequence", r".*openrlhf.utils.math_utils"
# vLLM expects prompts from its renderer. Ours are token ids with media, which its engine accepts directly.
_RAW_PROMPTS = "Passing raw prompts to InputProcessor is deprecated"
# Progress bars of transformers, one per rank: a model that is loaded, and a save that a line of ours reports.
# Progress bars of vLLM: the warm-up of an engine on GPUs, where no setting turns all of them off.
_BARS = re.compile(
    "Loading weights|Writing model shards|"
    "Capturing .*CUDA graphs|JIT kernel warmup|DeepGEMM warmup|Compiling CuTeDSL kernels"
)
# Checks whether each of DeepSpeed's operators could be compiled, and prints a line per operator that cannot. We use none.
_PROBES = "deepspeed.git_version_info"
# Writes timings of inference kernels, which we do not use, into ~/.triton at the end of each process. If it cannot
# write, it prints a traceback.
_TABLES, _AT_EXIT = "deepspeed.ops.transformer.inference.triton.matmul_ext", "matmul_ext_update_autotune_table"


def is_verbose() -> bool:
    """Return whether lines are printed that only few users need: `LMM_R1_VERBOSE=1`."""
    return os.environ.get("LMM_R1_VERBOSE", "") not in ("", "0")


def begin() -> None:
    """Suppress warnings of libraries during and after their import; called before anything large is imported."""
    warnings.filterwarnings("ignore", message=_PYNVML, category=FutureWarning)
    warnings.filterwarnings("ignore", message=_RENAMED, category=FutureWarning)
    # Before Python 3.12 it is a DeprecationWarning.
    for category in (SyntaxWarning, DeprecationWarning):
        warnings.filterwarnings("ignore", message=_ESCAPE, category=category, module=_ESCAPED_IN)
    # On CPUs with bfloat16 instructions it warns on import about a 4-bit kernel that we do not use.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    logging.getLogger("DeepSpeed").addFilter(_no_accelerator)
    if _QuietModules not in sys.meta_path:
        sys.meta_path.insert(0, _QuietModules)


class _QuietModules:
    """Imports modules without the output that they write during import or at the end of the process."""

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
    """Import a module and unregister its function for the end of the process."""
    run(module)
    atexit.unregister(vars(module)[_AT_EXIT])


def _silently(run: Callable[[ModuleType], None], module: ModuleType) -> None:
    """Import a module while its output, and that of compilers that it starts, is discarded."""
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
    """Suppress output of libraries while a model is loaded, trained and saved, here and in processes started here.

    vLLM's plugin calls this in an engine's own process.
    """
    known = os.environ.get("PYTHONWARNINGS", "")
    if _PYNVML not in known:
        # An engine's own process imports torch before it imports anything of ours.
        os.environ["PYTHONWARNINGS"] = ",".join(filter(None, (known, f"ignore:{_PYNVML}:FutureWarning")))
    logging.getLogger("vllm.v1.engine.input_processor").addFilter(_no_raw_prompts)
    from huggingface_hub.utils import disable_progress_bars
    from tqdm.std import tqdm

    if os.environ.get("RANK", "0") != "0":
        # All ranks download the same files, so only rank 0 shows its progress.
        disable_progress_bars()
    if not hasattr(tqdm.__init__, "_of_lmm_r1"):
        tqdm.__init__ = _without_bars(tqdm.__init__)


def _no_accelerator(record: logging.LogRecord) -> bool:
    # transformers imports DeepSpeed in commands that train nothing.
    return not record.getMessage().startswith("Setting accelerator to CPU")


def _no_raw_prompts(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_RAW_PROMPTS)


def _without_bars(make: Any) -> Any:
    """Return tqdm's constructor with the bars of `_BARS` disabled."""

    @functools.wraps(make)
    def made(bar: Any, iterable: Any = None, desc: str | None = None, *args: Any, **settings: Any) -> None:
        if desc is not None and _BARS.match(desc):
            settings["disable"] = True
        make(bar, iterable, desc, *args, **settings)

    made._of_lmm_r1 = True  # type: ignore[attr-defined]
    return made


# PyTorch, vLLM, DeepSpeed and transformers create a million objects that stay. With Python's own thresholds, the
# collector takes a fifth of the time of loading them. These are the thresholds of its three generations.
_LOADING = (50_000, 20, 100)
_USUAL = gc.get_threshold()


def begin_loading() -> None:
    """Run the collector rarely. A process that loads a model calls this before it imports anything large."""
    gc.set_threshold(*_LOADING)


def done_loading() -> None:
    """Run the collector as usual again, but never on what has been loaded so far."""
    gc.set_threshold(*_USUAL)
    gc.freeze()
    # Libraries that count their objects at the end of the process would report frozen ones as leaked.
    atexit.register(gc.unfreeze)
