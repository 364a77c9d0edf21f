"""An RL run from its command to its model: checks, the start of engines and models and training."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ray

from lmm_r1 import cpu, quiet
from lmm_r1.agents.environment import Environment, load_environment
from lmm_r1.agents.openrlhf_agent import agent_class, executes_itself
from lmm_r1.cluster import nodes, run_environment, worker_runtime
from lmm_r1.cluster.nodes import Reservation, SharedPath, check_shared, reserve
from lmm_r1.config import PPOConfig, checkpoint_folder, model_paths
from lmm_r1.config.declared import json_object
from lmm_r1.config.hardware import needed_gpus
from lmm_r1.config.ppo import PlacedModel
from lmm_r1.config.rewards import GivenFunctions, named_verifier, reward_functions, reward_list
from lmm_r1.config.run_rows import read_conversations
from lmm_r1.data.media_access import limits_environment
from lmm_r1.data.messages import Row, images_of, kind_of, videos_of
from lmm_r1.data.reading import told_prompt
from lmm_r1.data.training_rows import KeptRows, PromptStream, check_prompt, with_left_out
from lmm_r1.errors import UserError
from lmm_r1.files.user_code import function_file
from lmm_r1.generation.engine import FINE_TUNE, check_backend
from lmm_r1.generation.ray_engines import COLOCATED_SHARE, create_engines, settle_engines, without_sleep
from lmm_r1.generation.request import check_turn_end, disagrees, with_correction
from lmm_r1.host.strategy import check_fp16
from lmm_r1.host.workers import WorkerGroup
from lmm_r1.lmm_kits import Checkpoint
from lmm_r1.lmm_kits.checkpoint import ImageFitting, check_images_taken, check_weights, outlined_row
from lmm_r1.lmm_kits.registry import KIT_FLAG, given_files
from lmm_r1.models.actor import head_name, stored_weight
from lmm_r1.records.metrics import NO_CALLBACKS, Callbacks
from lmm_r1.records.run_folder import STAGE_TITLES
from lmm_r1.rl.advantages import estimator_named
from lmm_r1.rl.filtering import GroupFilter
from lmm_r1.rl.loop import RLRun, optimizer_steps, workers_strategy
from lmm_r1.rl.losses import PolicyLoss
from lmm_r1.rl.model_groups import Models
from lmm_r1.rl.workers import CriticWorker, PolicyWorker, ReferenceWorker, RewardWorker
from lmm_r1.train.first_checks import check_reward
from lmm_r1.train.start import (
    Frame,
    Plan,
    blended_rows,
    check_lengths,
    evaluation_rows,
    framed,
    model_flag,
    opened,
    say,
    sized,
)


def shared_paths(config: PPOConfig, *, rows: Sequence[Row], eval_rows: Sequence[Row]) -> list[SharedPath]:
    """Return the paths that all nodes of a run must see; for images and videos, one per folder."""
    files = [
        # Other names are names on the hub; each node has its own cache of them.
        *((flag, path) for flag, path in model_paths(config).items() if Path(path).exists()),
        *(("reward.remote_url", function.path) for function in reward_functions(config.reward)),
        ("algo.advantage.estimator", function_file(config.algo.advantage.estimator)),
        ("actor.policy_loss_type", function_file(config.actor.policy_loss_type)),
        ("train.agent_func_path", config.train.agent_func_path),
        *(("data.prompt_dataset", path) for path in _one_per_folder(rows)),
        *(("eval.dataset", path) for path in _one_per_folder(eval_rows)),
    ]
    paths = [SharedPath(flag=f"--{flag}", path=path) for flag, path in dict.fromkeys(files) if path is not None]
    paths += [SharedPath(flag=KIT_FLAG, path=function_file(file) or file) for file in given_files()]
    paths.append(SharedPath(flag="--ckpt.output_dir", path=config.ckpt.output_dir, written=True))
    if not config.ckpt.disable_ds:
        paths.append(SharedPath(flag="--ckpt.path", path=str(checkpoint_folder(config)), written=True))
    return paths


def _one_per_folder(rows: Sequence[Row]) -> Iterable[str]:
    found: dict[str, str] = {}
    for row in rows:
        sources: list[Any] = [image.source for image in images_of(row.messages)]
        for video in videos_of(row.messages):
            sources += [video.source] if isinstance(video.source, str) else video.source
        found |= {os.path.dirname(one): one for one in sources if isinstance(one, str) and kind_of(one) == "path"}
    return found.values()


def train(
    config: PPOConfig,
    *,
    plan: Plan | None = None,
    reward: GivenFunctions | None = None,
    callbacks: Callbacks = NO_CALLBACKS,
) -> None:
    """Run one RL stage and write its model to `--ckpt.output_dir`; raises UserError for wrong inputs.

    Args:
        plan: chooses open settings by memory, as `planning.choices.planned`; None leaves nothing to memory.
        reward: the reward functions that were given to this process instead of in a file.
    """
    policy, model = opened(config), model_flag(config)
    check_backend("vllm", policy.kit, model=model, instead=FINE_TUNE)
    check_turn_end(policy.kit, policy.processor, path=policy.path, model=model)
    lengths: list[int] = []
    environment = _environment(config) if config.train.plays else None
    wanted = config.rollout.max_new_tokens
    fitting = ImageFitting(checkpoint=policy, max_len=config.data.max_len, least=wanted or 1, wanted=wanted)
    load = partial(_load, config, check=partial(_check_row, config, policy, environment, fitting, lengths=lengths))
    rows = blended_rows(config, partial(load, split=config.data.prompt_split))
    room = config.data.max_len - (1 if config.train.plays else wanted or 1)
    if lengths and min(lengths) > room:
        raise UserError(
            f"--data.max_len {config.data.max_len} leaves {room} tokens for a prompt, and the shortest one's text and "
            f"template have {min(lengths)} tokens; raise it"
        )
    config = sized(config, rows=len(rows))
    eval_rows = evaluation_rows(config, partial(load, split=config.eval.split))
    prompt = told_prompt(config.data.system_prompt, rows, flag="--data.system_prompt")
    say(prompt, fitting.told(prefix="--data."))
    if config.reward.remote_url:
        check_reward(config, rows + eval_rows, given=reward, called=False)
        say(_rewards(config))
    _check_models(config, policy)
    # From here on, the settings of the workers' machines count.
    nodes.follow_cluster()
    check_fp16(config.ds.param_dtype)
    config = without_sleep(with_correction(config, policy=policy, rows=rows))
    with framed(
        config,
        policy,
        kind="rl",
        rows=rows,
        held_out=eval_rows,
        shown=rows,
        plan=plan,
        callbacks=callbacks,
        processes=lambda config: nullcontext(),
    ) as frame:
        _train(frame, rows=rows, eval_rows=eval_rows, reward=reward)


def _check_models(config: PPOConfig, policy: Checkpoint) -> None:
    """Raise UserError if a model of the run does not fit the policy or its settings, or a function of the user's has an error."""
    GroupFilter.of(config)
    estimator_named(config.algo.advantage.estimator)
    PolicyLoss.of(config)
    for flag, path in model_paths(config).items():
        # The critic may start from the policy, or from the reward model that was given.
        if flag != "actor.model_name_or_path" and (path != policy.path or "critic" not in flag):
            _check_value_model(config, flag, path, policy=policy)


