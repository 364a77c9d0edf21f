"""Python's garbage collector while a process loads its libraries, and after it.

PyTorch, vLLM, DeepSpeed and transformers make a million objects that stay. With Python's own settings the collector
walks them again and again: a fifth of the time of loading them, and then of every full collection while a model runs.
"""

import atexit
import gc

# New objects before the collector looks at them, and how often it looks at older ones.
_LOADING = (50_000, 20, 100)
_USUAL = gc.get_threshold()


def begin() -> None:
    """Let the collector look seldom; a process that loads a model calls it before it imports anything large."""
    gc.set_threshold(*_LOADING)


def done() -> None:
    """Let the collector look as usual, and never again at what has been loaded so far."""
    gc.set_threshold(*_USUAL)
    gc.freeze()
    # Libraries that count their objects at the end of the process would tell of those as lost.
    atexit.register(gc.unfreeze)
