"""Refusals of flags that contradict each other beyond what each declares (`config.declared`), before anything starts."""

from collections.abc import Mapping

from lmm_r1 import dotted
from lmm_r1.config.declared import check_needs, check_ranges, given
from lmm_r1.config.ppo import CLIP_RANGES, PPOConfig, RewardConfig
from lmm_r1.config.preferences import DPOConfig, RMConfig
from lmm_r1.config.rewards import named_verifier, part_weights, reward_functions
from lmm_r1.config.shared import DeepSpeedConfig, ThoughtConfig
from lmm_r1.config.supervised import KDConfig, SupervisedConfig
from lmm_r1.errors import UserError


def check_ppo(config: PPOConfig) -> None:
    """Raise UserError for the first contradiction in a config in which every value is filled in."""
    samples = config.rollout.n_samples_per_prompt
    if config.train.plays and samples % config.agent.branches:
        raise UserError(
            f"--agent.branches {config.agent.branches} must divide --rollout.n_samples_per_prompt {samples}, of which as many "
            "at a time have turns in common"
        )
    _check_reward_source(config)
    _check_algorithm(config)
    _check_shared_gpus(config)
    packs = config.train.shared_prefix_enable and config.rollout.n_samples_per_prompt > 1
    _check_ulysses(config.ds, packs=config.ds.packing_samples or packs, gpus=model_gpus(config))
    check_batches(config)


def check_supervised(config: SupervisedConfig) -> None:
    """Raise UserError for the first contradiction in a config in which every value is filled in but a reference."""
    if isinstance(config, KDConfig):
        require(config, "teacher.model_name_or_path", example="path/or/hub-name")
    key = config.ckpt.best_metric_key
    if key not in ("", "none") and not key.startswith("eval_"):
        raise UserError(
            f"--ckpt.best_metric_key {key} names no metric of an evaluation; give one such as eval_loss, or none"
        )
    shares = isinstance(config, DPOConfig | RMConfig) and config.train.shared_prefix_enable
    _check_ulysses(config.ds, packs=config.ds.packing_samples or shares, gpus={})


def require(config: PPOConfig | SupervisedConfig, flag: str, *, example: str) -> None:
    """Raise UserError if a required flag is missing."""
    if not dotted.get(config, flag):
        raise UserError(f"--{flag} is missing; give for example --{flag} {example}")


def check_thought(thought: ThoughtConfig, *, prefix: str) -> None:
    """Raise UserError for settings of budget forcing that are impossible or have no effect.

    Args:
        prefix: prefix of a setting's name in messages.
    """
    check_ranges(thought, prefix=prefix)
    check_needs(thought, thought, prefix=prefix)
    if not thought.end:
        raise UserError(f"{prefix}end is empty; give the text that ends a thought, such as {ThoughtConfig.end}")
    if not thought.continue_with or thought.end in thought.continue_with:
        raise UserError(
            f"{prefix}continue_with {thought.continue_with!r} does not go on with a thought; give a text such as "
            f"{ThoughtConfig.continue_with}, without {thought.end}"
        )


def _check_algorithm(config: PPOConfig) -> None:
    actor, advantage = config.actor, config.algo.advantage
    low_high = actor.eps_clip_low_high
    assert low_high is not None, "resolve_ppo fills it in"
    if actor.policy_loss_type == "sapo" and low_high != CLIP_RANGES["sapo"]:
        raise UserError(
            f"{given('actor.eps_clip_low_high', low_high)} has no part in --actor.policy_loss_type sapo, which clips nothing; "
            "leave it out, and see --actor.sapo_temperature_pos"
        )
    divides = advantage.is_correction_level != "off" and advantage.is_correction_gating != "ratio"
    if divides and advantage.is_correction_threshold[0] > 0:
        raise UserError(
            f"--algo.advantage.is_correction_gating {advantage.is_correction_gating} has only an upper bound; give one number "
            "as --algo.advantage.is_correction_threshold"
        )