def _train(
    frame: Frame[PPOConfig],
    *,
    rows: Sequence[Row],
    eval_rows: Sequence[Row],
    reward: GivenFunctions | None,
) -> None:
    """Start Ray, engines and models, train, and write the model."""
    config, folder, stops = frame.config, frame.folder, frame.stops
    named = f" ({STAGE_TITLES[folder.name]})" if folder.name in STAGE_TITLES else ""
    say(f"{folder.name}{named}: {len(rows)} prompts, starting Ray, engines and models ...")
    _start_ray(config)
    # Ray has installed its own handler of SIGTERM.
    stops.listen()
    check_shared(shared_paths(config, rows=rows, eval_rows=eval_rows))
    every = [*rows, *eval_rows]
    max_videos = max(len(videos_of(row.messages)) for row in every)
    max_images = config.data.max_images_per_prompt or max(len(images_of(row.messages)) for row in every)
    if config.train.plays and frame.checkpoint.kit.takes_images:
        max_images += config.agent.max_images
    engines, models = _start_workers(config, max_images=max_images, max_videos=max_videos, reward=reward)
    run = RLRun(
        config,
        models=models,
        engines=engines,
        prompts=prompt_stream(config, rows),
        eval_rows=eval_rows,
        folder=folder,
        stops=stops,
        trackers=frame.trackers,
        disagreeing=frozenset({"image", "video"}) if disagrees(frame.checkpoint) else frozenset(),
    )
    _load_models(config, models, engines, num_rows=len(rows))
    done = run.fit()
    with stops.held():
        ray.get(models.policy.async_save_model())
        if models.critic is not None and config.critic.save_value_network:
            ray.get(models.critic.async_save_model())
        say(folder.finish(steps=done))
    ray.shutdown()


