"""Critic and reward model: where the critic starts from, and which flags must go together."""

import logging

from lmm_r1.config.ppo import PPOConfig
from lmm_r1.errors import UserError

logger = logging.getLogger(__name__)


def value_model_settings(config: PPOConfig) -> dict[str, object]:
    """Return what follows for critic and reward model: no critic without GAE, and nobody to share GPUs with alone."""
    critic = None
    if config.algo.advantage.estimator == "gae":
        reward_model = None if config.reward.remote_url else config.reward.model_name_or_path
        critic = config.critic.model_name_or_path or reward_model or config.actor.model_name_or_path
    settings: dict[str, object] = {"critic.model_name_or_path": critic}
    if config.train.colocate_critic_reward and not (critic and config.reward.model_name_or_path):
        logger.warning("--train.colocate_critic_reward is off: there is no critic, or no reward model")
        settings["train.colocate_critic_reward"] = False
    return settings


def check_value_models(config: PPOConfig) -> None:
    """Raise UserError where flags of a resolved config contradict each other in what they say of the two."""
    _check_reward_source(config)
    if config.critic.model_name_or_path is None and config.critic.freezing_steps >= 0:
        raise UserError(
            f"--critic.freezing_steps {config.critic.freezing_steps} leaves nothing to learn without a critic; take "
            "--algo.advantage.estimator gae or leave it out"
        )
    names = [name for name in ("critic", "reward") if getattr(config, name).model_name_or_path]
    if not names:
        return
    if config.ds.tensor_parallel_size > 1:
        raise UserError(
            f"--ds.tensor_parallel_size {config.ds.tensor_parallel_size} would split the value head of a critic or "
            "reward model; leave it out"
        )
    if config.train.colocate_critic_reward:
        _check_equal(config, "critic", "reward", because="--train.colocate_critic_reward")
    elif config.train.colocate_all:
        for name in names:
            _check_equal(config, "actor", name, because="--train.colocate_all")


def _check_reward_source(config: PPOConfig) -> None:
    model, url = config.reward.model_name_or_path, config.reward.remote_url
    if model and url:
        raise UserError(f"--reward.remote_url {url} and --reward.model_name_or_path {model}: give one of them")
    if not (model or url):
        raise UserError(
            "nothing gives rewards: start `python -m remote_rm.math_verifier` and give its address, "
            "for example --reward.remote_url http://127.0.0.1:5000/get_reward"
        )
    if not model:
        return
    for flag, given in (
        (f"--eval.dataset {config.eval.dataset}", config.eval.dataset),
        ("--algo.dynamic_filtering_enable", config.algo.dynamic_filtering_enable),
    ):
        if given:
            raise UserError(f"{flag} needs --reward.remote_url: a reward model scores only what is trained on")


def _check_equal(config: PPOConfig, one: str, other: str, *, because: str) -> None:
    for name in ("num_nodes", "num_gpus_per_node"):
        ours, theirs = (getattr(getattr(config, group), name) for group in (one, other))
        if ours != theirs:
            raise UserError(f"with {because}, --{one}.{name} {ours} and --{other}.{name} {theirs} must be equal")
