"""Conversion of EasyR1's settings."""

from __future__ import annotations

import json
from collections.abc import Generator

from lmm_r1.config.ppo import DEFAULT_VERIFIER
from lmm_r1.errors import UserError
from lmm_r1.migrate.easyr1_algorithm import ALGORITHM_RULES
from lmm_r1.migrate.table import (
    KEEP_ALL,
    Flag,
    Given,
    Note,
    Results,
    Rule,
    Table,
    derived,
    differs,
    lacks,
    names_of,
    settings_of,
    trackers,
)

OWN_RECORDS = ("console", "file")
"""Trackers that every run has: the progress in the terminal and the records in the run folder."""


def _rows(given: Given) -> Results:
    names, split = yield from _files(given, "data.train_files")
    if names:
        yield Flag("data.prompt_dataset", ",".join(names))
    if split:
        yield Flag("data.prompt_split", split)


def _files(given: Given, setting: str) -> Generator[Note, None, tuple[list[str], str | None]]:
    """Return the names of a setting's files, and the split that follows an @."""
    files = given[setting]
    listed = [str(file).partition("@") for file in (files if isinstance(files, list) else [files]) if file]
    splits = sorted({split for _, _, split in listed if split})
    if len(splits) > 1:
        yield lacks(setting, f"all files share one split here: {splits[0]} is used, of {', '.join(splits)}")
    return [name for name, _, _ in listed], splits[0] if splits else None


def lengths(given: Given) -> Results:
    """Add up the bounds of prompt and response: here one bound holds for both together."""
    prompt, response = given.whole("data.max_prompt_length"), given.whole("data.max_response_length")
    yield Flag("data.max_len", prompt + response)
    yield Flag("rollout.max_new_tokens", response)
    yield derived(
        "data.max_prompt_length, data.max_response_length",
        f"--data.max_len {prompt + response} is the sum: prompt with images ({prompt}) and response ({response})",
    )


def overlong_prompts(given: Given) -> Results:
    if given.switch("data.filter_overlong_prompts"):
        yield Flag("data.overlong_prompts", "skip")
    else:
        yield Flag("data.overlong_prompts", "error")
        yield differs(
            "data.filter_overlong_prompts",
            "EasyR1 cuts a longer prompt; here a run stops at a prompt that is too long",
        )


def _seed(given: Given) -> Results:
    yield Flag("train.seed", given.whole("data.seed"))
    if given.has("data.seed"):
        yield differs("data.seed", "--train.seed seeds everything random, not only the order of the rows")


