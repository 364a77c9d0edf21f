"""Refusals of flags that contradict each other, before anything starts."""

import json
import logging
import math
import re
from collections.abc import Mapping

from lmm_r1 import dotted
from lmm_r1.config.declared import check_needs, check_ranges
from lmm_r1.config.model_checks import (
    check_adapters,
    check_algorithm,
    check_async,
    check_average,
    check_eight_bit,
    check_filters,
    check_fp16_optimizer,
    check_oversampling,
    check_reference,
    check_schedule,
)
from lmm_r1.config.ppo import (
    GROUP_ESTIMATORS,
    ActorConfig,
    AgentConfig,
    CriticConfig,
    PPOConfig,
    RefConfig,
    RewardConfig,
    RolloutConfig,
)
from lmm_r1.config.rewards import named_verifier, part_weights, reward_functions
from lmm_r1.config.shared import DeepSpeedConfig, ThoughtConfig, check_speculation
from lmm_r1.config.supervised import SupervisedConfig, TrainedModelConfig
from lmm_r1.errors import UserError

logger = logging.getLogger(__name__)

TWO_TEMPLATES = "--data.input_template {!r} and --data.apply_chat_template both write the text around a prompt; set only one of them"


def check_ppo(config: PPOConfig) -> None:
    """Raise UserError for the first contradiction in a config in which every value is filled in."""
    _check_agent(config)
    check_async(config)
    check_oversampling(config)
    check_speculation(config.vllm, prefix="vllm.")
    check_accumulation(config)
    check_adapters(config.ds)
    _check_value_models(config)
    _check_groups(config)
    check_algorithm(config)
    _check_gpus(config)
    _check_ppo_ulysses(config)
    check_batches(config)
    _check_kl(config)
    check_reference(config)
    check_average(config)
    check_aux_loss(config.actor, prefix="actor.")
    for prefix, model in (("actor.", config.actor), ("critic.", config.critic)):
        check_schedule(model, prefix=prefix)
        check_fp16_optimizer(model, config.ds, prefix=prefix)
    check_eight_bit(config.actor, config.ds, prefix="actor.", sleeps=bool(config.ds.enable_sleep))
    check_eight_bit(config.critic, config.ds, prefix="critic.", sleeps=bool(config.ds.enable_sleep))
    _check_rl_rows(config)
    _check_response_length(config)
    _check_evaluation(config)


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
        raise UserError(f"{flag} {agent.options} is no JSON: {error}") from error
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
    if thought.min_tokens and thought.max_tokens and thought.min_tokens > thought.max_tokens:
        raise UserError(
            f"{prefix}min_tokens {thought.min_tokens} is more than {prefix}max_tokens {thought.max_tokens}"
        )


def _check_agent(config: PPOConfig) -> None:
    agent, settings = config.train.agent, config.agent
    path = config.train.agent_func_path
    if path is not None:
        if agent is not None:
            raise UserError(f"--train.agent {agent} and --train.agent_func_path {path}: give one of them")
        if settings.options is not None:
            raise UserError(
                f"--agent.options {settings.options}: a file in OpenRLHF's form, {path}, takes no options; read them in it, "
                "or write an environment and give --train.agent FILE.py:CLASS"
            )
    given = f"--train.agent {agent}" if path is None else f"--train.agent_func_path {path}"
    if not config.train.plays:
        return
    if config.reward.model_name_or_path:
        raise UserError(
            f"{given} with --reward.model_name_or_path {config.reward.model_name_or_path}: a reward model "
            "scores single turns; give --reward.remote_url, or leave the rewards to the environment"
        )
    if config.reward.overlong_buffer_len is not None:
        raise UserError(
            f"--reward.overlong_buffer_len {config.reward.overlong_buffer_len:g} is for single responses, which "
            f"--rollout.max_new_tokens bounds; with {given} it bounds a turn: leave it out"
        )
    agent_options(settings)
    check_thought(settings.thought, prefix="--agent.thought.")
    longest, turn = settings.thought.max_tokens, config.rollout.max_new_tokens
    if longest is not None and turn is not None and longest >= turn:
        raise UserError(
            f"--agent.thought.max_tokens {longest} leaves no room for an answer in --rollout.max_new_tokens {turn}"
        )
    if settings.last_turn_regex is not None:
        _check_last_turn(settings, config.rollout)
    _check_branches(config)


def _check_branches(config: PPOConfig) -> None:
    settings, samples = config.agent, config.rollout.n_samples_per_prompt
    branches, turn = settings.branches, settings.branch_turn
    if samples % branches:
        raise UserError(
            f"--agent.branches {branches} must divide --rollout.n_samples_per_prompt {samples}, of which as many at a time "
            "have turns in common"
        )
    if branches == 1:
        return
    if settings.max_turns == 1:
        raise UserError(f"--agent.branches {branches} needs a turn to have in common; --agent.max_turns is 1")
    if turn is not None and turn >= settings.max_turns:
        raise UserError(
            f"--agent.branch_turn {turn} must be between 1, as the turn before is in common, and the last of "
            f"--agent.max_turns {settings.max_turns}, which is {settings.max_turns - 1}"
        )


