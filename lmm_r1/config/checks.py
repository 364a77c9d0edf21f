"""Refusals of flags that contradict each other beyond what each declares (`config.declared`), before anything starts."""

import json
import math
from collections.abc import Mapping

from lmm_r1 import dotted
from lmm_r1.config.declared import check_needs, check_ranges, given
from lmm_r1.config.ppo import (
    CLIP_RANGES,
    ActorConfig,
    AgentConfig,
    CriticConfig,
    PPOConfig,
    RefConfig,
    RewardConfig,
)
from lmm_r1.config.preferences import DPOConfig, RMConfig
from lmm_r1.config.rewards import named_verifier, part_weights, reward_functions
from lmm_r1.config.shared import DeepSpeedConfig, ThoughtConfig, check_speculation
from lmm_r1.config.supervised import KDConfig, SupervisedConfig
from lmm_r1.errors import UserError


def check_ppo(config: PPOConfig) -> None:
    """Raise UserError for the first contradiction in a config in which every value is filled in."""
    if config.train.plays:
        _check_agent(config)
    check_speculation(config.vllm, prefix="vllm.")
    _check_accumulation(config)
    _check_reward_source(config)
    _check_algorithm(config)
    _check_shared_gpus(config)
    packs = config.train.shared_prefix_enable and config.rollout.n_samples_per_prompt > 1
    _check_ulysses(config.ds, packs=config.ds.packing_samples or packs, gpus=model_gpus(config))
    check_batches(config)


def check_supervised(config: SupervisedConfig) -> None:
    """Raise UserError for the first contradiction in a config in which every value is filled in but a reference."""
    _check_accumulation(config)
    if isinstance(config, KDConfig):
        require(config, "teacher.model_name_or_path", example="path/or/hub-name")
    if isinstance(config, DPOConfig) and config.ref.offload and config.refers_to_base:
        raise UserError("--ref.offload: with --ds.lora.rank no second model is loaded as reference; leave it out")
    key = config.ckpt.best_metric_key
    if key not in ("", "none") and (config.eval.dataset is None or not key.startswith("eval_")):
        raise UserError(
            f"--ckpt.best_metric_key {key} names no metric of an evaluation; give --eval.dataset and eval_loss or "
            "eval_pair_accuracy, or none"
        )
    shares = isinstance(config, DPOConfig | RMConfig) and config.train.shared_prefix_enable
    _check_ulysses(config.ds, packs=config.ds.packing_samples or shares, gpus={})


def require(config: PPOConfig | SupervisedConfig, flag: str, *, example: str) -> None:
    """Raise UserError if a required flag is missing."""
    if not dotted.get(config, flag):
        raise UserError(f"--{flag} is missing; give for example --{flag} {example}")


def check_sampling(*, temperature: float | None, top_p: float, prefix: str = "") -> None:
    """Raise UserError for an impossible temperature or nucleus; None is open.

    Args:
        prefix: prefix of the flags' names.
    """
    if temperature is not None and not (math.isfinite(temperature) and temperature >= 0):
        raise UserError(f"--{prefix}temperature {temperature}: must be 0 or more")
    if not 0 < top_p <= 1:
        raise UserError(f"--{prefix}top_p {top_p}: must be above 0 and at most 1")


def check_eager(enforce_eager: bool | None, *, backend: str, uses_vllm: bool) -> None:
    """Raise UserError if `--enforce_eager` is set without vLLM.

    Args:
        backend: flag and value that choose the engine, for the message.
    """
    if enforce_eager and not uses_vllm:
        raise UserError(f"--enforce_eager switches vLLM's CUDA graphs off, and {backend} has none; leave it out")


def agent_options(agent: AgentConfig, *, flag: str = "--agent.options") -> dict[str, object]:
    """Return the arguments of `--agent.options`; raises UserError if it is not a JSON object.

    Args:
        flag: its name on this command line.
    """
    try:
        options = json.loads(agent.options or "{}")
    except json.JSONDecodeError as error:
        raise UserError(f"{flag} {agent.options} is no JSON ({error}); give an object in quotes") from error
    if not isinstance(options, dict):
        raise UserError(f'{flag} {agent.options} must be a JSON object, such as \'{{"prefill": "<think>"}}\'')
    return options


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


def _check_agent(config: PPOConfig) -> None:
    settings, samples = config.agent, config.rollout.n_samples_per_prompt
    agent_options(settings)
    check_thought(settings.thought, prefix="--agent.thought.")
    if samples % settings.branches:
        raise UserError(
            f"--agent.branches {settings.branches} must divide --rollout.n_samples_per_prompt {samples}, of which as many at "
            "a time have turns in common"
        )


def _check_accumulation(config: PPOConfig | SupervisedConfig) -> None:
    accumulates, weights = config.ds.grad_accum_dtype, config.ds.param_dtype
    if accumulates not in ("fp32", weights):
        raise UserError(
            f"--ds.grad_accum_dtype {accumulates} with --ds.param_dtype {weights}: gradients are added up in fp32 or in the "
            "precision of the weights; take one of them"
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
    names = [name for name in ("critic", "reward") if getattr(config, name).model_name_or_path]
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
    if rollout.batch_size and (rollout.vllm_generate_batch_size or 0) > rollout.batch_size:
        raise UserError(
            f"--rollout.vllm_generate_batch_size {rollout.vllm_generate_batch_size} must not be above "
            f"--rollout.batch_size {rollout.batch_size}"
        )
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
    groups: dict[str, ActorConfig | CriticConfig | RefConfig | RewardConfig] = {"actor": config.actor}
    if config.needs_reference_model:
        groups["ref"] = config.ref
    if config.critic.model_name_or_path:
        groups["critic"] = config.critic
    if config.reward.model_name_or_path:
        groups["reward"] = config.reward
    return {name: group.gpus for name, group in groups.items()}


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
