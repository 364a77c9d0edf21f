"""Conversion of EasyR1's settings."""

from __future__ import annotations

import json
from collections.abc import Generator

from lmm_r1.config.ppo import DEFAULT_VERIFIER
from lmm_r1.errors import UserError
from lmm_r1.migrate.easyr1_algorithm import ALGORITHM_RULES, MAX_TRIES, Results
from lmm_r1.migrate.table import KEEP_ALL, TRACKERS, Flag, Given, Note, Rule, Table, ruled, to, without

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
        yield Note(
            "without counterpart",
            setting,
            f"all files share one split here: {splits[0]} is used, of {', '.join(splits)}",
        )
    return [name for name, _, _ in listed], splits[0] if splits else None


def lengths(given: Given) -> Results:
    """Add up the bounds of prompt and response: here one bound holds for both together."""
    prompt, response = given.whole("data.max_prompt_length"), given.whole("data.max_response_length")
    yield Flag("data.max_len", prompt + response)
    yield Flag("rollout.max_new_tokens", response)
    yield Note(
        "derived",
        "data.max_prompt_length, data.max_response_length",
        f"--data.max_len {prompt + response} is the sum: prompt with images ({prompt}) and response ({response})",
    )


def overlong_prompts(given: Given) -> Results:
    if given.switch("data.filter_overlong_prompts"):
        yield Flag("data.overlong_prompts", "skip")
    else:
        yield Flag("data.overlong_prompts", "error")
        yield Note(
            "another meaning",
            "data.filter_overlong_prompts",
            "EasyR1 cuts a longer prompt; here a run stops at a prompt that is too long",
        )


def _seed(given: Given) -> Results:
    yield Flag("train.seed", given.whole("data.seed"))
    if given.has("data.seed"):
        yield Note(
            "another meaning", "data.seed", "--train.seed seeds everything random, not only the order of the rows"
        )


def _end(given: Given) -> Results:
    if given["trainer.max_steps"] is not None:
        yield Flag("train.max_steps", given.whole("trainer.max_steps"))


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
    yield Note(
        "derived",
        "trainer.nnodes, trainer.n_gpus_per_node",
        "all models and engines take turns on the same GPUs, as in EasyR1",
    )


def _validation(given: Given) -> Results:
    names, split = yield from _files(given, "data.val_files")
    steps, before = given.whole("trainer.val_freq"), given.switch("trainer.val_before_train")
    yield Flag("eval.before_training", bool(names) and before)
    if not names:
        for setting, asked in (("trainer.val_freq", steps >= 1), ("trainer.val_before_train", before)):
            if given.has(setting) and asked:
                yield Note("without counterpart", setting, "data.val_files names no rows to evaluate on")
        return
    if steps < 1 and not before:
        yield Note(
            "without counterpart", "data.val_files", "a run evaluates on them only if trainer.val_freq is above 0"
        )
        return
    yield Flag("eval.dataset", ",".join(names))
    if len(names) > 1:
        yield Note("another meaning", "data.val_files", "the metrics are means over the rows of all files")
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
            yield Note(
                "without counterpart",
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
        yield Note("another meaning", "worker.reward.compute_score", f"{score} is not here; {DEFAULT_VERIFIER} judges")
    arguments = given.group("worker.reward.reward_function_kwargs")
    if arguments:
        yield Flag("reward.function_kwargs", json.dumps(arguments, ensure_ascii=False))
    if (kind := given["worker.reward.reward_type"]) is not None:
        yield Note(
            "another meaning",
            "worker.reward.reward_type",
            f'the file specifies it: add REWARD_TYPE = "{kind}" if it is missing',
        )


def _critic(given: Given) -> Results:
    """Convert the critic's own settings; it is trained on the policy's batches."""
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
    if has_critic:
        yield Flag("critic.lr_scheduler", "constant_with_warmup")
    for name in (*own, *shared):
        setting = f"worker.critic.{name}"
        if not given.has(setting):
            if has_critic and given[setting] is not None:
                yield Flag(own[name], given[setting])
        elif not has_critic:
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
            f"the policy is first updated in step {warmup}, counted from 1, which is after step {warmup - 2} counted from 0",
        )


