"""Conversion of EasyR1's settings: those of the algorithm and the optimizer, and all others."""

from __future__ import annotations

import json
import math
from collections.abc import Generator

from lmm_r1.config.ppo import DEFAULT_VERIFIER
from lmm_r1.errors import UserError
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
    idle,
    lacks,
    names_of,
    settings_of,
    trackers,
)

ESTIMATORS, NEAREST_ESTIMATORS = names_of("estimators"), names_of("nearest_estimators")
"""Ours by theirs, and with their difference those that are only near."""
KL_ESTIMATORS = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
LOSS_TYPES = names_of("loss_types")
TEMPERATURES = {
    "worker.actor.tau_positive": "actor.sapo_temperature_pos",
    "worker.actor.tau_negative": "actor.sapo_temperature_neg",
}
LOSS_MEANS = {"token": "token-mean", "seq": "seq-mean-token-mean"}
FILTER: dict[str, object] = {
    "algorithm.filter_key": "overall",
    "algorithm.filter_low": 0.01,
    "algorithm.filter_high": 0.99,
}
FILTER["trainer.max_try_make_batch"] = 20
"""EasyR1's defaults of what has no effect unless groups are filtered."""
SCHEDULES = {"constant": "constant_with_warmup", "cosine": "cosine_with_min_lr"}


def longest_sample(given: Given) -> int:
    """Return the tokens of the longest sample, prompt and response together."""
    return given.whole("data.max_prompt_length") + given.whole("data.max_response_length")


def batches(given: Given, *, longest: int | None = None) -> Results:
    """Samples of an update, and those of a pass or its tokens.

    Args:
        longest: tokens of the longest sample, if not `longest_sample`.
    """
    prompts, samples = given.whole("worker.actor.global_batch_size"), given.whole("worker.rollout.n")
    yield Flag("train.batch_size", prompts * samples)
    yield derived(
        "worker.actor.global_batch_size",
        f"it counts prompts, --train.batch_size counts samples: {prompts} x worker.rollout.n {samples} = "
        f"{prompts * samples}",
    )
    packs, fills = given.switch("worker.actor.padding_free"), given.switch("worker.actor.dynamic_batching")
    yield Flag("ds.packing_samples", packs or fills)
    yield Flag("train.dynamic_batch_enable", fills)
    if not fills:
        return
    longest = longest_sample(given) if longest is None else longest
    for setting, flag in (
        ("worker.actor.micro_batch_size_per_device_for_update", "train.max_tokens_per_gpu"),
        ("worker.actor.micro_batch_size_per_device_for_experience", "rollout.max_tokens_per_gpu"),
    ):
        micro = given.whole(setting)
        yield Flag(flag, micro * longest)
        yield derived(
            setting,
            f"with dynamic batching a pass holds as many tokens as {micro} of the longest samples: {micro * longest}",
        )
    if not packs:
        yield differs("worker.actor.padding_free", "dynamic batches hold packed sequences here")


def _estimator(given: Given) -> Results:
    name = given.text("algorithm.adv_estimator") or ""
    if name in ESTIMATORS:
        yield Flag("algo.advantage.estimator", ESTIMATORS[name])
        return
    if name not in NEAREST_ESTIMATORS:
        raise UserError(
            f"algorithm.adv_estimator {name!r} is none that is known here; known are "
            f"{', '.join((*ESTIMATORS, *NEAREST_ESTIMATORS))}"
        )
    nearest, difference = NEAREST_ESTIMATORS[name]
    yield Flag("algo.advantage.estimator", nearest)
    yield lacks(
        "algorithm.adv_estimator", f"{name} is not here as it is there; {nearest} is the nearest: {difference}"
    )


def kl_estimator(given: Given, setting: str, *, other: str) -> Results:
    """Yield the estimator that a setting names; another one for a name that is not known."""
    penalty = given.text(setting) or "kl"
    yield Flag("algo.kl.estimator", KL_ESTIMATORS.get(penalty, other))
    if penalty not in KL_ESTIMATORS:
        yield lacks(setting, f"{penalty}; --algo.kl.estimator has {', '.join(KL_ESTIMATORS)}")


