"""Library output that no user can act on is hidden, and the garbage collector runs rarely while libraries load."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tomllib
from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars
from transformers.utils import logging as transformers_logging

from lmm_r1 import quiet

ROOT = Path(__file__).resolve().parents[2]
ALONE = {name: value for name, value in os.environ.items() if name not in ("PYTHONWARNINGS", "DS_ACCELERATOR")}
ALONE |= {"PYTHONPATH": str(ROOT)}


def said(code: str, *flags: str) -> str:
    """What a new process prints."""
    command = [sys.executable, *flags, "-c", code]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, env=ALONE)
    return done.stdout


def test_nothing_of_ours_runs_where_another_program_imports_torch():
    entries = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    # vLLM calls it for its models; no other library looks for anything of ours.
    assert entries == {"vllm.general_plugins": {"lmm_r1": "lmm_r1.lmm_kits.engine_plugin:register"}}
    loaded = "import sys, torch; print([name for name in sys.modules if name.startswith(('lmm_r1', 'remote_rm'))])"
    assert said(loaded, "-W", "ignore") == "[]\n"


def test_processes_that_a_prepared_one_starts_can_load_models_beside_a_torchvision_for_cuda(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("""
import importlib, multiprocessing, subprocess, sys

if __name__ == "__main__":
    from lmm_r1 import cpu

    cpu.prepare()
    print(subprocess.run([sys.executable, "-c", "import torch, transformers.image_utils"]).returncode, flush=True)
    spawn = multiprocessing.get_context("spawn")
    child = spawn.Process(target=importlib.import_module, args=["transformers.image_utils"])
    child.start()
    child.join()
    print(child.exitcode)
""")
    ran = subprocess.run([sys.executable, "-W", "ignore", program], capture_output=True, text=True, env=ALONE)
    assert ran.stdout == "0\n0\n", ran.stderr


def test_importing_the_package_changes_nothing():
    state = "(list(sys.meta_path), list(warnings.filters), dict(os.environ), logging.getLogger('DeepSpeed').filters)"
    code = f"import logging, os, sys, warnings\nbefore = {state}\nimport lmm_r1, lmm_r1.cpu\nprint(before == {state})"
    assert said(code) == "True\n"


def test_a_command_loads_torch_and_deepspeed_without_a_word():
    loads = "import torch, deepspeed.utils"
    told = said(loads)
    assert "pynvml package is deprecated" in told
    assert "Setting accelerator to CPU" in told
    assert said(f"import lmm_r1.cli; {loads}") == ""


@pytest.mark.parametrize(("rank", "hidden"), [("0", False), ("3", True)])
def test_bars_of_models_are_hidden_and_one_rank_shows_downloads(rank, hidden, monkeypatch, capsys):
    monkeypatch.setenv("RANK", rank)
    try:
        quiet.hide_bars()
        assert are_progress_bars_disabled() is hidden
        assert list(transformers_logging.tqdm([1, 2], desc="Loading weights")) == [1, 2]
        assert capsys.readouterr().err == ""
    finally:
        transformers_logging.enable_progress_bar()
        enable_progress_bars()


def test_warnings_that_the_user_has_asked_for_stay_and_are_added_to_once(monkeypatch):
    monkeypatch.setenv("PYTHONWARNINGS", "error::DeprecationWarning")
    quiet.hide_warnings()
    quiet.hide_warnings()
    kept = "error::DeprecationWarning,ignore:The pynvml package is deprecated:FutureWarning"
    assert os.environ["PYTHONWARNINGS"] == kept


def test_lines_of_libraries_are_hidden_by_their_beginning():
    quiet.hide_warnings()
    pad = "Model config: pad_token_id must be `None` or an integer within the vocabulary (between 0 and"
    for name, line, shown in (
        ("vllm.v1.engine.input_processor", "Passing raw prompts to InputProcessor is deprecated, and", False),
        ("transformers.configuration_utils", f"{pad} 31999), got 128002. This may result in", False),
        ("transformers.configuration_utils", f"{pad} 49279), got 49280. This may result in", True),
    ):
        logger = logging.getLogger(name)
        assert bool(logger.filter(logging.makeLogRecord({"name": logger.name, "msg": line}))) is shown


PROGRAM = """
import atexit, gc
atexit.register(lambda: print("frozen", gc.get_freeze_count()))
usual = gc.get_threshold()
from lmm_r1 import quiet
# A second model in the process finds the usual settings again.
for _ in range(2):
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
"""


def test_garbage_of_later_is_collected_and_nothing_stays_frozen_at_the_end():
    assert said(PROGRAM) == "collected\nfrozen 0\n"