def _gpus(given: Given) -> Results:
    nodes, per_node = given.whole("trainer.nnodes"), given.whole("trainer.n_gpus_per_node")
    for model in ("actor", "ref", *(("critic",) if given.text("algorithm.adv_estimator") == "gae" else ())):
        yield Flag(f"{model}.num_nodes", nodes)
        yield Flag(f"{model}.num_gpus_per_node", per_node)
    parallel = given.whole("worker.rollout.tensor_parallel_size")
    if parallel < 1 or nodes * per_node % parallel:
        raise UserError(
            f"worker.rollout.tensor_parallel_size {parallel} does not divide the {nodes * per_node} GPUs of "
            f"trainer.nnodes x trainer.n_gpus_per_node; correct one of them"
        )
    yield Flag("vllm.num_engines", nodes * per_node // parallel)
    yield Flag("vllm.tensor_parallel_size", parallel)
    yield Flag("vllm.enable_sleep", True)
    yield Flag("train.colocate_all", True)
    yield derived(
        "trainer.nnodes, trainer.n_gpus_per_node", "all models and engines take turns on the same GPUs, as in EasyR1"
    )


def _validation(given: Given) -> Results:
    names, split = yield from _files(given, "data.val_files")
    steps, before = given.whole("trainer.val_freq"), given.switch("trainer.val_before_train")
    yield Flag("eval.before_training", bool(names) and before)
    if not names:
        for setting, asked in (("trainer.val_freq", steps >= 1), ("trainer.val_before_train", before)):
            if given.has(setting) and asked:
                yield lacks(setting, "data.val_files names no rows to evaluate on")
        return
    if steps < 1 and not before:
        yield lacks("data.val_files", "a run evaluates on them only if trainer.val_freq is above 0")
        return
    yield Flag("eval.dataset", ",".join(names))
    if len(names) > 1:
        yield differs("data.val_files", "the metrics are means over the rows of all files")
    if split:
        yield Flag("eval.split", split)
    yield Flag("eval.steps", steps)


def _evaluation_sampling(given: Given) -> Results:
    override = given.group("worker.rollout.val_override_config")
    for name, flag, sampled in (
        ("n", "eval.n_samples_per_prompt", "worker.rollout.n"),
        ("temperature", "eval.temperature", "worker.rollout.temperature"),
    ):
        yield Flag(flag, override.get(name, given[sampled]))
    for name, value in override.items():
        # A value that training has as well makes no difference.
        same = name == "top_p" and value == given["worker.rollout.top_p"]
        if name not in ("n", "temperature") and not same:
            yield lacks(
                f"worker.rollout.val_override_config.{name}",
                "evaluation samples like training, except for --eval.temperature and --eval.n_samples_per_prompt",
            )


def _reward(given: Given) -> Results:
    function = given.text("worker.reward.reward_function")
    if function is not None:
        path, _, name = function.partition(":")
        yield Flag("reward.remote_url", f"{path}:{name or 'main'}")
    elif (score := given.text("worker.reward.compute_score")) is not None:
        yield Flag("reward.remote_url", DEFAULT_VERIFIER)
        if score == DEFAULT_VERIFIER:
            return
        yield differs("worker.reward.compute_score", f"{score} is not here; {DEFAULT_VERIFIER} judges")
    arguments = given.group("worker.reward.reward_function_kwargs")
    if arguments:
        yield Flag("reward.function_kwargs", json.dumps(arguments, ensure_ascii=False))
    if (kind := given["worker.reward.reward_type"]) is not None:
        yield differs(
            "worker.reward.reward_type", f'the file specifies it: add REWARD_TYPE = "{kind}" if it is missing'
        )


_SHARED = (
    *("global_batch_size", "micro_batch_size_per_device_for_update", "micro_batch_size_per_device_for_experience"),
    *("loss_avg_mode", "ppo_epochs"),
)
"""What the critic has from the policy."""


def _critic(given: Given) -> Results:
    """Convert the critic's own settings; it is trained on the policy's batches."""
    own = names_of("critic")
    has_critic = given.text("algorithm.adv_estimator") == "gae"
    if has_critic:
        yield Flag("critic.lr_scheduler", "constant_with_warmup")
    for name in (*own, *_SHARED):
        setting = f"worker.critic.{name}"
        if not given.has(setting):
            if has_critic and given[setting] is not None:
                yield Flag(own[name], given[setting])
        elif not has_critic:
            yield lacks(setting, "only gae has a critic")
        elif name in own:
            yield Flag(own[name], given[setting])
        elif given[setting] != given[f"worker.actor.{name}"]:
            yield lacks(setting, f"the critic shares worker.actor.{name}")
    warmup = given.whole("trainer.critic_warmup")
    if warmup and not has_critic:
        yield lacks("trainer.critic_warmup", "only gae has a critic")
    elif warmup > 1:
        yield Flag("critic.freezing_steps", warmup - 2)
        yield derived(
            "trainer.critic_warmup",
            f"the policy is first updated in step {warmup}, counted from 1, which is after step {warmup - 2} counted from 0",
        )


def _records(given: Given) -> Results:
    name, project = given.text("trainer.experiment_name"), given.text("trainer.project_name")
    yield Flag("logger.wandb.run_name", name)
    folder = given.text("trainer.save_checkpoint_path") or f"checkpoints/{project}/{name}"
    yield Flag("ckpt.output_dir", folder)
    yield differs(
        "trainer.save_checkpoint_path", f"--ckpt.output_dir {folder} also holds the run's records and its final model"
    )
    yield from trackers(given, "trainer.logger", *OWN_RECORDS)
    limit = -1 if given["trainer.save_limit"] is None else given.whole("trainer.save_limit")
    yield Flag("ckpt.max_num", KEEP_ALL if limit < 0 else limit)
    if given.switch("trainer.save_model_only"):
        yield Flag("ckpt.disable_ds", True)
        yield Flag("ckpt.save_hf", True)
        yield differs("trainer.save_model_only", "a stopped run cannot be resumed")


RULES: tuple[Rule, ...] = (
    *ALGORITHM_RULES,
    _rows,
    lengths,
    overlong_prompts,
    _seed,
    _gpus,
    _validation,
    _evaluation_sampling,
    _reward,
    _critic,
    _records,
)


EASYR1 = Table(
    system="EasyR1",
    command="train_ppo_ray",
    settings=settings_of("easyr1"),
    rules=RULES,
    names=names_of("easyr1_names"),
)
