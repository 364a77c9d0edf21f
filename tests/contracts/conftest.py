"""Which kits the heavy contract tests take in the short run; the full run takes all."""

from pathlib import Path

import pytest

# One without images, one with bidirectional attention to them, one with M-RoPE and videos.
SOME = frozenset({"llm", "gemma3", "qwen2_5_vl"})
SHORT_RUN = {
    "test_engine_gap.py": SOME,
    "test_kit_buffers.py": SOME,
    "test_kit_engines.py": SOME,
    "test_kit_generation.py": SOME,
    "test_kit_masked.py": SOME,
    "test_kit_packing.py": SOME,
    "test_kit_plans.py": frozenset({"qwen2_5_vl"}),
    "test_kit_runs.py": frozenset({"qwen2_5_vl"}),
    "test_kit_training.py": SOME,
    "test_kit_trees.py": SOME,
    "test_kit_turn_options.py": frozenset({"qwen2_5_vl"}),
    "test_kit_values.py": SOME,
    "test_kit_windows.py": SOME,
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        kits = SHORT_RUN.get(item.path.name) if item.path.parent == Path(__file__).parent else None
        if kits is not None and isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            if item.callspec.params.get("name", "qwen2_5_vl") not in kits:
                item.add_marker(pytest.mark.full)