def _check_last_turn(agent: AgentConfig, rollout: RolloutConfig) -> None:
    given = f"--agent.last_turn_regex {agent.last_turn_regex}"
    try:
        re.compile(agent.last_turn_regex or "")
    except re.error as error:
        raise UserError(f"{given} is no regular expression: {error}") from error
    if agent.max_turns == 1:
        raise UserError(
            f"{given} with --agent.max_turns 1 leaves nothing to learn from: the loss leaves that turn out"
        )
    if rollout.ignore_eos:
        raise UserError(f"{given} says how a turn ends, and --rollout.ignore_eos lets none end; leave one of them out")


def check_accumulation(config: PPOConfig | SupervisedConfig) -> None:
    """Raise UserError for an accumulation precision that DeepSpeed does not have."""
    given, weights = config.ds.grad_accum_dtype, config.ds.param_dtype
    if given not in ("fp32", weights):
        raise UserError(
            f"--ds.grad_accum_dtype {given} with --ds.param_dtype {weights}: gradients are added up in fp32 or in the "
            "precision of the weights"
        )


def _check_rl_rows(config: PPOConfig) -> None:
    data = config.data
    if data.dataloader_num_workers:
        raise UserError(
            f"--data.dataloader_num_workers {data.dataloader_num_workers}: in RL all rows are read before the first step, "
            "and the engines encode them while others generate; leave it out"
        )
    if data.input_template and data.apply_chat_template:
        raise UserError(TWO_TEMPLATES.format(data.input_template))


def _check_response_length(config: PPOConfig) -> None:
    buffer, response = config.reward.overlong_buffer_len, config.rollout.max_new_tokens or config.data.max_len
    if buffer is not None and buffer > response:
        raise UserError(
            f"--reward.overlong_buffer_len {buffer:g} is more than the {response} tokens of a response; lower it"
        )


def _check_evaluation(config: PPOConfig) -> None:
    """Raise UserError for an evaluation that would never run."""
    never = config.eval.steps < 1 and not config.eval.before_training
    if config.eval.dataset is not None and never:
        raise UserError(
            f"--eval.dataset {config.eval.dataset} is never evaluated on with --eval.steps {config.eval.steps}; give the "
            "steps between two evaluations, for example --eval.steps 10"
        )


def check_aux_loss(model: ActorConfig | TrainedModelConfig, *, prefix: str) -> None:
    """Raise UserError for a weight of the load-balancing loss that cannot be applied."""
    flag = f"--{prefix}aux_loss_coef {model.aux_loss_coef:g}"
    if model.aux_loss_coef and model.gradient_checkpointing_enable and model.gradient_checkpointing_reentrant:
        raise UserError(
            f"{flag}: with --{prefix}gradient_checkpointing_reentrant no gradient of the load-balancing loss reaches the "
            "routers; leave one out"
        )


def _check_groups(config: PPOConfig) -> None:
    samples = config.rollout.n_samples_per_prompt
    estimator = config.algo.advantage.estimator
    if samples < 2 and estimator in GROUP_ESTIMATORS:
        raise UserError(
            f"--algo.advantage.estimator {estimator} compares the responses to one prompt: "
            f"--rollout.n_samples_per_prompt {samples} must be at least 2"
        )
    check_filters(config)


def _check_gpus(config: PPOConfig) -> None:
    actor, ref, train, vllm = config.actor, config.ref, config.train, config.vllm
    gpus = actor.gpus
    shared = "--train.colocate_all" if train.colocate_all else "--train.colocate_actor_ref"
    if (train.colocate_all or train.colocate_actor_ref) and config.needs_reference_model:
        for name in ("num_nodes", "num_gpus_per_node"):
            ours, theirs = getattr(actor, name), getattr(ref, name)
            if ours != theirs:
                raise UserError(f"with {shared}, --actor.{name} {ours} and --ref.{name} {theirs} must be equal")
    engine_gpus = vllm.gpus
    if train.colocate_all and gpus != engine_gpus:
        raise UserError(
            f"with --train.colocate_all the engines take the policy's GPUs: --actor.num_nodes {actor.num_nodes} x "
            f"--actor.num_gpus_per_node {actor.num_gpus_per_node} = {gpus}, but --vllm.num_engines "
            f"{vllm.num_engines} x --vllm.tensor_parallel_size {vllm.tensor_parallel_size} = {engine_gpus}"
        )


def _check_ppo_ulysses(config: PPOConfig) -> None:
    packs = config.ds.packing_samples or (
        config.train.shared_prefix_enable and config.rollout.n_samples_per_prompt > 1
    )
    check_ulysses(config.ds, packs=packs, gpus=model_gpus(config))


