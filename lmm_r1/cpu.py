"""Everything that a machine without CUDA needs, in one place; with CUDA present each function returns at once.

Commands and the Python API call `prepare_process`, and Ray calls `prepare_worker` when a worker starts: importing this
package changes nothing. What OpenRLHF and DeepSpeed need is in `host.strategy`.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmm_r1 import quiet
from lmm_r1.errors import UserError
from remote_rm.redaction import hide_in_logs

if TYPE_CHECKING:
    import torch

_ENGINE_PROCESS = "VLLM_ENABLE_V1_MULTIPROCESSING"
# Set in Ray's workers before they import anything, and in this process where the user has not set them.
_ENVIRONMENT = {
    "DS_ACCELERATOR": "cpu",
    # Without it vLLM turns the `uni` executor into a worker process that the engine waits for in a spinning loop,
    # which takes one of two cores away and imports vLLM once more. With 1 a run takes the path of GPUs (`engine_process`).
    _ENGINE_PROCESS: "0",
    # GiB for the KV cache: by default vLLM takes half of the machine's memory.
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # `enforce_eager` leaves two sampler helpers to torch.compile: 20 s of C++ compilation in the first batch.
    "TORCHDYNAMO_DISABLE": "1",
    # Its warnings here are about what a CPU does not have (Triton, tcmalloc), and one of them comes with every image.
    "VLLM_LOGGING_LEVEL": "ERROR",
    # Let the scheduler place threads: policy and engine take turns on the same cores.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Ray sets OMP_NUM_THREADS=1 for workers with a fraction of a CPU, which would halve the speed of all of them.
    "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))),
    # How often a thread looks whether the others are done before it sleeps: about a millisecond, as GNU's OpenMP has it
    # where nothing is set (`choose_waiting`).
    "GOMP_SPINCOUNT": "300000",
}
_POLICY, _SPINS = "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"
# What a thread gets of a core that it does not share with others, at least.
_FREE_SHARE = 0.85
_MEASURED_SECONDS = 0.02
# What a run's driver found out, for its workers: Ray starts them before it assigns GPUs, and who asks CUDA then has all
# of the machine's for good.
BACKEND = "LMM_R1_BACKEND"
# The values of `BACKEND`; compat/install.sh calls the first one `gpu`.
_BACKENDS = {"cuda": True, "gpu": True, "cpu": False}
# In the driver of a run that joins a Ray cluster, whether the workers' models are on GPUs; None: as in this process.
_workers_have_cuda: bool | None = None
# On PYTHONPATH it lets `import torch` call `prepare`, as an entry point of the group `torch.backends`.
_FOR_CHILDREN = str(Path(__file__).parent / "cpu_operators")
# Libraries of operators: what they declare lives as long as these objects.
_declared: list[object] = []


def choose_waiting() -> None:
    """Let the threads that share a PyTorch operator sleep at once while they wait, if others use the cores just now.

    Before torch is loaded, and only if the user has not chosen. On free cores they stay awake for about a millisecond,
    until the next operator. Where others use the cores, an awake one keeps the core that another one needs.
    """
    alone = "1" in (os.environ.get("OMP_NUM_THREADS"), _ENVIRONMENT["OMP_NUM_THREADS"])
    if alone or _POLICY in os.environ or _SPINS in os.environ:
        return
    began, used = time.perf_counter(), time.thread_time()
    while time.perf_counter() < began + _MEASURED_SECONDS:
        pass
    share = (time.thread_time() - used) / (time.perf_counter() - began)
    os.environ[_SPINS] = _ENVIRONMENT[_SPINS] if share >= _FREE_SHARE else "0"


def prepare() -> None:
    """Make torchvision importable where its library is built for CUDA and torch is not; may be called again.

    PyPI's torchvision is built for CUDA. Next to a CPU build of torch its library does not load, and `import torchvision`
    fails because an operator is not declared. Called before transformers or vLLM is imported. Processes that this one
    starts, as vLLM's engine, call it when they import torch.
    """
    import torch

    spec = importlib.util.find_spec("torchvision")
    if torch.version.cuda is not None or torch.version.hip is not None or spec is None or spec.origin is None:
        return
    if not _declared:
        libraries = list(Path(spec.origin).parent.glob("_C*.so"))
        if not libraries or any(map(_loads, libraries)):
            return
        operators = torch.library.Library("torchvision", "DEF")
        operators.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        operators.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _declared.append(operators)
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if _FOR_CHILDREN not in inherited:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (*inherited, _FOR_CHILDREN)))
    if _FOR_CHILDREN not in sys.path:
        # multiprocessing gives spawned processes this path instead.
        sys.path.append(_FOR_CHILDREN)


def _loads(library: Path) -> bool:
    import torch

    try:
        torch.ops.load_library(str(library))
    except OSError:
        return False
    return True


def has_cuda() -> bool:
    """Say whether the models of this process, or in a run's driver those of its workers, are on GPUs.

    In a run's workers CUDA is not asked. Raises UserError for a value of LMM_R1_BACKEND that is none.
    """
    return own_cuda() if _workers_have_cuda is None else _workers_have_cuda


def own_cuda() -> bool:
    """Say whether this process itself is to use a GPU, whatever the workers of its run have."""
    if BACKEND in os.environ:
        if os.environ[BACKEND] not in _BACKENDS:
            raise UserError(f"{BACKEND}={os.environ[BACKEND]} must be cuda or cpu; unset it to let the machine say")
        return _BACKENDS[os.environ[BACKEND]]
    import torch

    return torch.cuda.is_available()


def follow_workers(on_gpus: bool | None) -> None:
    """Let `has_cuda` tell of a run's workers on other machines than this driver's; None forgets them."""
    global _workers_have_cuda
    _workers_have_cuda = on_gpus


def worker_environment() -> dict[str, str]:
    """Return the environment variables that Ray's workers need before they import anything.

    What the user has set of vLLM's holds in them, too; of the others each worker has its own.
    """
    if has_cuda():
        return {BACKEND: "cuda"}
    of_vllm = {name: os.environ.get(name, value) for name, value in _ENVIRONMENT.items() if name.startswith("VLLM_")}
    return {**_environment(), **of_vllm, BACKEND: "cpu"}


def engine_process() -> bool:
    """Say whether the engines of a run are processes of their own, as on GPUs, or live in those of their actors."""
    return own_cuda() or os.environ.get(_ENGINE_PROCESS) == "1"


def _environment() -> dict[str, str]:
    # The number of looks would go before the policy that a user has set.
    return {name: value for name, value in _ENVIRONMENT.items() if name != _SPINS or _POLICY not in os.environ}


def prepare_process() -> None:
    """Do for this process what Ray's runtime environment and hook do for a worker; before DeepSpeed is imported."""
    quiet.begin_loading()
    quiet.hide_warnings()
    if not own_cuda():
        for name, value in _environment().items():
            os.environ.setdefault(name, value)
    prepare_worker()
    quiet.hide_bars()


