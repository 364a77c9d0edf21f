"""What of the processes' tests the full run alone has: each promise is tested once without them, on fewer settings."""

from collections.abc import Iterator
from pathlib import Path

import pytest

# By file; an empty tuple stands for all of its tests, else for those whose name holds one of the words.
FULL_RUN: dict[str, tuple[str, ...]] = {
    "test_agent_runs.py": ("branches_are_computed_once", "in_openrlhfs_form"),
    "test_bad_input.py": ("than_the_sentence[train_ppo_ray",),
    "test_batch_inference.py": ("an_adapter_is_merged_in", "killed_three_times"),
    "test_checkpoints.py": ("can_be_gone_on_from[1-", "can_be_gone_on_from[2-", "save_all_shards"),
    "test_closed_cluster.py": ("[auth0]",),
    "test_clusters.py": (),
    "test_curriculum.py": (),
    "test_dpo.py": ("killed_run",),
    "test_engine_process.py": (),
    "test_evaluate_errors.py": ("left_out_and_never_cut",),
    "test_finite_steps.py": ("fp32",),
    "test_gradient_accumulation.py": ("offload", "fp16", "bf16-bf16", "zero_first"),
    "test_kd.py": (),
    "test_killed_episodes.py": (),
    "test_killed_runs.py": (),
    "test_launched_ranks.py": ("that_fail",),
    "test_lost_workers.py": (),
    "test_other_gpus.py": (),
    "test_reward_server.py": ("hangs_and_one_that_is_killed",),
    "test_rl_prompts.py": (),
    "test_serve_chat.py": ("[qwen3_vl]",),
    "test_stage_scripts.py": ("a_stopped_stage",),
    "test_start_order.py": ("[False]", "start_their_processes"),
    "test_stopped_commands.py": (),
    "test_training_benchmarks.py": (),
    "test_two_processes_save.py": (),
    "test_two_ranks.py": (),
    "test_ulysses.py": (
        "four_ranks",
        "in_double",
        "whatever_trains",
        "branches",
        "phi4_multimodal",
        "gemma3",
        "[two_ranks-2",
    ),
    "test_verifier_rewards.py": ("names_no_reward",),
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