def _records(given: Given) -> Results:
    name, project = given.text("trainer.experiment_name"), given.text("trainer.project_name")
    yield Flag("logger.wandb.run_name", name)
    folder = given.text("trainer.save_checkpoint_path") or f"checkpoints/{project}/{name}"
    yield Flag("ckpt.output_dir", folder)
    yield Note(
        "another meaning",
        "trainer.save_checkpoint_path",
        f"--ckpt.output_dir {folder} also holds the run's records and its final model",
    )
    asked = given["trainer.logger"]
    names = [str(entry) for entry in asked] if isinstance(asked, (list, tuple)) else [str(asked)]
    yield Flag("logger.trackers", [tracker for tracker in names if tracker in TRACKERS])
    for unknown in names:
        if unknown not in (*TRACKERS, *OWN_RECORDS):
            yield Note(
                "without counterpart", "trainer.logger", f"{unknown}; --logger.trackers has {', '.join(TRACKERS)}"
            )
    limit = -1 if given["trainer.save_limit"] is None else given.whole("trainer.save_limit")
    yield Flag("ckpt.max_num", KEEP_ALL if limit < 0 else limit)
    if given.switch("trainer.save_model_only"):
        yield Flag("ckpt.disable_ds", True)
        yield Flag("ckpt.save_hf", True)
        yield Note("another meaning", "trainer.save_model_only", "a stopped run cannot be resumed")


RULES: tuple[Rule, ...] = (
    *ALGORITHM_RULES,
    _rows,
    lengths,
    overlong_prompts,
    _seed,
    _end,
    _gpus,
    _validation,
    _evaluation_sampling,
    _reward,
    _critic,
    _records,
)


SYNCED = "the weights are sharded by DeepSpeed (--ds.zero_stage), not FSDP"


DATA = (
    ruled("data.train_files", ""),
    ruled("data.val_files"),
    to("data.prompt_key", "data.input_key", default="prompt"),
    to("data.answer_key", "data.label_key", default="answer"),
    to("data.image_key", "data.image_key", default="images"),
    without("data.video_key", "the column with videos is called videos here; rename it", "videos"),
    to("data.image_dir", "data.image_dir", default=None),
    without("data.video_fps", "fps is in the video part of a row", 2.0),
    ruled("data.max_prompt_length", 512),
    ruled("data.max_response_length", 512),
    to("data.rollout_batch_size", "rollout.batch_size", default=512),
    without(
        "data.mini_rollout_batch_size",
        "prompts are drawn and filtered a few at a time until there are --rollout.batch_size groups",
        None,
    ),
    without("data.val_batch_size", "all rows of --eval.dataset are generated together", -1),
    to("data.format_prompt", "data.prompt_template", default=None),
    to("data.system_prompt", "data.system_prompt"),
    without(
        "data.override_chat_template",
        "RL uses the chat template of the checkpoint; save the checkpoint with another one",
        None,
    ),
    without("data.shuffle", "rows are shuffled in every episode", True),
    ruled("data.seed", 1),
    to("data.min_pixels", "data.min_pixels", default=262144),
    to("data.max_pixels", "data.max_pixels", default=4194304),
    ruled("data.filter_overlong_prompts", True),
    without(
        "data.filter_overlong_prompts_workers",
        "the length of a prompt is checked when its responses are generated",
        16,
    ),
)

ALGORITHM = (
    ruled("algorithm.adv_estimator", "grpo"),
    to("algorithm.gamma", "algo.advantage.gamma", default=1.0),
    to("algorithm.lam", "algo.advantage.lambd", default=1.0),
    ruled("algorithm.disable_kl", False),
    ruled("algorithm.use_kl_loss", False),
    ruled("algorithm.kl_penalty", "kl"),
    ruled("algorithm.kl_coef", 1e-3),
    ruled("algorithm.kl_type", "fixed"),
    ruled("algorithm.kl_horizon", 10000.0),
    ruled("algorithm.kl_target", 0.1),
    ruled("algorithm.online_filtering", False),
    ruled("algorithm.filter_key", "overall"),
    ruled("algorithm.filter_low", 0.01),
    ruled("algorithm.filter_high", 0.99),
)

