"""What of the processes' tests the full run alone has: each promise is tested once without them, on fewer settings."""

from collections.abc import Iterator
from pathlib import Path

import pytest

# By file; an empty tuple stands for all of its tests, else for those whose name holds one of the words.
FULL_RUN: dict[str, tuple[str, ...]] = {
    "test_agent_runs.py": ("branches_are_computed_once", "[served]"),
    "test_batch_inference.py": ("killed_five_times", "killed_ten_times", "an_adapter_is_merged_in", "two_engines"),
    "test_checkpoints.py": ("can_be_gone_on_from[1-", "can_be_gone_on_from[2-", "save_all_shards[2]"),
    "test_clusters.py": ("no_node_has_room", "path_that_a_node"),
    "test_critic_runs.py": (),
    "test_curriculum.py": (),
    "test_dpo.py": ("killed_run",),
    "test_dpo_steps.py": (
        "[shared prefixes, ZeRO-2",
        "adapters, ZeRO-2",
        "packed, ",
        "padded, ",
        "two pairs",
        "two ranks share",
        "checkpointing",
        "rewards, ZeRO-2",
        "DoRA",
    ),
    "test_finite_steps.py": ("[1-", "fp32", "in CPU memory"),
    "test_gradient_accumulation.py": ("offload", "fp16", "bf16-bf16", "zero_first"),
    "test_interactive_chat.py": ("thinks_dimly",),
    "test_kd.py": ("two_ranks_sample",),
    "test_killed_episodes.py": (),
    "test_killed_runs.py": (),
    "test_launched_ranks.py": ("that_fail",),
    "test_lost_workers.py": (),
    "test_media_nodes.py": (),
    "test_packed_training.py": (),
    "test_ray_collective.py": (),
    "test_stopped_commands.py": (),
    "test_serve_chat.py": ("[qwen3_vl]",),
    "test_reward_server.py": ("hangs_and_one_that_is_killed",),
    "test_rl_prompts.py": (),
    "test_row_formats.py": (),
    "test_zero_log_probs.py": (),
    "test_training_benchmarks.py": (),
    "test_two_ranks.py": (),
    "test_ulysses.py": ("four_ranks",),
    "test_video_rows.py": ("rolled_out_and_evaluated",),
    "test_worker_devices.py": (),
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        words = FULL_RUN.get(item.path.name) if item.path.parent == Path(__file__).parent else None
        if words is not None and (not words or any(word in item.name for word in words)):
            item.add_marker(pytest.mark.full)


@pytest.fixture(scope="module")
def one_process() -> Iterator[None]:
    """DeepSpeed with this process alone, once for all tests of a module."""
    from helpers import commands_here

    with commands_here.one_process():
        yield