def prepare_worker() -> None:
    """Keep secrets out of logs, and OpenRLHF from waiting for a GPU (Ray's worker set-up hook)."""
    quiet.begin_loading()
    quiet.hide_warnings()
    hide_in_logs()
    prepare()
    if not own_cuda():
        import torch

        torch.cuda.synchronize = lambda device=None: None


def device() -> torch.device:
    """Return the device of this process's tensors: its GPU, or the CPU."""
    import torch

    return torch.device("cuda", torch.cuda.current_device()) if own_cuda() else torch.device("cpu")


def zero_settings() -> dict[str, bool | int]:
    """Return how DeepSpeed is to gather the weights that ZeRO-3 shards: one by one, and none ahead of its use.

    Of gathers that it starts together it waits for the last one only. NCCL runs them in order; gloo's threads do not,
    so that weights would be read, or new ones written over, before the others are done.
    """
    if has_cuda():
        return {}
    # Of weights that are fetched ahead together one by one, used ones would count as still there: DeepSpeed sets this
    # itself for models that are trained, but not for those that are only run.
    return {"stage3_allgather_sequential": True, "stage3_prefetch_bucket_size": 0}


def _take_seeds() -> None:
    """Let vLLM's workers in this process take requests with seeds of their own; once or more.

    Where a prompt is read in several parts, what was drawn after each but the last is drawn again: vLLM turns the
    request's generator back by an offset, which those of a CPU do not have.
    """
    import numpy as np
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    if hasattr(CPUModelRunner, "_lmm_r1_bookkeeping"):
        return
    bookkeeping = CPUModelRunner._bookkeeping_sync

    def rewound(self: Any, *args: Any, **kwargs: Any) -> Any:
        batch = self.input_batch
        generators = batch.generators
        for place in np.nonzero(self.discard_request_mask.np[: batch.num_reqs])[0]:
            if int(place) in generators:
                # Nothing of it is kept yet: the first token comes behind the whole prompt.
                generators[int(place)].manual_seed(generators[int(place)].initial_seed())
        batch.generators = {}
        try:
            return bookkeeping(self, *args, **kwargs)
        finally:
            batch.generators = generators

    CPUModelRunner._lmm_r1_bookkeeping = bookkeeping
    CPUModelRunner._bookkeeping_sync = rewound


