"""Conversion of EasyR1's settings."""

from __future__ import annotations

import json
import math

from lmm_r1.config.ppo import DEFAULT_VERIFIER
from lmm_r1.errors import UserError
from lmm_r1.tools.migrate.table import Given, Table, checkpoints_kept, listed, names_of, settings_of, trackers

ESTIMATORS, NEAREST_ESTIMATORS = names_of("estimators"), names_of("nearest_estimators")
"""Ours by theirs, and with their difference those that are only near."""
KL_ESTIMATORS = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
LOSS_MEANS = {"token": "token-mean", "seq": "seq-mean-token-mean"}
_LOSS_TYPES = names_of("loss_types")
_SCHEDULES = {"constant": "constant_with_warmup", "cosine": "cosine_with_min_lr"}
_ACTOR = "worker.actor"


def longest_sample(given: Given) -> int:
    """Return the tokens of the longest sample, prompt and response together."""
    return given.whole("data.max_prompt_length") + given.whole("data.max_response_length")


def _choice(given: Given, name: str, known: dict[str, str]) -> str:
    """Return ours of a setting's value; raises UserError for one that is not known."""
    if (value := given.text(name) or "") not in known:
        raise UserError(f"{name} {value!r} is none that is known here; known are {', '.join(known)}")
    return known[value]


def batches(given: Given, *, longest: int | None = None) -> None:
    """Samples of an update, and those of a pass or its tokens.

    Args:
        longest: tokens of the longest sample, if not `longest_sample`.
    """
    prompts, samples = given.whole(f"{_ACTOR}.global_batch_size"), given.whole("worker.rollout.n")
    given.set("train.batch_size", prompts * samples)
    text = f"it counts prompts, --train.batch_size samples: {prompts} x worker.rollout.n {samples}"
    given.derived(f"{_ACTOR}.global_batch_size", text)
    packs, fills = given.switch(f"{_ACTOR}.padding_free"), given.switch(f"{_ACTOR}.dynamic_batching")
    given.set("ds.packing_samples", packs or fills)
    given.set("train.dynamic_batch_enable", fills)
    if not fills:
        return
    longest = longest_sample(given) if longest is None else longest
    for what, flag in (("update", "train"), ("experience", "rollout")):
        micro = given.whole(setting := f"{_ACTOR}.micro_batch_size_per_device_for_{what}")
        given.set(f"{flag}.max_tokens_per_gpu", micro * longest)
        text = f"a dynamic batch has the tokens of {micro} of the longest samples: {micro * longest}"
        given.derived(setting, text)
    if not packs:
        given.differs(f"{_ACTOR}.padding_free", "dynamic batches hold packed sequences here")


def kl_estimator(given: Given, setting: str, *, other: str) -> None:
    """Set the estimator that a setting names; another one for a name that is not known."""
    penalty = given.text(setting) or "kl"
    given.set("algo.kl.estimator", KL_ESTIMATORS.get(penalty, other))
    if penalty not in KL_ESTIMATORS:
        given.lacks(setting, f"{penalty}; --algo.kl.estimator has {', '.join(KL_ESTIMATORS)}")


def _advantages(given: Given) -> None:
    name = "algorithm.adv_estimator"
    ours = _choice(given, name, {**ESTIMATORS, **{one: near for one, (near, _) in NEAREST_ESTIMATORS.items()}})
    given.set("algo.advantage.estimator", ours)
    if (theirs := str(given[name])) in NEAREST_ESTIMATORS:
        given.lacks(name, f"{theirs} is not here; {ours} is the nearest: {NEAREST_ESTIMATORS[theirs][1]}")
    coefficient, as_loss = given.number("algorithm.kl_coef"), given.switch("algorithm.use_kl_loss")
    if given.switch("algorithm.disable_kl"):
        # Without KL its estimator is of no use, and is no setting to report.
        given.read.add("algorithm.kl_penalty")
        given.set("algo.kl.init_coef", 0.0)
        return
    given.set("algo.kl.init_coef", coefficient)
    given.set("algo.kl.use_loss", as_loss)
    # Two estimators are not here: k1 without its sign, and the quantity that k1 estimates.
    kl_estimator(given, "algorithm.kl_penalty", other="k2" if as_loss else "k1")
    adaptive = given.text("algorithm.kl_type") == "adaptive"
    if adaptive and as_loss:
        given.lacks("algorithm.kl_type", "only a KL penalty in the reward has an adaptive weight")
    elif adaptive:
        given.set("algo.kl.target", given.number("algorithm.kl_target"))
        given.set("algo.kl.horizon", given.whole("algorithm.kl_horizon"))


