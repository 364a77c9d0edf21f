"""What EasyR1's settings are here where several make up one, or one has another unit or other names for its values."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator

from lmm_r1.config.conversion.table import Flag, Given, Note, Rule
from lmm_r1.errors import UserError

Results = Iterator[Flag | Note]

ESTIMATORS = {"grpo": "group_norm", "rloo": "rloo", "reinforce_plus_plus": "reinforce", "gae": "gae"}
NEAREST_ESTIMATORS = {
    "remax": ("reinforce_baseline", "its baseline is the reward of a greedy response, here the group's mean"),
    "grpo_passk": ("group_norm", "only the best response of a group has an advantage there"),
    "gdpo": ("group_norm", "each part of the reward is normalized for itself there"),
}
KL_ESTIMATORS = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
LOSS_TYPES = {"default": "ppo", "gspo": "gspo", "gspo_token": "gspo"}
LOSS_MEANS = {"token": "token-mean", "seq": "seq-mean-token-mean"}
SCHEDULES = {"constant": "constant_with_warmup", "cosine": "cosine_with_min_lr"}
TRACKERS = ("wandb", "swanlab", "tensorboard", "mlflow")
OWN_RECORDS = ("console", "file")
"""A run's progress in the terminal and its records in the run folder, which are always there."""
KEEP_ALL = 1_000_000
"""Checkpoints, where none is to be deleted."""


def _rows(given: Given) -> Results:
    names, split = yield from _files(given, "data.train_files")
    if names:
        yield Flag("data.prompt_dataset", ",".join(names))
    if split:
        yield Flag("data.prompt_split", split)


def _files(given: Given, setting: str) -> Generator[Note, None, tuple[list[str], str | None]]:
    """Return the names of a setting's files and their split, which stands behind an @."""
    files = given[setting]
    listed = [str(file).partition("@") for file in (files if isinstance(files, list) else [files]) if file]
    splits = sorted({split for _, _, split in listed if split})
    if len(splits) > 1:
        yield Note(
            "without counterpart", setting, f"one split is taken of all files, {splits[0]}, of {', '.join(splits)}"
        )
    return [name for name, _, _ in listed], splits[0] if splits else None


def _lengths(given: Given) -> Results:
    prompt, response = given.whole("data.max_prompt_length"), given.whole("data.max_response_length")
    yield Flag("data.max_len", prompt + response)
    yield Flag("rollout.max_new_tokens", response)
    yield Note(
        "derived",
        "data.max_prompt_length, data.max_response_length",
        f"--data.max_len {prompt + response} is both together, prompt with images ({prompt}) and response ({response})",
    )
    if given.switch("data.filter_overlong_prompts"):
        yield Flag("data.overlong_prompts", "skip")
    else:
        yield Flag("data.overlong_prompts", "error")
        yield Note(
            "another meaning",
            "data.filter_overlong_prompts",
            "a longer prompt is cut there; here none ever is, and a run stops at one that is too long",
        )


def _seed(given: Given) -> Results:
    yield Flag("train.seed", given.whole("data.seed"))
    if given.has("data.seed"):
        yield Note("another meaning", "data.seed", "--train.seed seeds all that is random, not only the order of rows")


def _batches(given: Given) -> Results:
    prompts, samples = given.whole("worker.actor.global_batch_size"), given.whole("worker.rollout.n")
    yield Flag("train.batch_size", prompts * samples)
    yield Note(
        "derived",
        "worker.actor.global_batch_size",
        f"it counts prompts, --train.batch_size counts samples: {prompts} x worker.rollout.n {samples} = "
        f"{prompts * samples}",
    )
    packs, fills = given.switch("worker.actor.padding_free"), given.switch("worker.actor.dynamic_batching")
    yield Flag("ds.packing_samples", packs or fills)
    yield Flag("train.dynamic_batch_enable", fills)
    if not fills:
        return
    longest = given.whole("data.max_prompt_length") + given.whole("data.max_response_length")
    for setting, flag in (
        ("worker.actor.micro_batch_size_per_device_for_update", "train.max_tokens_per_gpu"),
        ("worker.actor.micro_batch_size_per_device_for_experience", "rollout.max_tokens_per_gpu"),
    ):
        micro = given.whole(setting)
        yield Flag(flag, micro * longest)
        yield Note(
            "derived",
            setting,
            f"with dynamic batching a pass holds as many tokens as {micro} of the longest samples: {micro * longest}",
        )
    if not packs:
        yield Note("another meaning", "worker.actor.padding_free", "dynamic batches hold packed sequences here")


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
    yield Note(
        "without counterpart", "algorithm.adv_estimator", f"{name} is not here; {nearest} is the nearest: {difference}"
    )