def check_ulysses(ds: DeepSpeedConfig, *, packs: bool, gpus: Mapping[str, int]) -> None:
    """Raise UserError if ranks cannot share sequences as `--ds.ulysses_size` requires.

    Args:
        packs: whether samples are packed.
        gpus: number of GPUs of each model, by the name of its flag group.
    """
    size = ds.ulysses_size
    if size == 1:
        return
    if ds.tensor_parallel_size > 1:
        raise UserError(
            f"--ds.ulysses_size {size} and --ds.tensor_parallel_size {ds.tensor_parallel_size} both take the attention "
            "heads apart; give one of them"
        )
    if not packs:
        raise UserError(f"--ds.ulysses_size {size} splits packed sequences; add --ds.packing_samples")
    for name, count in gpus.items():
        if count % size:
            raise UserError(
                f"--ds.ulysses_size {size} does not divide the {count} GPUs of --{name}.num_nodes x "
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
    given = (
        f"--rollout.batch_size {rollout.batch_size} x --rollout.n_samples_per_prompt {rollout.n_samples_per_prompt}"
    )
    shared = config.ds.tensor_parallel_size * config.ds.ulysses_size
    for name, gpus in model_gpus(config).items():
        if gpus % config.ds.tensor_parallel_size:
            raise UserError(
                f"--ds.tensor_parallel_size {config.ds.tensor_parallel_size} does not divide the {gpus} GPUs of "
                f"--{name}.num_nodes x --{name}.num_gpus_per_node; take a number that does"
            )
        # Or groups of processes that get the same samples.
        processes = gpus // shared
        if samples % processes:
            raise UserError(f"{given} must be a multiple of the {processes} {name} processes")
        if name in ("actor", "critic") and train.batch_size % processes:
            raise UserError(
                f"--train.batch_size {train.batch_size} must be a multiple of the {processes} {name} processes"
            )
    if 0 < samples < train.batch_size:
        raise UserError(
            f"--train.batch_size {train.batch_size} is more than the {samples} samples of a rollout ({given}), so no "
            "step would update the weights"
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


def _check_kl(config: PPOConfig) -> None:
    kl = config.algo.kl
    if kl.use_loss and kl.estimator == "k1" and not kl.unbiased_gradient:
        logger.warning(
            "--algo.kl.estimator k1 has no useful gradient as a loss; take k2 or k3 with --algo.kl.use_loss"
        )
    if not kl.use_loss and kl.estimator != "k1":
        logger.warning("--algo.kl.estimator %s is meant for --algo.kl.use_loss; take k1 in the reward", kl.estimator)


def _check_value_models(config: PPOConfig) -> None:
    """Raise UserError for contradictions between the flags of critic and reward model."""
    _check_reward_source(config)
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
    functions, verifier = reward_functions(config.reward), named_verifier(config.reward)
    weights = part_weights(config.reward)
    if model and url:
        raise UserError(f"--reward.remote_url {url} and --reward.model_name_or_path {model}: give one of them")
    idle = ("timeout_s",) if functions else ("timeout_s", "deadline_s") if verifier is not None else ()
    for name in idle:
        if getattr(config.reward, name) != getattr(RewardConfig, name):
            instead = "the limit of functions, per prompt, is --reward.deadline_s" if functions else "leave it out"
            raise UserError(
                f"--reward.{name} {getattr(config.reward, name):g} has no effect on --reward.remote_url {url}, which asks no "
                f"server; {instead}"
            )
    if not model:
        return
    if weights:
        raise UserError(
            f"--reward.part_weights {config.reward.part_weights}: --reward.model_name_or_path {model} gives rewards without "
            "parts; leave it out"
        )
    if config.reward.request_fields:
        raise UserError(
            f"--reward.request_fields {' '.join(config.reward.request_fields)} is for requests to a reward server, and "
            f"--reward.model_name_or_path {model} gives the rewards; leave it out"
        )
    for flag, given in (
        (f"--eval.dataset {config.eval.dataset}", config.eval.dataset),
        ("--algo.dynamic_filtering_enable", config.algo.dynamic_filtering_enable),
        (f"--data.curriculum {config.data.curriculum}", config.data.curriculum != "off"),
        (f"--algo.experience_filter {config.algo.experience_filter}", config.algo.experience_filter),
    ):
        if given:
            raise UserError(f"{flag} needs --reward.remote_url: a reward model scores only what is trained on")


def _check_equal(config: PPOConfig, one: str, other: str, *, because: str) -> None:
    for name in ("num_nodes", "num_gpus_per_node"):
        ours, theirs = (getattr(getattr(config, group), name) for group in (one, other))
        if ours != theirs:
            raise UserError(f"with {because}, --{one}.{name} {ours} and --{other}.{name} {theirs} must be equal")