def _check_shared_gpus(config: PPOConfig) -> None:
    """Raise UserError for models or engines that share GPUs and have other numbers of them."""
    train, vllm = config.train, config.vllm
    pairs: list[tuple[str, str, str]] = []
    names = [name for name in ("critic", "reward") if name in config.placed]
    if train.colocate_critic_reward and names:
        pairs.append(("critic", "reward", "--train.colocate_critic_reward"))
    elif train.colocate_all:
        pairs += [("actor", name, "--train.colocate_all") for name in names]
    if (train.colocate_all or train.colocate_actor_ref) and config.needs_reference_model:
        shared = "--train.colocate_all" if train.colocate_all else "--train.colocate_actor_ref"
        pairs.append(("actor", "ref", shared))
    for one, other, because in pairs:
        for name in ("num_nodes", "num_gpus_per_node"):
            ours, theirs = (getattr(getattr(config, group), name) for group in (one, other))
            if ours != theirs:
                raise UserError(f"with {because}, --{one}.{name} {ours} and --{other}.{name} {theirs} must be equal")
    if train.colocate_all and config.actor.gpus != vllm.gpus:
        raise UserError(
            f"with --train.colocate_all the engines take the policy's GPUs: --actor.num_nodes {config.actor.num_nodes} x "
            f"--actor.num_gpus_per_node {config.actor.num_gpus_per_node} = {config.actor.gpus}, but --vllm.num_engines "
            f"{vllm.num_engines} x --vllm.tensor_parallel_size {vllm.tensor_parallel_size} = {vllm.gpus}; make them equal"
        )


def _check_ulysses(ds: DeepSpeedConfig, *, packs: bool, gpus: Mapping[str, int]) -> None:
    """Raise UserError if ranks cannot share sequences as `--ds.ulysses_size` requires.

    Args:
        packs: whether samples are packed.
        gpus: number of GPUs of each model, by the name of its flag group.
    """
    if ds.ulysses_size > 1 and not packs:
        raise UserError(f"--ds.ulysses_size {ds.ulysses_size} splits packed sequences; add --ds.packing_samples")
    for flag in ("ulysses_size", "tensor_parallel_size"):
        for name, count in gpus.items():
            if count % getattr(ds, flag):
                raise UserError(
                    f"--ds.{flag} {getattr(ds, flag)} does not divide the {count} GPUs of --{name}.num_nodes x "
                    f"--{name}.num_gpus_per_node; take a number that does"
                )


def check_batches(config: PPOConfig) -> None:
    """Raise UserError if the samples of a step cannot be divided among processes or updates; sizes may be open."""
    rollout, train = config.rollout, config.train
    samples = rollout.batch_size * rollout.n_samples_per_prompt
    sizes = (
        f"--rollout.batch_size {rollout.batch_size} x --rollout.n_samples_per_prompt {rollout.n_samples_per_prompt}"
    )
    for name, gpus in model_gpus(config).items():
        # Or groups of processes that get the same samples.
        processes = max(1, gpus // (config.ds.tensor_parallel_size * config.ds.ulysses_size))
        if samples % processes:
            raise UserError(f"{sizes} must be a multiple of the {processes} {name} processes")
        if name in ("actor", "critic") and train.batch_size % processes:
            raise UserError(
                f"--train.batch_size {train.batch_size} must be a multiple of the {processes} {name} processes"
            )
    if 0 < samples < train.batch_size:
        raise UserError(
            f"--train.batch_size {train.batch_size} is more than the {samples} samples of a rollout ({sizes}), so no step "
            "would update the weights; lower it"
        )


def model_gpus(config: PPOConfig) -> dict[str, int]:
    """Return how many GPUs each model of a run has."""
    return {name: model.gpus for name, model in config.placed.items()}


def _check_reward_source(config: PPOConfig) -> None:
    functions, verifier = reward_functions(config.reward), named_verifier(config.reward)
    part_weights(config.reward)
    idle = ("timeout_s",) if functions else ("timeout_s", "deadline_s") if verifier is not None else ()
    for name in idle:
        if getattr(config.reward, name) != getattr(RewardConfig, name):
            instead = "the limit of functions, per prompt, is --reward.deadline_s" if functions else "leave it out"
            raise UserError(
                f"--reward.{name} {getattr(config.reward, name):g} has no effect on --reward.remote_url "
                f"{config.reward.remote_url}, which asks no server; {instead}"
            )
