"""What libraries print that no user can act on is not shown, and the garbage collector looks seldom while they are loaded."""

import gc
import logging
import os
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars
from tqdm.std import tqdm
from transformers.utils import logging as transformers_logging

from lmm_r1 import quiet


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    monkeypatch.delenv("PYTHONWARNINGS", raising=False)
    # Whatever tests before have made of it.
    transformers_logging.enable_progress_bar()
    with monkeypatch.context() as patch:
        patch.setattr(tqdm, "__init__", getattr(tqdm.__init__, "__wrapped__", tqdm.__init__))
        yield
    enable_progress_bars()


@pytest.mark.parametrize(
    ("what", "shown"), [("Loading weights", False), ("Writing model shards", False), ("Downloading", True)]
)
def test_of_the_bars_of_transformers_those_of_models_in_memory_are_not_shown(what, shown, capsys):
    quiet.prepare_process()
    assert list(transformers_logging.tqdm([1, 2], desc=what)) == [1, 2]
    assert (what in capsys.readouterr().err) is shown


def test_a_process_that_imports_pynvml_before_anything_of_ours_says_nothing_of_it(monkeypatch):
    alone = [sys.executable, "-c", "import pynvml"]
    assert "pynvml package is deprecated" in subprocess.run(alone, capture_output=True, text=True).stderr
    quiet.prepare_process()
    assert subprocess.run(alone, capture_output=True, text=True).stderr == ""


def test_warnings_that_the_user_has_asked_for_stay_and_are_added_to_once(monkeypatch):
    monkeypatch.setenv("PYTHONWARNINGS", "error::DeprecationWarning")
    quiet.prepare_process()
    quiet.prepare_process()
    kept = "error::DeprecationWarning,ignore:The pynvml package is deprecated:FutureWarning"
    assert os.environ["PYTHONWARNINGS"] == kept


@pytest.mark.parametrize(("rank", "off"), [("0", False), ("3", True)])
def test_one_rank_shows_how_far_a_download_is(rank, off, monkeypatch):
    monkeypatch.setenv("RANK", rank)
    quiet.prepare_process()
    assert are_progress_bars_disabled() is off


def python(code: str, *flags: str) -> str:
    """What a new process prints to stderr that shows all warnings, of the upstream code alone."""
    done = subprocess.run([sys.executable, *flags, "-c", code], capture_output=True, text=True, check=True)
    return done.stderr