ACTOR = (
    without("worker.actor.strategy", SYNCED, "fsdp"),
    ruled("worker.actor.global_batch_size", 256),
    to("worker.actor.micro_batch_size_per_device_for_update", "train.micro_batch_size", default=4),
    to("worker.actor.micro_batch_size_per_device_for_experience", "rollout.micro_batch_size", default=16),
    to("worker.actor.max_grad_norm", "actor.max_norm", default=1.0),
    ruled("worker.actor.clip_ratio_low", 0.2),
    ruled("worker.actor.clip_ratio_high", 0.3),
    ruled("worker.actor.clip_ratio_dual", 3.0),
    ruled("worker.actor.loss_type", "default"),
    ruled("worker.actor.loss_avg_mode", "token"),
    to("worker.actor.ppo_epochs", "train.max_epochs", default=1),
    ruled("worker.actor.padding_free", True),
    ruled("worker.actor.dynamic_batching", True),
    to("worker.actor.ulysses_size", "ds.ulysses_size", default=1),
    without("worker.actor.use_torch_compile", "nothing is compiled unless --ds.deepcompile is set", True),
    ruled("worker.actor.tau_positive", 1.0),
    ruled("worker.actor.tau_negative", 1.05),
    to("worker.actor.model.model_path", "actor.model_name_or_path", default=None),
    ruled("worker.actor.model.tokenizer_path"),
    without(
        "worker.actor.model.override_config",
        "the checkpoint's config is used unchanged; edit it in the checkpoint",
        {},
    ),
    to("worker.actor.model.enable_gradient_checkpointing", "actor.gradient_checkpointing_enable", default=True),
    to("worker.actor.model.trust_remote_code", "train.trust_remote_code", default=False),
    to("worker.actor.model.freeze_vision_tower", "actor.freeze_visual_encoder", default=False),
    to("worker.actor.model.lora.rank", "ds.lora.rank", default=0),
    ruled("worker.actor.model.lora.alpha", 64),
    ruled("worker.actor.model.lora.target_modules", "all-linear"),
    without(
        "worker.actor.model.lora.exclude_modules",
        "only the language model gets adapters; name the layers that get one with --ds.lora.target_modules",
        None,
        ".*visual.*",
    ),
    to("worker.actor.optim.lr", "actor.adam.lr", default=1e-6),
    to("worker.actor.optim.betas", "actor.adam.betas", default=(0.9, 0.999)),
    to("worker.actor.optim.weight_decay", "actor.adam.weight_decay", default=1e-2),
    without(
        "worker.actor.optim.strategy",
        "the optimizer's state and the master weights are in fp32 here, which takes more memory (--ds.adam_offload)",
        "adamw",
    ),
    to("worker.actor.optim.lr_warmup_ratio", "actor.lr_warmup_ratio", default=0.0),
    ruled("worker.actor.optim.lr_warmup_steps"),
    ruled("worker.actor.optim.lr_scheduler_type", "constant"),
    ruled("worker.actor.optim.min_lr_ratio"),
    ruled("worker.actor.fsdp.enable_full_shard", True),
    without("worker.actor.fsdp.enable_cpu_offload", "--ds.adam_offload keeps the optimizer's state there", False),
    without("worker.actor.fsdp.enable_rank0_init", "every rank reads the checkpoint", True),
    without("worker.actor.fsdp.use_orig_params", SYNCED, False),
    ruled("worker.actor.fsdp.torch_dtype"),
    without("worker.actor.fsdp.fsdp_size", "weights are sharded over all GPUs; see --ds.zpg", -1),
    to("worker.actor.fsdp.mp_param_dtype", "ds.param_dtype", default="bf16"),
    to("worker.actor.fsdp.mp_reduce_dtype", "ds.grad_accum_dtype", default="fp32"),
    without("worker.actor.fsdp.mp_buffer_dtype", "buffers are in fp32", "fp32"),
    ruled("worker.actor.offload.offload_params", False),
    ruled("worker.actor.offload.offload_optimizer", False),
)

ROLLOUT = (
    without("worker.rollout.name", "vLLM generates", "vllm"),
    to("worker.rollout.n", "rollout.n_samples_per_prompt", default=1),
    to("worker.rollout.temperature", "rollout.temperature", default=1.0),
    to("worker.rollout.top_p", "rollout.top_p", default=1.0),
    to("worker.rollout.top_k", "rollout.top_k", default=-1),
    without("worker.rollout.seed", "--train.seed seeds the engines too", 1),
    to("worker.rollout.limit_images", "data.max_images_per_prompt", default=0),
    without("worker.rollout.dtype", "the engines use --ds.param_dtype", "bf16"),
    to("worker.rollout.gpu_memory_utilization", "vllm.gpu_memory_utilization", default=0.6),
    to("worker.rollout.ignore_eos", "rollout.ignore_eos", default=False),
    to("worker.rollout.enforce_eager", "vllm.enforce_eager", default=None),
    without("worker.rollout.enable_chunked_prefill", "vLLM decides", False),
    ruled("worker.rollout.tensor_parallel_size", 2),
    without("worker.rollout.max_model_len", "the engines use --data.max_len", None),
    without("worker.rollout.max_num_batched_tokens", "vLLM decides", 8192),
    without("worker.rollout.disable_log_stats", "vLLM's statistics are not shown", True),
    without("worker.rollout.disable_tqdm", "progress is a line per step", False),
    ruled("worker.rollout.val_override_config", {}),
)