def _start_workers(
    config: PPOConfig, *, max_images: int, max_videos: int, reward: GivenFunctions | None = None
) -> tuple[list[Any], Models]:
    """Start the processes of engines and models together, so that models import their libraries while engines load."""
    train, ds, shared = config.train, config.ds, None
    if train.colocate_all or train.colocate_actor_ref:
        shared = reserve(config.actor.gpus)
    everywhere = shared if train.colocate_all else None
    engines = create_engines(config, shared=everywhere, max_images=max_images, max_videos=max_videos, reward=reward)

    def group(worker: Any, size: PlacedModel, shared: Reservation | None) -> WorkerGroup:
        return WorkerGroup(
            size.nodes,
            size.gpus_per_node,
            worker,
            pg=shared or reserve(size.gpus),
            num_gpus_per_actor=COLOCATED_SHARE if shared is not None else 1,
            duplicate_actors=ds.tensor_parallel_size * ds.ulysses_size,
        )

    policy = group(PolicyWorker, config.actor, shared)
    reference = group(ReferenceWorker, config.ref, shared) if config.needs_reference_model else None
    if train.colocate_critic_reward:
        everywhere = reserve(config.critic.gpus)
    critic, reward_model = (
        group(worker, size, everywhere) if size.model_name_or_path else None
        for worker, size in ((CriticWorker, config.critic), (RewardWorker, config.reward))
    )
    return engines, Models(policy=policy, reference=reference, critic=critic, reward=reward_model)


def _load_models(config: PPOConfig, models: Models, engines: list[Any], *, num_rows: int) -> None:
    """Load the models of all workers, the critic last: two that load at once on a shared GPU take the most memory.

    Engines on the same GPUs are ready, and asleep if they sleep, before the first model is loaded.
    """
    strategy = workers_strategy(config)
    if config.train.colocate_all and cpu.has_cuda():
        settle_engines(config, engines)
    path = config.actor.model_name_or_path
    # At first, only the critic may be trained.
    steps = optimizer_steps(config, num_rows=num_rows, waits=max(0, config.critic.freezing_steps + 1))
    refs = models.policy.async_init_model_from_pretrained(strategy, path, steps, engines)
    for group, own_path in ((models.reference, path), (models.reward, config.reward.model_name_or_path)):
        if group is not None:
            refs += group.async_init_model_from_pretrained(strategy, own_path)
    ray.get(refs)
    if models.critic is not None:
        steps = optimizer_steps(config, num_rows=num_rows)
        ray.get(models.critic.async_init_model_from_pretrained(strategy, config.critic.model_name_or_path, steps))


def prompt_stream(config: PPOConfig, rows: Sequence[Row]) -> PromptStream:
    """Return the stream of rows in the order in which a run takes them."""
    return PromptStream(rows, seed=config.train.seed, episodes=config.train.num_episodes)


def _load(config: PPOConfig, path: str, *, split: str, check: Callable[[Row], Row]) -> KeptRows[Row]:
    file = read_conversations(config, path, split=split, check=check)
    say(with_left_out(file.summary_as_prompts, file.skipped))
    # Columns are sent with every group, and few reward sources need them.
    by_columns = bool(reward_functions(config.reward)) or "columns" in config.reward.request_fields
    wanted = by_columns or config.train.plays
    rows = {index: row if wanted else replace(row, columns={}) for index, row in file.rows.items()}
    return KeptRows.of(path, rows, file.skipped)