def _kl(given: Given) -> Results:
    if given.switch("algorithm.disable_kl"):
        yield Flag("algo.kl.init_coef", 0.0)
        return
    yield Flag("algo.kl.init_coef", given.number("algorithm.kl_coef"))
    as_loss = given.switch("algorithm.use_kl_loss")
    yield Flag("algo.kl.use_loss", as_loss)
    penalty = given.text("algorithm.kl_penalty") or ""
    # Of the two that are not here, one is k1 without its sign and the other what k1 estimates.
    yield Flag("algo.kl.estimator", KL_ESTIMATORS.get(penalty, "k2" if as_loss else "k1"))
    if penalty not in KL_ESTIMATORS:
        yield Note(
            "without counterpart",
            "algorithm.kl_penalty",
            f"{penalty}; --algo.kl.estimator has {_listed(KL_ESTIMATORS)}",
        )
    adaptive = given.text("algorithm.kl_type") == "adaptive"
    if adaptive and not as_loss:
        yield Flag("algo.kl.target", given.number("algorithm.kl_target"))
        yield Flag("algo.kl.horizon", given.whole("algorithm.kl_horizon"))
        return
    if adaptive:
        yield Note(
            "without counterpart", "algorithm.kl_type", "only a KL penalty in the reward has an adaptive weight"
        )
    for name in ("algorithm.kl_target", "algorithm.kl_horizon"):
        if given.has(name):
            yield Note("without counterpart", name, "belongs to a KL penalty in the reward with an adaptive weight")


def _filter(given: Given) -> Results:
    enabled = given.switch("algorithm.online_filtering")
    yield Flag("algo.dynamic_filtering_enable", enabled)
    low, high = given.number("algorithm.filter_low"), given.number("algorithm.filter_high")
    yield Flag("algo.dynamic_filtering_range", [low, high])
    key = given.text("algorithm.filter_key")
    if key == "overall":
        return
    if enabled:
        yield Flag("reward.score_key", key)
        yield Note(
            "another meaning",
            "algorithm.filter_key",
            "--reward.score_key also names what evaluation and pass@k are computed on",
        )
    else:
        yield Note("without counterpart", "algorithm.filter_key", "nothing is filtered without online_filtering")


def _loss(given: Given) -> Results:
    yield Flag(
        "actor.eps_clip_low_high",
        [given.number("worker.actor.clip_ratio_low"), given.number("worker.actor.clip_ratio_high")],
    )
    kind = given.text("worker.actor.loss_type") or ""
    yield Flag("actor.policy_loss_type", LOSS_TYPES.get(kind, "ppo"))
    if kind not in LOSS_TYPES:
        yield Note(
            "without counterpart",
            "worker.actor.loss_type",
            f"{kind} is not here, and ppo is written in its place: look at --actor.eps_clip_low_high, which was meant "
            f"for {kind}",
        )
    elif kind == "gspo_token":
        yield Note("another meaning", "worker.actor.loss_type", "gspo has the same gradient with these advantages")
    for tau in ("worker.actor.tau_positive", "worker.actor.tau_negative"):
        if given.has(tau):
            yield Note("without counterpart", tau, "belongs to the loss sapo, which is not here")
    mean = given.text("worker.actor.loss_avg_mode") or ""
    if mean not in LOSS_MEANS:
        raise UserError(f"worker.actor.loss_avg_mode {mean!r} must be one of {', '.join(LOSS_MEANS)}")
    yield Flag("actor.loss_agg_mode", LOSS_MEANS[mean])