REF_AND_REWARD = (
    without("worker.hybrid_engine", "policy and engines share their GPUs (--train.colocate_all)", True),
    without("worker.ref.strategy", SYNCED, "fsdp"),
    without("worker.ref.fsdp.enable_full_shard", "the reference model is sharded like the policy", True),
    ruled("worker.ref.fsdp.enable_cpu_offload", False),
    without("worker.ref.fsdp.enable_rank0_init", "every rank reads the checkpoint", True),
    without("worker.ref.fsdp.use_orig_params", SYNCED, False),
    without("worker.ref.fsdp.torch_dtype", "the reference model uses --ds.param_dtype", None, "bf16"),
    without("worker.ref.fsdp.fsdp_size", "weights are sharded over all GPUs; see --ds.zpg", -1),
    without("worker.ref.fsdp.mp_param_dtype", "the reference model uses --ds.param_dtype", "bf16"),
    without("worker.ref.fsdp.mp_reduce_dtype", "the reference model has no gradients", "fp32"),
    without("worker.ref.fsdp.mp_buffer_dtype", "buffers are in fp32", "fp32"),
    ruled("worker.ref.offload.offload_params", False),
    without("worker.ref.offload.offload_optimizer", "the reference model has no optimizer", False),
    ruled("worker.reward.reward_function"),
    ruled("worker.reward.compute_score"),
    ruled("worker.reward.reward_function_kwargs", {}),
    ruled("worker.reward.reward_type"),
    without("worker.reward.skip_special_tokens", "only the end token is removed from the response's text", None),
    without("worker.reward.num_cpus", "the function runs next to each engine", 1),
)

CRITIC = tuple(
    ruled(f"worker.critic.{name}", default)
    for name, default in {
        "global_batch_size": None,
        "micro_batch_size_per_device_for_update": None,
        "micro_batch_size_per_device_for_experience": None,
        "max_grad_norm": 1.0,
        "cliprange_value": 0.5,
        "loss_avg_mode": None,
        "ppo_epochs": None,
        "model.model_path": None,
        "optim.lr": 1e-6,
        "optim.betas": (0.9, 0.999),
        "optim.weight_decay": 1e-2,
        "optim.lr_warmup_ratio": 0.0,
    }.items()
)

TRAINER = (
    to("trainer.total_epochs", "train.num_episodes", default=15),
    ruled("trainer.max_steps"),
    to("trainer.project_name", "logger.wandb.project", default="easy_r1"),
    ruled("trainer.experiment_name", "demo"),
    ruled("trainer.logger", ("console", "wandb")),
    ruled("trainer.nnodes", 1),
    ruled("trainer.n_gpus_per_node", 8),
    ruled("trainer.max_try_make_batch", MAX_TRIES),
    ruled("trainer.critic_warmup", 0),
    ruled("trainer.val_freq", -1),
    ruled("trainer.val_before_train", True),
    without("trainer.val_only", "`lmm-r1 evaluate` measures a checkpoint", False),
    without("trainer.val_generations_to_log", "`lmm-r1 report` shows responses of a run", 0),
    without("trainer.train_generations_to_log", "--logger.rollouts_per_step responses of each step are stored", 0),
    to("trainer.save_freq", "ckpt.save_steps", default=-1),
    ruled("trainer.save_limit", -1),
    ruled("trainer.save_model_only", False),
    ruled("trainer.save_checkpoint_path"),
    without(
        "trainer.load_checkpoint_path",
        "its checkpoints are FSDP's: merge one with its own model_merger and give the folder as "
        "--actor.model_name_or_path; the optimizer's state is lost",
        None,
    ),
    to("trainer.find_last_checkpoint", "ckpt.load_enable", default=True),
    without("trainer.ray_timeline", "`ray timeline` writes one", None),
)

OLD_NAMES = {
    "trainer.total_episodes": "trainer.total_epochs",
    "worker.actor.ulysses_sequence_parallel_size": "worker.actor.ulysses_size",
    "worker.reward.score_function": "worker.reward.reward_function",
    "worker.reward.score_function_kwargs": "worker.reward.reward_function_kwargs",
    "data.format_prompt_path": "data.format_prompt",
    "worker.actor.use_kl_loss": "algorithm.use_kl_loss",
    "worker.actor.kl_loss_type": "algorithm.kl_penalty",
    "worker.actor.kl_loss_coef": "algorithm.kl_coef",
    "worker.actor.offload.param_offload": "worker.actor.offload.offload_params",
    "worker.actor.offload.optimizer_offload": "worker.actor.offload.offload_optimizer",
    "worker.ref.offload.param_offload": "worker.ref.offload.offload_params",
    "trainer.test_freq": "trainer.val_freq",
}
"""Names of settings in earlier versions."""

EASYR1 = Table(
    system="EasyR1",
    command="train_ppo_ray",
    settings=(*DATA, *ALGORITHM, *ACTOR, *ROLLOUT, *REF_AND_REWARD, *CRITIC, *TRAINER),
    rules=RULES,
    names=OLD_NAMES,
)
