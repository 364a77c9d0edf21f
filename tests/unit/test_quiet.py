"""What libraries print that no user can do anything about is not shown, and everything else is."""

import logging
import os
import subprocess
import sys

import pytest
from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars
from transformers.utils import logging as transformers_logging

from lmm_r1 import quiet

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    monkeypatch.delenv("PYTHONWARNINGS", raising=False)
    hook = transformers_logging.set_tqdm_hook(None)
    # Whatever tests before have made of it.
    transformers_logging.enable_progress_bar()
    yield
    transformers_logging.set_tqdm_hook(hook)
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


def test_bitsandbytes_does_not_warn_of_a_kernel_that_is_not_used():
    quiet.prepare_process()
    assert not logging.getLogger("bitsandbytes.backends.cpu.ops").isEnabledFor(logging.WARNING)