def _gpus(given: Given) -> Results:
    nodes, per_node = given.whole("trainer.nnodes"), given.whole("trainer.n_gpus_per_node")
    for model in ("actor", "ref", "critic"):
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
    yield Note(
        "derived",
        "trainer.nnodes, trainer.n_gpus_per_node",
        "all models and engines share the same GPUs and take turns, as they do there",
    )


def _schedule(given: Given) -> Results:
    kind = given.text("worker.actor.optim.lr_scheduler_type") or ""
    if kind not in SCHEDULES:
        raise UserError(f"worker.actor.optim.lr_scheduler_type {kind!r} must be one of {', '.join(SCHEDULES)}")
    yield Flag("actor.lr_scheduler", SCHEDULES[kind])
    ratio = given["worker.actor.optim.min_lr_ratio"]
    if kind == "cosine":
        yield Flag("actor.min_lr_ratio", 0.0 if ratio is None else given.number("worker.actor.optim.min_lr_ratio"))
    elif ratio is not None:
        yield Note("without counterpart", "worker.actor.optim.min_lr_ratio", "a constant learning rate has no end")
    if (steps := given["worker.actor.optim.lr_warmup_steps"]) is not None:
        yield Note(
            "without counterpart",
            "worker.actor.optim.lr_warmup_steps",
            f"give {steps} as a share of all updates: --actor.lr_warmup_ratio",
        )


def _weights(given: Given) -> Results:
    yield Flag("ds.zero_stage", 3 if given.switch("worker.actor.fsdp.enable_full_shard") else 2)
    if given["worker.actor.fsdp.torch_dtype"] is not None:
        yield Note(
            "another meaning",
            "worker.actor.fsdp.torch_dtype",
            "--ds.param_dtype is the precision of passes; DeepSpeed keeps master weights in fp32 beside it",
        )
    offloads = [f"worker.actor.offload.offload_{what}" for what in ("params", "optimizer")]
    asked = [name for name in offloads if given.switch(name)]
    if asked:
        yield Flag("ds.enable_sleep", True)
        yield Note("derived", ", ".join(asked), "--ds.enable_sleep frees the trainer's memory while engines generate")
    reference = ("worker.ref.fsdp.enable_cpu_offload", "worker.ref.offload.offload_params")
    yield Flag("ref.offload", any(given.switch(name) for name in reference))
    tokenizer = given["worker.actor.model.tokenizer_path"]
    if tokenizer is not None and tokenizer != given["worker.actor.model.model_path"]:
        yield Note(
            "without counterpart",
            "worker.actor.model.tokenizer_path",
            "the tokenizer is the checkpoint's own; put its files there",
        )


def _lora(given: Given) -> Results:
    if given.whole("worker.actor.model.lora.rank") == 0:
        for name in ("alpha", "target_modules"):
            if given.has(f"worker.actor.model.lora.{name}"):
                yield Note("without counterpart", f"worker.actor.model.lora.{name}", "of no use at rank 0")
        return
    yield Flag("ds.lora.alpha", given.whole("worker.actor.model.lora.alpha"))
    modules = given["worker.actor.model.lora.target_modules"]
    names = modules if isinstance(modules, list) else str(modules).split(",")
    yield Flag("ds.lora.target_modules", [str(name).strip() for name in names])


def _validation(given: Given) -> Results:
    names, split = yield from _files(given, "data.val_files")
    steps = given.whole("trainer.val_freq")
    if not names or steps < 1:
        for setting in ("data.val_files", "trainer.val_freq"):
            if given.has(setting) and (names if setting == "data.val_files" else steps >= 1):
                yield Note(
                    "without counterpart", setting, "data.val_files are evaluated on with trainer.val_freq above 0"
                )
        return
    yield Flag("eval.dataset", names[0])
    if len(names) > 1:
        yield Note(
            "without counterpart", "data.val_files", f"one is taken, {names[0]}; put the rows of all into one file"
        )
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
        # What training samples with, too, is no difference.
        same = name == "top_p" and value == given["worker.rollout.top_p"]
        if name not in ("n", "temperature") and not same:
            yield Note(
                "without counterpart",
                f"worker.rollout.val_override_config.{name}",
                "evaluation samples as --rollout says, but for --eval.temperature and --eval.n_samples_per_prompt",
            )