def _kl(given: Given) -> Results:
    if given.switch("algorithm.disable_kl"):
        yield Flag("algo.kl.init_coef", 0.0)
        return
    yield Flag("algo.kl.init_coef", given.number("algorithm.kl_coef"))
    as_loss = given.switch("algorithm.use_kl_loss")
    yield Flag("algo.kl.use_loss", as_loss)
    # Two estimators are not here: k1 without its sign, and the quantity that k1 estimates.
    yield from kl_estimator(given, "algorithm.kl_penalty", other="k2" if as_loss else "k1")
    adaptive = given.text("algorithm.kl_type") == "adaptive"
    if adaptive and not as_loss:
        yield Flag("algo.kl.target", given.number("algorithm.kl_target"))
        yield Flag("algo.kl.horizon", given.whole("algorithm.kl_horizon"))
        return
    if adaptive:
        yield lacks("algorithm.kl_type", "only a KL penalty in the reward has an adaptive weight")
    yield from idle(
        given,
        "belongs to a KL penalty in the reward with an adaptive weight",
        "algorithm.kl_target",
        "algorithm.kl_horizon",
    )


def _filter(given: Given) -> Results:
    enabled = given.switch("algorithm.online_filtering")
    yield Flag("algo.dynamic_filtering_enable", enabled)
    if not enabled:
        for name, default in FILTER.items():
            if given[name] != default:
                yield lacks(name, "nothing is filtered without online_filtering")
        return
    yield Flag(
        "algo.dynamic_filtering_range", [given.number("algorithm.filter_low"), given.number("algorithm.filter_high")]
    )
    if (key := given.text("algorithm.filter_key")) != "overall":
        yield Flag("algo.dynamic_filtering_part", key)
    yield Flag("algo.dynamic_filtering_max_batches", most_batches(given, "trainer.max_try_make_batch"))


def most_batches(given: Given, setting: str, *, multiplier: float = 1.0) -> int:
    """Return how many rollout batches have as many prompts as may be tried there, in batches that may be larger.

    Args:
        setting: says how many of those there may be.
        multiplier: by which they are larger than their size says.
    """
    step, batches = given.whole("data.rollout_batch_size"), given.whole(setting)
    size = step if given["data.mini_rollout_batch_size"] is None else given.whole("data.mini_rollout_batch_size")
    return math.ceil(max(0, batches) * size * multiplier / step)


def _loss(given: Given) -> Results:
    kind = given.text("worker.actor.loss_type") or ""
    yield Flag("actor.policy_loss_type", LOSS_TYPES.get(kind, "ppo"))
    if kind not in LOSS_TYPES:
        yield lacks(
            "worker.actor.loss_type",
            f"{kind} is not here, and ppo is written in its place: look at --actor.eps_clip_low_high, which was meant "
            f"for {kind}",
        )
    yield from _gate(given) if kind == "sapo" else _clip(given, kind=kind)
    mean = given.text("worker.actor.loss_avg_mode") or ""
    if mean not in LOSS_MEANS:
        raise UserError(f"worker.actor.loss_avg_mode {mean!r} must be one of {', '.join(LOSS_MEANS)}")
    yield Flag("actor.loss_agg_mode", LOSS_MEANS[mean])


def _clip(given: Given, *, kind: str) -> Results:
    """The bounds of ratios, and of losses if there is one."""
    yield Flag(
        "actor.eps_clip_low_high",
        [given.number("worker.actor.clip_ratio_low"), given.number("worker.actor.clip_ratio_high")],
    )
    if kind == "cispo":
        if given.has("worker.actor.clip_ratio_dual"):
            yield lacks("worker.actor.clip_ratio_dual", "of no use in the loss cispo")
    else:
        yield Flag("actor.dual_clip", given.number("worker.actor.clip_ratio_dual"))
    for tau in TEMPERATURES:
        yield from idle(given, "belongs to the loss sapo", tau)


def _gate(given: Given) -> Results:
    """The temperatures of SAPO, which clips nothing."""
    for tau, flag in TEMPERATURES.items():
        yield Flag(flag, given.number(tau))
    for side in ("low", "high", "dual"):
        yield from idle(given, "the loss sapo clips nothing", f"worker.actor.clip_ratio_{side}")