def test_a_command_that_loads_models_without_training_says_nothing_of_kernels_and_accelerators(tmp_path):
    loaded = "import deepspeed.utils"
    # PyTorch imports this package by its entry point, which is switched off to see what DeepSpeed says by itself.
    environment = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
    environment["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"

    def said(code: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=tmp_path
        )
        return done.stdout + done.stderr

    assert "Setting accelerator to CPU" in said(loaded)
    assert said(f"import lmm_r1, bitsandbytes; {loaded}") == ""


COMPILED = """
import importlib.util
from pathlib import Path
file = Path(importlib.util.find_spec("openrlhf").origin).parent / "utils/math_utils.py"
compile(file.read_text(), str(file), "exec")
"""


def test_openrlhfs_escape_sequence_is_compiled_without_a_word_and_those_of_others_are_told():
    assert "invalid escape sequence" in python(COMPILED, "-W", "always")
    assert python("import lmm_r1" + COMPILED, "-W", "always") == ""
    own = python("import lmm_r1; compile(chr(34) + chr(92) + '%' + chr(34), 'own.py', 'eval')", "-W", "always")
    assert "invalid escape sequence" in own


GATHERED = """
import torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
from deepspeed.comm.torch import TorchBackend
backend = object.__new__(TorchBackend)
backend.all_gather_function, backend.reduce_scatter_function = backend.get_all_gather_function(), backend.get_reduce_scatter_function()
whole, part = torch.zeros(2), torch.ones(2)
backend.all_gather_into_tensor(whole, part)
backend.reduce_scatter_tensor(part, whole)
assert whole.tolist() == part.tolist() == [1.0, 1.0]
dist.destroy_process_group()
"""


def test_deepspeeds_collectives_call_pytorchs_by_their_old_names_without_a_word(monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    # Without the names of ours: `import torch` loads this package.
    told = python("import warnings, torch; warnings.resetwarnings()" + GATHERED)
    assert "all_gather_into_tensor` is deprecated" in told
    assert "reduce_scatter_tensor` is deprecated" in told
    assert "deprecated" not in python("import lmm_r1" + GATHERED)


def captured() -> None:
    """Let vLLM go through its batch sizes as it does when it captures CUDA graphs."""
    from vllm.config import CUDAGraphMode
    from vllm.v1.worker.gpu import cudagraph_utils

    manager = object.__new__(cudagraph_utils.CudaGraphManager)
    manager.device, manager.use_breakable_cg = None, False
    manager._capture_descs = {CUDAGraphMode.PIECEWISE: [SimpleNamespace(cg_mode=CUDAGraphMode.PIECEWISE)]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cudagraph_utils, "graph_capture", lambda device: nullcontext())
        manager.capture(lambda desc, warmup: lambda mode: None)


def test_vllms_bars_of_cuda_graphs_are_not_shown(capsys):
    captured()
    assert "Capturing CUDA graphs (PIECEWISE): 100%" in capsys.readouterr().err
    quiet.prepare_process()
    captured()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "desc", ["JIT kernel warmup (3 compile keys)", "DeepGEMM warmup", "Compiling CuTeDSL kernels"]
)
def test_nor_are_those_of_its_other_warm_ups_by_name_or_by_place(desc, capsys):
    quiet.prepare_process()
    assert list(tqdm([1, 2], desc=desc)) == list(tqdm([1, 2], desc)) == [1, 2]
    assert capsys.readouterr().err == ""
    list(tqdm([1, 2], "Weights of others"))
    assert "Weights of others: 100%" in capsys.readouterr().err


def test_vllm_does_not_tell_that_prompts_are_token_ids_and_tells_everything_else(monkeypatch):
    from vllm.logger import _print_warning_once
    from vllm.v1.engine.input_processor import InputProcessor

    processor = object.__new__(InputProcessor)
    processor._validate_params = processor._validate_lora = lambda *given: None
    one = SimpleNamespace(data_parallel_size=1, data_parallel_size_local=1, local_engines_only=False)
    processor.vllm_config = SimpleNamespace(parallel_config=one)
    told: list[str] = []
    handler, logger = logging.Handler(), logging.getLogger("vllm.v1.engine.input_processor")
    handler.emit = lambda record: told.append(record.getMessage())
    for name, value in {"handlers": [handler], "filters": [], "level": logging.WARNING, "propagate": False}.items():
        monkeypatch.setattr(logger, name, value)

    def given() -> None:
        """Hand it a prompt; it goes on with a renderer, which is not there."""
        _print_warning_once.cache_clear()
        with pytest.raises(AttributeError):
            processor.process_inputs("1", {"prompt_token_ids": [1]}, None, ())

    given()
    assert [line[:45] for line in told] == ["Passing raw prompts to InputProcessor is depr"]
    quiet.prepare_process()
    given()
    logger.warning("something else")
    assert told[1:] == ["something else"]


def test_a_process_that_has_loaded_deepspeed_writes_no_tables_of_its_kernels_at_its_end(tmp_path):
    # On a full disk they could not be written, and a traceback told so behind everything.
    load = "import lmm_r1, deepspeed.ops.transformer.inference.triton.matmul_ext as tables; print(tables.deepspeed.HAS_TRITON)"
    ended = subprocess.run(
        [sys.executable, "-c", load], env={**os.environ, "HOME": str(tmp_path)}, capture_output=True, text=True
    )
    assert ended.stdout.endswith("True\n")
    assert not list(tmp_path.rglob("*.pickle"))
    assert "Traceback" not in ended.stderr


PROGRAM = """
import gc
usual = gc.get_threshold()
from lmm_r1 import quiet
quiet.begin_loading()
assert gc.get_threshold()[0] > 10 * usual[0]
held = [[] for _ in range(1000)]
quiet.done_loading()
assert gc.get_threshold() == usual
assert gc.get_freeze_count() > 1000
class Told:
    def __del__(self):
        print("collected")
told = Told()
told.itself = told
del told
gc.collect()
print("ended")
"""


def test_garbage_of_later_is_collected_and_nothing_stays_frozen_at_the_end():
    program = "import atexit, gc\natexit.register(lambda: print('frozen', gc.get_freeze_count()))\n" + PROGRAM
    output = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert output.split("\n")[:3] == ["collected", "ended", "frozen 0"]


def test_a_second_model_in_one_process_finds_the_usual_settings_again():
    from lmm_r1 import quiet

    before = gc.get_threshold()
    try:
        for _ in range(2):
            quiet.begin_loading()
            quiet.done_loading()
            assert gc.get_threshold() == quiet._USUAL
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)