def _reward(given: Given) -> Results:
    function = given.text("worker.reward.reward_function")
    if function is not None:
        path, _, name = function.partition(":")
        yield Flag("reward.remote_url", f"{path}:{name or 'main'}")
    arguments = given.group("worker.reward.reward_function_kwargs")
    if arguments:
        yield Flag("reward.function_kwargs", json.dumps(arguments, ensure_ascii=False))
    if (kind := given["worker.reward.reward_type"]) is not None:
        yield Note(
            "another meaning",
            "worker.reward.reward_type",
            f'the file itself says it: put REWARD_TYPE = "{kind}" into it where that is missing',
        )


def _critic(given: Given) -> Results:
    """A critic learns from the policy's batches, as far as it has settings of its own."""
    own = {
        "model.model_path": "critic.model_name_or_path",
        "max_grad_norm": "critic.max_norm",
        "cliprange_value": "critic.value_clip",
        "optim.lr": "critic.adam.lr",
        "optim.betas": "critic.adam.betas",
        "optim.weight_decay": "critic.adam.weight_decay",
        "optim.lr_warmup_ratio": "critic.lr_warmup_ratio",
    }
    shared = {
        "global_batch_size": "worker.actor.global_batch_size",
        "micro_batch_size_per_device_for_update": "worker.actor.micro_batch_size_per_device_for_update",
        "micro_batch_size_per_device_for_experience": "worker.actor.micro_batch_size_per_device_for_experience",
        "loss_avg_mode": "worker.actor.loss_avg_mode",
        "ppo_epochs": "worker.actor.ppo_epochs",
    }
    has_critic = given.text("algorithm.adv_estimator") == "gae"
    for name in (*own, *shared):
        setting = f"worker.critic.{name}"
        if not given.has(setting):
            continue
        if not has_critic:
            yield Note("without counterpart", setting, "only gae has a critic")
        elif name in own:
            yield Flag(own[name], given[setting])
        elif given[setting] != given[shared[name]]:
            yield Note("without counterpart", setting, f"the critic shares {shared[name]}")
    warmup = given.whole("trainer.critic_warmup")
    if warmup and not has_critic:
        yield Note("without counterpart", "trainer.critic_warmup", "only gae has a critic")
    elif warmup > 1:
        yield Flag("critic.freezing_steps", warmup - 2)
        yield Note(
            "derived",
            "trainer.critic_warmup",
            f"the policy learns from step {warmup} on, counted from 1, so after step {warmup - 2} counted from 0",
        )


def _records(given: Given) -> Results:
    name, project = given.text("trainer.experiment_name"), given.text("trainer.project_name")
    yield Flag("logger.wandb.run_name", name)
    folder = given.text("trainer.save_checkpoint_path") or f"checkpoints/{project}/{name}"
    yield Flag("ckpt.output_dir", folder)
    yield Note(
        "another meaning",
        "trainer.save_checkpoint_path",
        f"--ckpt.output_dir {folder} holds the run's records and its final model, too",
    )
    asked = given["trainer.logger"]
    names = [str(entry) for entry in asked] if isinstance(asked, (list, tuple)) else [str(asked)]
    yield Flag("logger.trackers", [tracker for tracker in names if tracker in TRACKERS])
    for unknown in names:
        if unknown not in (*TRACKERS, *OWN_RECORDS):
            yield Note(
                "without counterpart", "trainer.logger", f"{unknown}; --logger.trackers has {_listed(TRACKERS)}"
            )
    limit = given.whole("trainer.save_limit")
    yield Flag("ckpt.max_num", KEEP_ALL if limit < 0 else limit)
    if given.switch("trainer.save_model_only"):
        yield Flag("ckpt.disable_ds", True)
        yield Flag("ckpt.save_hf", True)
        yield Note("another meaning", "trainer.save_model_only", "a stopped run can then not be continued")


def _listed(names: object) -> str:
    return ", ".join(names) if isinstance(names, (dict, tuple)) else str(names)


RULES: tuple[Rule, ...] = (
    _rows,
    _lengths,
    _seed,
    _batches,
    _estimator,
    _kl,
    _filter,
    _loss,
    _gpus,
    _schedule,
    _weights,
    _lora,
    _validation,
    _evaluation_sampling,
    _reward,
    _critic,
    _records,
)
