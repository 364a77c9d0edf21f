"""Hides library output that no user can act on, and runs the garbage collector rarely while libraries load."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import warnings

# OpenRLHF requires the shim `pynvml`, and torch warns about it in every process that imports it.
_PYNVML = "The pynvml package is deprecated"
_WARNINGS: tuple[tuple[str, type[Warning]], ...] = (
    (_PYNVML, FutureWarning),
    # DeepSpeed calls both on GPUs whenever weights are gathered or gradients summed.
    (r"`torch\.distributed\.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated", FutureWarning),
)
_LINES = {
    # transformers imports DeepSpeed in commands that train nothing.
    "DeepSpeed": "Setting accelerator to CPU",
    # vLLM expects prompts from its renderer. Ours are token ids with media, which its engine accepts directly.
    "vllm.v1.engine.input_processor": "Passing raw prompts to InputProcessor is deprecated",
    # A processor of transformers gives its own defaults where the base class warns of a user's.
    "transformers.processing_utils": "Kwargs passed to `processor.__call__` have to be in",
    # It is about a default config, which transformers makes to see what a checkpoint's changes.
    "transformers.configuration_utils": "Model config: pad_token_id must be `None` or an integer within the vocabulary "
    "(between 0 and 31999), got 128002.",
}


def is_verbose() -> bool:
    """Return whether lines are printed that only few users need: `LMM_R1_VERBOSE=1`."""
    return os.environ.get("LMM_R1_VERBOSE", "") not in ("", "0")


def hide_warnings() -> None:
    """Hide warnings and lines of libraries, here and in processes started here; before torch is imported."""
    for message, category in _WARNINGS:
        warnings.filterwarnings("ignore", message=message, category=category)
    known = os.environ.get("PYTHONWARNINGS", "")
    if _PYNVML not in known:
        os.environ["PYTHONWARNINGS"] = ",".join(filter(None, (known, f"ignore:{_PYNVML}:FutureWarning")))
    for name in _LINES:
        logging.getLogger(name).addFilter(lambda record: not record.getMessage().startswith(_LINES[record.name]))
    # On CPUs with bfloat16 instructions it warns on import about a 4-bit kernel that we do not use.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def hide_bars() -> None:
    """Hide progress bars of models that are loaded and saved, and those of downloads except on rank 0."""
    from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars
    from transformers.utils.logging import disable_progress_bar

    shows_downloads = os.environ.get("RANK", "0") == "0" and not are_progress_bars_disabled()
    disable_progress_bar()
    if shows_downloads:
        enable_progress_bars()


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