def _filter(given: Given) -> None:
    enabled = given.switch("algorithm.online_filtering")
    given.set("algo.dynamic_filtering_enable", enabled)
    if enabled:
        bounds = [given.number(f"algorithm.filter_{bound}") for bound in ("low", "high")]
        given.set("algo.dynamic_filtering_range", bounds)
        if (key := given.text("algorithm.filter_key")) != "overall":
            given.set("algo.dynamic_filtering_part", key)
        given.set("algo.dynamic_filtering_max_batches", most_batches(given, "trainer.max_try_make_batch"))


def most_batches(given: Given, setting: str, *, multiplier: float = 1.0) -> int:
    """Return how many rollout batches have as many prompts as may be tried there, in batches that may be larger.

    Args:
        setting: says how many of those there may be.
        multiplier: by which they are larger than their size says.
    """
    step, batches = given.whole("data.rollout_batch_size"), given.whole(setting)
    size = step if given["data.mini_rollout_batch_size"] is None else given.whole("data.mini_rollout_batch_size")
    return math.ceil(max(0, batches) * size * multiplier / step)


def _loss(given: Given) -> None:
    kind = given.text(f"{_ACTOR}.loss_type") or ""
    given.set("actor.policy_loss_type", _LOSS_TYPES.get(kind, "ppo"))
    if kind not in _LOSS_TYPES:
        advice = f"look at --actor.eps_clip_low_high, which was meant for {kind}"
        given.lacks(f"{_ACTOR}.loss_type", f"{kind} is not here, and ppo replaces it: {advice}")
    if kind == "sapo":
        for tau, flag in (("tau_positive", "pos"), ("tau_negative", "neg")):
            given.set(f"actor.sapo_temperature_{flag}", given.number(f"{_ACTOR}.{tau}"))
    else:
        bounds = [given.number(f"{_ACTOR}.clip_ratio_{side}") for side in ("low", "high")]
        given.set("actor.eps_clip_low_high", bounds)
        if kind != "cispo":
            given.set("actor.dual_clip", given.number(f"{_ACTOR}.clip_ratio_dual"))
    given.set("actor.loss_agg_mode", _choice(given, f"{_ACTOR}.loss_avg_mode", LOSS_MEANS))


