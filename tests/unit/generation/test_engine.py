"""Engines: what both sides use of vLLM's, which kits a backend takes, and what commands outside of training ask for."""

import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest
from helpers.commands import QUESTION, flags, write_rows
from helpers.tiny_models import altered
from vllm.v1.engine.async_llm import AsyncLLM

from lmm_r1.config.generation import BatchConfig, ChatConfig
from lmm_r1.errors import UserError
from lmm_r1.generation import engine as backends
from lmm_r1.generation.engine import FINE_TUNE, EngineSettings, TokenEngine, check_backend
from lmm_r1.generation.vllm_engine import InProcessEngine
from lmm_r1.lmm_kits import get_kit
from lmm_r1.tools.batch import run
from lmm_r1.tools.chat import load_model
from lmm_r1.tools.evaluation import measurement

METHODS = [name for name, value in vars(TokenEngine).items() if inspect.isfunction(value) and not name.startswith("_")]


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("engine", [AsyncLLM, InProcessEngine])
def test_a_method_is_called_on_each_engine_alike(engine: type, name: str) -> None:
    wanted = list(inspect.signature(getattr(TokenEngine, name)).parameters.values())
    has = list(inspect.signature(getattr(engine, name)).parameters.values())
    assert [one.name for one in has[: len(wanted)]] == [one.name for one in wanted]
    assert all(one.default is not inspect.Parameter.empty for one in has[len(wanted) :]), "more that must be given"


KIT = get_kit("llm")
WITHOUT_ENGINE = altered(KIT, engine_refusal="it has no class for it")


def test_a_kit_without_an_engine_is_refused_with_its_reason_and_what_it_can_do():
    check_backend("vllm", KIT, model="--actor.model_name_or_path m", instead=FINE_TUNE)
    with pytest.raises(UserError, match=r"--actor.model_name_or_path m: .*no class.*train_sft"):
        check_backend("vllm", WITHOUT_ENGINE, model="--actor.model_name_or_path m", instead=FINE_TUNE)


class Asked(Exception):
    """Raised in the place of an engine that was asked for."""

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__("an engine was asked for")
        self.settings = settings


def ask(backend: str, path: str, settings: EngineSettings) -> None:
    raise Asked(settings)


def start(command: str, model: str, folder: Path, *, enforce_eager: bool) -> None:
    rows = write_rows(folder, QUESTION)
    if command == "interactive_chat":
        load_model(ChatConfig(model=model, enforce_eager=enforce_eager))
    elif command == "batch_inference":
        output = folder / "out.jsonl"
        run.run_batch(
            BatchConfig(model=model, data=str(rows), output=output, enforce_eager=enforce_eager), progress=pytest.fail
        )
    else:
        given: dict[str, Any] = {"checkpoints": f"a={model}", "files": f"b={rows}", "output": folder / "scores.json"}
        argv = [*flags(given), *(["--enforce_eager"] if enforce_eager else [])]
        importlib.import_module("lmm_r1.cli.evaluate").main(argv)


@pytest.mark.parametrize("enforce_eager", [True, False])
@pytest.mark.parametrize("command", ["interactive_chat", "evaluate", "batch_inference"])
def test_cuda_graphs_are_on_unless_the_command_switches_them_off(
    command, enforce_eager, tiny_checkpoint, tmp_path, monkeypatch
):
    for module in (backends, run, measurement):
        monkeypatch.setattr(module, "prepare_process", lambda: None)
    for module in (backends, run, measurement):
        monkeypatch.setattr(module, "make_engine", ask)
    with pytest.raises(Asked) as asked:
        start(command, str(tiny_checkpoint("llm")), tmp_path, enforce_eager=enforce_eager)
    # None is left to the size of the model.
    assert bool(asked.value.settings.enforce_eager) is enforce_eager
