"""How many steps a run has, and what its groups are generated with."""

from lmm_r1 import dotted
from lmm_r1.config import PPOConfig
from lmm_r1.rl.loop import optimizer_steps, total_steps


def config(**changes: object) -> PPOConfig:
    return dotted.replace(PPOConfig(), {name.replace("__", "."): value for name, value in changes.items()})


def test_steps_are_counted_per_episode_without_its_short_last_batch():
    settings = config(rollout__batch_size=32, train__num_episodes=3)
    assert total_steps(settings, num_rows=100) == 9  # 3 full batches of 32 in each of 3 episodes
    assert total_steps(settings, num_rows=96) == 9
    assert total_steps(settings, num_rows=95) == 6


def test_a_run_has_at_most_the_steps_that_are_given_and_its_learning_rate_is_scheduled_over_them():
    settings = config(
        rollout__batch_size=32,
        rollout__n_samples_per_prompt=8,
        train__batch_size=128,
        train__num_episodes=3,
        train__max_steps=4,
    )
    assert total_steps(settings, num_rows=100) == 4
    assert total_steps(settings, num_rows=32) == 3  # the prompts end earlier
    assert optimizer_steps(settings, num_rows=100) == 4 * 2


def test_a_step_updates_once_per_training_batch_and_inner_epoch():
    settings = config(
        rollout__batch_size=32,
        rollout__n_samples_per_prompt=8,
        train__batch_size=100,
        train__max_epochs=2,
        train__num_episodes=3,
    )
    assert optimizer_steps(settings, num_rows=100) == 9 * 3 * 2  # 256 samples are batches of 100, 100 and 56
    # A policy that waits while the critic learns is scheduled over its own updates.
    assert optimizer_steps(settings, num_rows=100, waits=4) == 5 * 3 * 2
    assert optimizer_steps(settings, num_rows=100, waits=12) == 0
