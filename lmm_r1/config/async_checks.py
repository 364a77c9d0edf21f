"""What responses that go on across updates go with, asynchronous or held over, and what has no part without them."""

from lmm_r1.config.ppo import PPOConfig, PPOTrainConfig, RolloutConfig
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


def check_oversampling(config: PPOConfig) -> None:
    """Raise UserError for settings that contradict `--rollout.oversample`, or that need it; the batch may be open."""
    rollout = config.rollout
    given, held = f"--rollout.oversample {rollout.oversample:g}", rollout.oversample_max_held
    if not 1 <= rollout.oversample <= 2:
        raise UserError(
            f"{given} must be between 1, where every rollout waits for all of its groups, and 2: of more, those that are held "
            "over would not all find room in the next step"
        )
    if held < 1:
        raise UserError(f"--rollout.oversample_max_held {held} must be at least 1")
    if rollout.oversample == 1:
        if held != RolloutConfig.oversample_max_held:
            raise UserError(
                f"--rollout.oversample_max_held {held} bounds how long groups are held over; give --rollout.oversample, too"
            )
        return
    if config.train.async_enable:
        raise UserError(
            f"{given} holds groups over while the policy is updated, and --train.async_enable generates on, with ages that "
            "--train.async_queue_size bounds for whole rollouts; leave one of them out"
        )
    limit = rollout.vllm_generate_batch_size
    # A size that is open yet may be any.
    if limit is not None and (not rollout.batch_size or limit < rollout.batch_size):
        raise UserError(
            f"{given} lets the engines have more prompts than a step has, and --rollout.vllm_generate_batch_size {limit} "
            "fewer; leave one of them out"
        )
