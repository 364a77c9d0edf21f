"""`--enforce_eager` of the commands that run engines outside of training: given to vLLM, refused where there is no vLLM."""

from pathlib import Path
from typing import Any

import pytest

from lmm_r1.config import evaluate, generation
from lmm_r1.config.evaluate import EvaluateConfig
from lmm_r1.config.generation import BatchConfig, ChatConfig
from lmm_r1.errors import UserError

pytestmark = pytest.mark.unit


def check(command: str, folder: Path, **flags: Any) -> None:
    given: dict[str, Any] = {
        "interactive_chat": {"model": "m"},
        "evaluate": {"checkpoints": ("a=m",), "files": ("b=rows.jsonl",), "output": folder / "scores.json"},
        "batch_inference": {"model": "m", "data": "rows.jsonl", "output": folder / "out.jsonl"},
    }[command]
    refuse, config_class = {
        "interactive_chat": (generation.check_chat, ChatConfig),
        "evaluate": (evaluate.check, EvaluateConfig),
        "batch_inference": (generation.check_batch, BatchConfig),
    }[command]
    refuse(config_class(**given, **flags))


@pytest.mark.parametrize(
    ("command", "flag", "value"),
    [
        ("interactive_chat", "backend", "transformers"),
        ("evaluate", "backend", "transformers"),
        ("batch_inference", "eval_task", "generate"),
        ("batch_inference", "eval_task", "rm"),
    ],
)
def test_switching_cuda_graphs_off_is_refused_where_nothing_has_them(command, flag, value, tmp_path):
    check(command, tmp_path, enforce_eager=True)
    check(command, tmp_path, **{flag: value})
    with pytest.raises(UserError, match=f"^--enforce_eager .* --{flag} {value} has none; leave it out$"):
        check(command, tmp_path, enforce_eager=True, **{flag: value})