def _environment(config: PPOConfig) -> Environment | None:
    """Return the environment of `--train.agent`; None for an agent in a file, which gets the rows as they are.

    Raises UserError if there is no such environment, or nothing gives it rewards.
    """
    agent, path, settings = config.train.agent, config.train.agent_func_path, config.agent
    if path is not None:
        if executes_itself(agent_class(path)) and settings.thought.forces:
            raise UserError(
                f"--agent.thought.* has no effect: the executor of --train.agent_func_path {path} requests its turns from the "
                "engine itself; leave it out"
            )
        return None
    assert agent is not None, "one of the two plays the episodes"
    environment = load_environment(agent, options=json_object(settings.options, flag="--agent.options"))
    if not (environment.rewards or config.reward.remote_url):
        raise UserError(
            f"--train.agent {agent} gives no rewards of its own; give --reward.remote_url, whose scorer judges the last turn"
        )
    return environment


def _check_row(
    config: PPOConfig,
    policy: Checkpoint,
    environment: Environment | None,
    fitting: ImageFitting,
    row: Row,
    *,
    lengths: list[int],
) -> Row:
    """Return a row whose images fit; raises UserError for one that cannot be asked, taken by the policy or encoded.

    Args:
        lengths: gets the number of its tokens, without those of its images.
    """
    check_prompt(row)
    kit = policy.kit
    check_images_taken([row], kit=kit, model=f"--actor.model_name_or_path {policy.path}")
    images, limit = len(images_of(row.messages)), config.data.max_images_per_prompt
    if limit and images > limit:
        raise UserError(
            f"{row.location}: {images} images, more than --data.max_images_per_prompt {limit}; raise it, or set it to 0 to "
            "count them in the data"
        )
    if environment is not None:
        if environment.waits:
            # Its observations may take long, and are encoded when they arrive.
            return row
    shown = row if environment is None else environment.shown_row(row)
    outline = outlined_row(shown, kit=kit, processor=policy.processor, add_generation_prompt=True)
    lengths.append(len(outline.token_ids))
    scales = config.data.overlong_images == "scale" and not config.train.plays
    return fitting.fitted(row, outline) if scales else row


def _rewards(config: PPOConfig) -> str | None:
    """Return a line with what gives the rewards, if that is no address and no file."""
    if listed := reward_list(config.reward.remote_url or ""):
        terms = " + ".join(f"{part.weight:g} x {part.name}" for part in listed)
        return f"rewards: {terms}; {listed[0].name} says what is right"
    if verifier := named_verifier(config.reward):
        return f"rewards: the verifier {verifier}, called by the engines themselves; --reward selects another source"
    return None


def _check_value_model(config: PPOConfig, flag: str, path: str, *, policy: Checkpoint) -> None:
    """Raise UserError if critic or reward model cannot read the policy's responses, lacks weights or is too short.

    Args:
        flag: the flag of the model's path, without the dashes.
    """
    own, model = Checkpoint(path, trust_remote_code=policy.trust_remote_code), f"--{flag} {path}"
    if own.kit is not policy.kit:
        raise UserError(
            f"{model} has the architecture {own.kit.model_type}, and the policy {policy.kit.model_type}: it would "
            "not understand the policy's tokens and images; take a model of the same kind"
        )
    if own.tokenizer.get_vocab() != policy.tokenizer.get_vocab():
        raise UserError(f"{model} has another vocabulary than the policy; take a model of the same kind")
    check_weights(path)
    name = head_name(own.config, default=config.ds.value_head_prefix)
    stored_weight(path, name=name, config=own.config, required=flag.startswith("reward."))
    check_lengths(config, own, model=model)


def _start_ray(config: PPOConfig) -> None:
    """Join the cluster of RAY_ADDRESS, or start one here; without CUDA it pretends to have GPUs."""
    if not config.logger.worker_logs:
        # Each logger of OpenRLHF has its own level, which the parent's level does not change.
        for name in [name for name in logging.root.manager.loggerDict if name.startswith("openrlhf")]:
            logging.getLogger(name).setLevel(logging.WARNING)
    arguments: dict[str, Any] = {
        "runtime_env": worker_runtime({**run_environment(), **limits_environment()}),
        "log_to_driver": config.logger.worker_logs,
    }
    if not nodes.joins():
        arguments["include_dashboard"] = False
        if not cpu.has_cuda():
            needed = needed_gpus(config)
            arguments |= {"num_gpus": needed, "num_cpus": max(os.cpu_count() or 1, needed)}
    quiet.done_loading()
    nodes.connect(**arguments)