def _optimizer(given: Given) -> None:
    schedule = _choice(given, f"{_ACTOR}.optim.lr_scheduler_type", _SCHEDULES)
    given.set("actor.lr_scheduler", schedule)
    if schedule == "cosine_with_min_lr":
        least = f"{_ACTOR}.optim.min_lr_ratio"
        given.set("actor.min_lr_ratio", 0.0 if given[least] is None else given.number(least))
    steps = f"{_ACTOR}.optim.lr_warmup_steps"
    if given[steps] is not None and given.whole(steps) >= 0:
        given.lacks(steps, f"give {given[steps]} as a share of all updates: --actor.lr_warmup_ratio")
    given.set("ds.zero_stage", 3 if given.switch(f"{_ACTOR}.fsdp.enable_full_shard") else 2)
    if given[f"{_ACTOR}.fsdp.torch_dtype"] is not None:
        text = "--ds.param_dtype is the precision of passes; DeepSpeed also keeps master weights in fp32"
        given.differs(f"{_ACTOR}.fsdp.torch_dtype", text)
    offloads = [f"{_ACTOR}.offload.offload_{what}" for what in ("params", "optimizer")]
    if asked := [name for name in offloads if given.switch(name)]:
        given.set("ds.enable_sleep", True)
        given.derived(", ".join(asked), "--ds.enable_sleep frees the trainer's memory while engines generate")
    reference = ("worker.ref.fsdp.enable_cpu_offload", "worker.ref.offload.offload_params")
    given.set("ref.offload", any(given.switch(name) for name in reference))
    tokenizer = f"{_ACTOR}.model.tokenizer_path"
    if given[tokenizer] not in (None, given[f"{_ACTOR}.model.model_path"]):
        given.lacks(tokenizer, "the tokenizer is the checkpoint's own; put its files there")
    modules = f"{_ACTOR}.model.lora.target_modules"
    if given.whole(f"{_ACTOR}.model.lora.rank"):
        names = [name.strip() for one in listed(given[modules]) for name in str(one).split(",")]
        given.set("ds.lora.target_modules", names)
    elif given.has(modules):
        given.lacks(modules, "of no use at rank 0")


def _rows(given: Given) -> None:
    names, split = _files(given, "data.train_files")
    if names:
        given.set("data.prompt_dataset", ",".join(names))
    if split:
        given.set("data.prompt_split", split)
    given.set("train.seed", given.whole("data.seed"))
    if given.has("data.seed"):
        given.differs("data.seed", "--train.seed seeds everything random, not only the order of the rows")


def _files(given: Given, setting: str) -> tuple[list[str], str | None]:
    """Return the names of a setting's files, and the split that follows an @."""
    files = [str(file).partition("@") for file in listed(given[setting]) if file]
    splits = sorted({split for _, _, split in files if split})
    if len(splits) > 1:
        given.lacks(setting, f"all files share one split here: {splits[0]} is used, of {', '.join(splits)}")
    return [name for name, _, _ in files], splits[0] if splits else None


def lengths(given: Given) -> None:
    """Add up the bounds of prompt and response: here one bound holds for both together."""
    prompt, response = given.whole("data.max_prompt_length"), given.whole("data.max_response_length")
    given.set("data.max_len", prompt + response)
    given.set("rollout.max_new_tokens", response)
    text = f"--data.max_len {prompt + response} is prompt with images ({prompt}) and response ({response}) together"
    given.derived("data.max_prompt_length, data.max_response_length", text)


def overlong_prompts(given: Given) -> None:
    """Convert whether a prompt that is too long is skipped; none is cut here."""
    skips = given.switch("data.filter_overlong_prompts")
    given.set("data.overlong_prompts", "skip" if skips else "error")
    if not skips:
        given.differs("data.filter_overlong_prompts", "EasyR1 cuts a prompt that is too long; here the run stops")