def _schedule(given: Given) -> Results:
    kind = given.text("worker.actor.optim.lr_scheduler_type") or ""
    if kind not in SCHEDULES:
        raise UserError(f"worker.actor.optim.lr_scheduler_type {kind!r} must be one of {', '.join(SCHEDULES)}")
    yield Flag("actor.lr_scheduler", SCHEDULES[kind])
    ratio = given["worker.actor.optim.min_lr_ratio"]
    if kind == "cosine":
        yield Flag("actor.min_lr_ratio", 0.0 if ratio is None else given.number("worker.actor.optim.min_lr_ratio"))
    elif ratio is not None:
        yield lacks("worker.actor.optim.min_lr_ratio", "a constant learning rate has no end")
    steps = given["worker.actor.optim.lr_warmup_steps"]
    if steps is not None and given.whole("worker.actor.optim.lr_warmup_steps") >= 0:
        yield lacks(
            "worker.actor.optim.lr_warmup_steps", f"give {steps} as a share of all updates: --actor.lr_warmup_ratio"
        )


def _weights(given: Given) -> Results:
    yield Flag("ds.zero_stage", 3 if given.switch("worker.actor.fsdp.enable_full_shard") else 2)
    if given["worker.actor.fsdp.torch_dtype"] is not None:
        yield differs(
            "worker.actor.fsdp.torch_dtype",
            "--ds.param_dtype is the precision of passes; DeepSpeed also keeps master weights in fp32",
        )
    offloads = [f"worker.actor.offload.offload_{what}" for what in ("params", "optimizer")]
    asked = [name for name in offloads if given.switch(name)]
    if asked:
        yield Flag("ds.enable_sleep", True)
        yield derived(", ".join(asked), "--ds.enable_sleep frees the trainer's memory while engines generate")
    reference = ("worker.ref.fsdp.enable_cpu_offload", "worker.ref.offload.offload_params")
    yield Flag("ref.offload", any(given.switch(name) for name in reference))
    tokenizer = given["worker.actor.model.tokenizer_path"]
    if tokenizer is not None and tokenizer != given["worker.actor.model.model_path"]:
        yield lacks("worker.actor.model.tokenizer_path", "the tokenizer is the checkpoint's own; put its files there")


def _lora(given: Given) -> Results:
    if given.whole("worker.actor.model.lora.rank") == 0:
        yield from idle(given, "of no use at rank 0", "worker.actor.model.lora.target_modules")
        return
    modules = given["worker.actor.model.lora.target_modules"]
    names = modules if isinstance(modules, list) else str(modules).split(",")
    yield Flag("ds.lora.target_modules", [str(name).strip() for name in names])


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
    for name, everything in (("top_p", 1.0), ("top_k", -1)):
        if (kept := override.get(name, given[f"worker.rollout.{name}"])) != everything:
            yield Flag(f"eval.{name}", kept)
    for name in override.keys() - {"n", "temperature", "top_p", "top_k"}:
        yield lacks(f"worker.rollout.val_override_config.{name}", "evaluation has --eval.temperature, top_p and top_k")


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
    has_critic = given.text("algorithm.adv_estimator") == "gae"
    yield Flag("critic.lr_scheduler", "constant_with_warmup")
    for name in _SHARED:
        if given.has(setting := f"worker.critic.{name}") and given[setting] != given[f"worker.actor.{name}"]:
            yield lacks(setting, f"the critic shares worker.actor.{name}" if has_critic else "only gae has a critic")
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
    yield from trackers(given, "trainer.logger", "console", "file")
    limit = -1 if given["trainer.save_limit"] is None else given.whole("trainer.save_limit")
    yield Flag("ckpt.max_num", KEEP_ALL if limit < 0 else limit)
    if given.switch("trainer.save_model_only"):
        yield Flag("ckpt.save_hf", True)
        yield differs("trainer.save_model_only", "each checkpoint has the model, and what a stopped run resumes from")


_RULES: tuple[Rule, ...] = (
    *(batches, _estimator, _kl, _filter, _loss, _schedule, _weights, _lora),
    *(_rows, lengths, overlong_prompts, _seed, _gpus, _validation, _evaluation_sampling, _reward, _critic, _records),
)

EASYR1 = Table(
    system="EasyR1",
    command="train_ppo_ray",
    settings=settings_of("easyr1"),
    rules=_RULES,
    names=names_of("easyr1_names"),
)
