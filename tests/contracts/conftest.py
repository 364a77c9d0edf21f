"""What contract tests share."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from lmm_r1.data.messages import Message
    from lmm_r1.lmm_kits import EncodedPrompt, LmmKit

# Tests take long whose names begin so: the short run has them for one of the kits of `SOME`,
OF_ONE_KIT = (
    "test_kit_liger.py",
    "test_kit_plans.py",
    "test_kit_runs.py",
    "test_kit_videos.py::test_the_engines_log_probs_are_those_of_the_training_forward",
)
# or not at all.
FULL_RUN = (
    "test_default_plans.py::test_a_plan_ends_with_a_command_that_fits[3B-24",
    "test_default_plans.py::test_a_plan_ends_with_a_command_that_fits[3B-40",
    "test_default_plans.py::test_a_plan_reads_how_large_the_images_of_the_rows_are[train_dpo",
    "test_derived_kits.py::test_a_check_that_fails",
    "test_derived_kits.py::test_an_attention_that_takes",
    "test_derived_kits.py::test_the_command_prints",
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        test = item.nodeid.removeprefix("tests/contracts/")
        other = hasattr(item, "callspec") and item.callspec.params.get("name", "qwen2_5_vl") != "qwen2_5_vl"
        if test.startswith(FULL_RUN) or (other and test.startswith(OF_ONE_KIT)):
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
