"""Which kits the heavy contract tests take in the short run; the full run takes all."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from helpers.tables import SOME

if TYPE_CHECKING:
    from lmm_r1.data.messages import Message
    from lmm_r1.lmm_kits import EncodedPrompt, LmmKit

SHORT_RUN = {
    "test_engine_gap.py": SOME,
    "test_kit_buffers.py": SOME,
    "test_kit_engines.py": SOME,
    "test_kit_features.py": SOME,
    "test_kit_generation.py": SOME,
    "test_kit_liger.py": SOME,
    "test_kit_packing.py": SOME,
    "test_kit_pairs.py": SOME,
    "test_kit_plans.py": frozenset({"qwen2_5_vl"}),
    "test_kit_runs.py": frozenset({"qwen2_5_vl"}),
    "test_kit_training.py": SOME,
    "test_kit_turn_options.py": frozenset({"qwen2_5_vl"}),
    "test_kit_trees.py": SOME,
    "test_kit_values.py": SOME,
    # Of its other tests none takes long.
    "test_kit_videos.py::test_the_engines_log_probs_are_those_of_the_training_forward": frozenset(
        {"qwen2_vl", "qwen2_5_vl", "qwen3_vl"}
    ),
    "test_kit_windows.py": SOME,
    "test_trajectories.py": SOME,
    "test_trajectory_engines.py": frozenset({"qwen2_5_vl"}),
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent != Path(__file__).parent or not isinstance(item, pytest.Function):
            continue
        kits = SHORT_RUN.get(item.path.name, SHORT_RUN.get(f"{item.path.name}::{item.originalname}"))
        if kits is not None and hasattr(item, "callspec"):
            if item.callspec.params.get("name", "qwen2_5_vl") not in kits:
                item.add_marker(pytest.mark.full)


@pytest.fixture
def kit(name: str) -> LmmKit:
    """The kit whose name a test is given."""
    from lmm_r1.lmm_kits import get_kit

    return get_kit(name)


@pytest.fixture
def processor(kit: LmmKit, tiny_checkpoint: Callable[[str], Path]) -> Any:
    return kit.load_processor(str(tiny_checkpoint(kit.model_type)), trust_remote_code=False)


@pytest.fixture(scope="module")
def prompts_of(tiny_checkpoint: Callable[[str], Path]) -> Callable[..., list[EncodedPrompt]]:
    """A function from a kit's name and conversations to their prompts, each encoded by itself."""
    from helpers.tiny_models import encode

    from lmm_r1.lmm_kits import get_kit

    @cache
    def processor(name: str) -> Any:
        return get_kit(name).load_processor(str(tiny_checkpoint(name)), trust_remote_code=False)

    def prompts(name: str, *conversations: list[Message]) -> list[EncodedPrompt]:
        return [encode(get_kit(name), processor(name), messages) for messages in conversations]

    return prompts


@pytest.fixture(scope="session")
def larger_teacher(built_once: Callable[..., Path]) -> Callable[[str], Path]:
    """A function from a kit's name to a checkpoint that is larger than the tiny one, and surer of its predictions."""
    from helpers.kd_steps import build_teacher

    from lmm_r1.lmm_kits import get_kit

    def teacher(name: str) -> Path:
        return built_once(f"teacher/{name}", lambda folder: build_teacher(get_kit(name), folder))

    return teacher