def _gpus(given: Given) -> None:
    nodes, per_node = given.whole("trainer.nnodes"), given.whole("trainer.n_gpus_per_node")
    for model in ("actor", "ref", *(("critic",) if given.text("algorithm.adv_estimator") == "gae" else ())):
        given.set(f"{model}.num_nodes", nodes)
        given.set(f"{model}.num_gpus_per_node", per_node)
    parallel = given.whole("worker.rollout.tensor_parallel_size")
    if parallel < 1 or nodes * per_node % parallel:
        raise UserError(
            f"worker.rollout.tensor_parallel_size {parallel} does not divide the {nodes * per_node} GPUs of "
            f"trainer.nnodes x trainer.n_gpus_per_node; correct one of them"
        )
    given.set("vllm.num_engines", nodes * per_node // parallel)
    given.set("vllm.tensor_parallel_size", parallel)
    given.set("vllm.enable_sleep", True)
    given.set("train.colocate_all", True)
    text = "all models and engines take turns on the same GPUs, as in EasyR1"
    given.derived("trainer.nnodes, trainer.n_gpus_per_node", text)


def _validation(given: Given) -> None:
    names, split = _files(given, "data.val_files")
    steps, before = given.whole("trainer.val_freq"), given.switch("trainer.val_before_train")
    given.set("eval.before_training", bool(names) and before)
    if not names:
        for setting, asked in (("trainer.val_freq", steps >= 1), ("trainer.val_before_train", before)):
            if given.has(setting) and asked:
                given.lacks(setting, "data.val_files names no rows to evaluate on")
    elif steps < 1 and not before:
        given.lacks("data.val_files", "a run evaluates on them only if trainer.val_freq is above 0")
    else:
        given.set("eval.dataset", ",".join(names))
        given.set("eval.steps", steps)
        if len(names) > 1:
            given.differs("data.val_files", "the metrics are means over the rows of all files")
        if split:
            given.set("eval.split", split)
    override = given.group("worker.rollout.val_override_config")
    for name, flag in (("n", "n_samples_per_prompt"), ("temperature", "temperature")):
        given.set(f"eval.{flag}", override.get(name, given[f"worker.rollout.{name}"]))
    for name, everything in (("top_p", 1.0), ("top_k", -1)):
        if (kept := override.get(name, given[f"worker.rollout.{name}"])) != everything:
            given.set(f"eval.{name}", kept)
    for name in override.keys() - {"n", "temperature", "top_p", "top_k"}:
        given.lacks(f"worker.rollout.val_override_config.{name}", "evaluation has --eval.temperature, top_p and top_k")


def _reward(given: Given) -> None:
    if (function := given.text("worker.reward.reward_function")) is not None:
        path, _, name = function.partition(":")
        given.set("reward.remote_url", f"{path}:{name or 'main'}")
    elif (score := given.text("worker.reward.compute_score")) is not None:
        given.set("reward.remote_url", DEFAULT_VERIFIER)
        if score != DEFAULT_VERIFIER:
            given.differs("worker.reward.compute_score", f"{score} is not here; {DEFAULT_VERIFIER} judges")
    if arguments := given.group("worker.reward.reward_function_kwargs"):
        given.set("reward.function_kwargs", json.dumps(arguments, ensure_ascii=False))
    if (kind := given["worker.reward.reward_type"]) is not None:
        text = f'the file specifies it: add REWARD_TYPE = "{kind}" if it is missing'
        given.differs("worker.reward.reward_type", text)


def _critic(given: Given) -> None:
    """Convert the critic's own settings; it is trained on the policy's batches."""
    has_critic = given.text("algorithm.adv_estimator") == "gae"
    given.set("critic.lr_scheduler", "constant_with_warmup")
    warmup = given.whole("trainer.critic_warmup")
    if warmup and not has_critic:
        given.lacks("trainer.critic_warmup", "only gae has a critic")
    elif warmup > 1:
        given.set("critic.freezing_steps", warmup - 2)
        text = f"the policy is first updated in step {warmup}, counted from 1: after step {warmup - 2} counted from 0"
        given.derived("trainer.critic_warmup", text)


def _records(given: Given) -> None:
    name, project = given.text("trainer.experiment_name"), given.text("trainer.project_name")
    given.set("logger.wandb.run_name", name)
    folder = given.text("trainer.save_checkpoint_path") or f"checkpoints/{project}/{name}"
    given.set("ckpt.output_dir", folder)
    text = f"--ckpt.output_dir {folder} also holds the run's records and its final model"
    given.differs("trainer.save_checkpoint_path", text)
    trackers(given, "trainer.logger", "console", "file")
    checkpoints_kept(given, "trainer.save_limit", "trainer.save_model_only")


EASYR1 = Table(
    system="EasyR1",
    command="train_ppo_ray",
    settings=settings_of("easyr1"),
    rules=(
        *(batches, _advantages, _filter, _loss, _optimizer, _rows, lengths, overlong_prompts, _gpus, _validation),
        *(_reward, _critic, _records),
    ),
    names=names_of("easyr1_names"),
)
