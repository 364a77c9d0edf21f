"""What generating and training at the same time goes with, and what has no part without it."""

from lmm_r1.config.ppo import PPOConfig, PPOTrainConfig
from lmm_r1.errors import UserError


def check_async(config: PPOConfig) -> None:
    """Raise UserError for settings that contradict `--train.async_enable`, or that need it."""
    train = config.train
    if not train.async_enable:
        if train.partial_rollout_enable:
            raise UserError(
                "--train.partial_rollout_enable lets responses run on while the policy is updated; give --train.async_enable, "
                "too"
            )
        if train.async_queue_size != PPOTrainConfig.async_queue_size:
            raise UserError(
                f"--train.async_queue_size {train.async_queue_size} bounds how far rollouts are made ahead of the update; "
                "give --train.async_enable, too"
            )
        return
    if train.async_queue_size < 1:
        raise UserError(
            f"--train.async_queue_size {train.async_queue_size} must be at least 1; without --train.async_enable no rollout "
            "is made ahead"
        )
    if train.colocate_all:
        raise UserError(
            "--train.async_enable generates and trains at the same time, and with --train.colocate_all engines and policy "
            "take turns on the same GPUs; leave one of them out"
        )
    if config.ds.enable_sleep:
        raise UserError(
            "--ds.enable_sleep frees the policy's memory while responses are generated, which is all the time with "
            "--train.async_enable; leave one of them out"
        )