def prepare_engine() -> None:
    """Mend what vLLM computes on a CPU, in each of its processes: the plugin of vLLM calls this; once or more."""
    if own_cuda():
        return
    _pack_alike()
    _take_seeds()
    _mend_guesses()


def _pack_alike() -> None:
    """Let vLLM in this process pack all weights alike, and leave the process its number of threads; once or more.

    How oneDNN lays out packed weights depends on the number of threads where AVX-512 is missing, and vLLM 0.29 computes
    with all weights of one shape as the first of them are laid out (`ClassMatmulCacheKey` in csrc/cpu/dnnl_helper.h).
    Numba, which guesses tokens, gives the process as many threads as there are cores: weights that came later were misread.
    """
    import torch
    from vllm import _custom_ops as operators

    # Read with numba; another value later ends in its error.
    if "numba" not in sys.modules:
        os.environ.setdefault("NUMBA_NUM_THREADS", str(torch.get_num_threads()))
    for name in "create_onednn_mm", "create_onednn_scaled_mm":
        create = getattr(operators, name)
        if not isinstance(create, _Packing):
            setattr(operators, name, _Packing(create, torch.get_num_threads()))


def _mend_guesses() -> None:
    """Let vLLM's CPU backend sample guessed tokens by their request's temperature, top_p and top_k; once or more.

    vLLM 0.29 hands its kernel copies of both tensors in whole numbers (`vllm.utils.cpu_triton_utils._expand_kernel_impl`), so
    that logits are divided by what lay in memory: likely tokens were sampled as rarely as banned ones. A worker takes the
    kernel from this module when it starts, after plugins.
    """
    import torch
    from vllm.utils import cpu_triton_utils

    def expand(
        output: torch.Tensor,  # (N,)
        given: torch.Tensor,  # (B,)
        ends: torch.Tensor,  # (B,)
        replace_from: float,
        replace_to: float,
        **_: object,
    ) -> None:
        counts = torch.diff(ends, prepend=ends.new_zeros(1))
        output.copy_(given.masked_fill(given == replace_from, replace_to).repeat_interleave(counts))

    # What gives a function the syntax by which a kernel is launched.
    cpu_triton_utils.expand_kernel = type(cpu_triton_utils.expand_kernel)(expand)


class _Packing:
    """Packs weights with the same number of threads whenever it is called."""

    def __init__(self, create: Callable[..., object], threads: int) -> None:
        self._create, self._threads = create, threads

    def __call__(self, *args: Any, **kwargs: Any) -> object:
        import torch

        # vLLM's worker replaces torch.set_num_threads by a function that does nothing.
        set_threads, threads = torch._C.set_num_threads, torch.get_num_threads()
        set_threads(self._threads)
        try:
            return self._create(*args, **kwargs)
        finally:
            set_threads(threads)
