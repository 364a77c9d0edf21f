"""What the tests of several folders share."""

import gc
import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
from filelock import FileLock
from helpers.processes import keep_frozen, thaw
from helpers.tables import SOME

from lmm_r1 import cpu
from lmm_r1.config import shared
from lmm_r1.lmm_kits import KITS

# Workers of pytest-xdist share the cores: two processes of two threads each run four times slower than one.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
# Read when torch is imported: else vLLM compiles two helpers of its sampler, for 20 s.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
# The training stack is an extra: without it, what imports it cannot be collected.
ROOMS = """
tools/batch checkpoints models tools/planning scoring rl supervised host generation records/trackers train lmm_kits
""".split()
if importlib.util.find_spec("openrlhf") is None:
    collect_ignore_glob = [
        *(f"unit/{room}/*" for room in ROOMS),
        *("unit/files/test_full_disk.py", "unit/test_cpu.py", "contracts/*", "integration/*"),
    ]
else:
    # Test modules import transformers before anything of ours. Processes that tests start inherit it by PYTHONPATH; tests
    # of commands as a user has them (`test_interactive_chat`, `test_quiet`) set their own.
    cpu.prepare()
# A name that is no folder must not be looked up over the network.
os.environ["HF_HUB_OFFLINE"] = "1"

TESTS = Path(__file__).parent
KINDS = {"unit": "unit", "contracts": "contract", "integration": "integration"}

gc.set_threshold(50_000, 20, 100)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by their folder, those of other kits than `SOME` as `full`, and put the files of slow ones first.

    A slow one that came last would keep one worker while the other has nothing to do.
    """
    for item in items:
        if item.path.is_relative_to(TESTS):
            item.add_marker(KINDS[item.path.relative_to(TESTS).parts[0]])
        values = (
            item.callspec.params.values() if isinstance(item, pytest.Function) and hasattr(item, "callspec") else ()
        )
        kits = {value for value in values if isinstance(value, str)}
        if item.path.parent.name == "lmm_kits":
            # A file that is named after its kit; `llm` stands for all without images.
            kits = {item.path.stem.removeprefix("test_")} - {"llm"}
        kits &= KITS.keys()
        if kits and not kits & SOME:
            item.add_marker(pytest.mark.full)
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish() -> None:
    keep_frozen()


def pytest_sessionfinish() -> None:
    thaw()


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Name a failed test at once: pytest's summary comes after the last test, and workers print one letter for each."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        sys.__stdout__.write(f"\nFAILED {report.nodeid} ({report.when})\n")
        sys.__stdout__.flush()


@pytest.fixture(scope="session", autouse=True)
def one_minute() -> Iterator[None]:
    """Runs that are not given a name are all named after one minute: two that are compared may be made in two."""
    with pytest.MonkeyPatch.context() as patch:
        minute = datetime(2026, 11, 26, 13, 7)
        patch.setattr(shared, "datetime", SimpleNamespace(now=lambda: minute))
        yield


@pytest.fixture(scope="session", autouse=True)
def clusters_of_runs() -> Iterator[None]:
    """Runs that would start a Ray cluster on this machine join one that is kept for them."""
    if importlib.util.find_spec("ray") is None:
        yield
        return
    from helpers.kept_cluster import kept_clusters

    with kept_clusters():
        yield


@pytest.fixture(autouse=True)
def upstream_put_back() -> Iterator[None]:
    """What a training on the CPU replaces upstream, for its own process, is there again for the next test."""
    yield
    if strategy := sys.modules.get("openrlhf.utils.deepspeed.deepspeed"):
        strategy.init_device_mesh = sys.modules["torch.distributed.device_mesh"].init_device_mesh


@pytest.fixture
def own_environment() -> Iterator[None]:
    """Keeps what a command sets for the processes it starts from reaching other tests."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def new_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    from helpers.commands_here import start_anew

    start_anew(monkeypatch)


@pytest.fixture(scope="session")
def built_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], None]], Path]:
    """A function (name, build) that returns a folder which `build` has filled, once for all workers of a test run."""
    base = tmp_path_factory.getbasetemp()
    root = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "built"

    def folder_of(name: str, build: Callable[[Path], None]) -> Path:
        folder, whole = root / name, root / f"{name}.whole"
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not whole.exists():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                build(folder)
                whole.touch()
        return folder

    return folder_of


@pytest.fixture(scope="session")
def tiny_checkpoint(built_once: Callable[..., Path]) -> Callable[[str], Path]:
    """A function from a kit's name to the folder of its tiny checkpoint, which is built once per test run."""
    from helpers.tiny_models import build_checkpoint

    from lmm_r1.lmm_kits import get_kit

    def checkpoint(name: str) -> Path:
        return built_once(f"tiny/{name}", lambda folder: build_checkpoint(get_kit(name), folder))

    return checkpoint


@pytest.fixture(scope="session")
def demo(built_once: Callable[..., Path]) -> Path:
    """The demo's model after a short cold start, and held-out rows: `model`, `tiny` (untrained), `text`, `image`."""
    from helpers.tiny_models import build_demo

    return built_once("demo", build_demo)
