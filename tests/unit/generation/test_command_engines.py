"""What the commands outside of training ask their engine for."""

import importlib
from pathlib import Path
from typing import Any

import pytest
from helpers.commands import QUESTION, flags, write_rows

from lmm_r1.batch import run
from lmm_r1.chat.chat_model import load_model
from lmm_r1.config.generation import BatchConfig, ChatConfig
from lmm_r1.evaluation import measurement
from lmm_r1.generation import engine as backends
from lmm_r1.generation.engine import EngineSettings


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
