"""Conversion of EasyR1's settings."""

from __future__ import annotations

import json
from collections.abc import Generator

from lmm_r1.errors import UserError
from lmm_r1.migrate.easyr1_algorithm import ALGORITHM_RULES, MAX_TRIES, Results
from lmm_r1.migrate.table import Flag, Given, Note, Rule, Setting, Table

TRACKERS = ("wandb", "swanlab", "tensorboard", "mlflow", "trackio")
OWN_RECORDS = ("console", "file")
"""A run's progress in the terminal and its records in the run folder, which are always there."""
KEEP_ALL = 1_000_000
"""Number of checkpoints to keep if none is deleted."""


def _rows(given: Given) -> Results:
    names, split = yield from _files(given, "data.train_files")
    if names:
        yield Flag("data.prompt_dataset", ",".join(names))
    if split:
        yield Flag("data.prompt_split", split)


def _files(given: Given, setting: str) -> Generator[Note, None, tuple[list[str], str | None]]:
    """Return the names of a setting's files and their split, which follows an @."""
    files = given[setting]
    listed = [str(file).partition("@") for file in (files if isinstance(files, list) else [files]) if file]
    splits = sorted({split for _, _, split in listed if split})
    if len(splits) > 1:
        yield Note(
            "without counterpart", setting, f"one split is taken of all files, {splits[0]}, of {', '.join(splits)}"
        )
    return [name for name, _, _ in listed], splits[0] if splits else None


def lengths(given: Given) -> Results:
    """Tokens of prompt and response, which are bounded together here."""
    prompt, response = given.whole("data.max_prompt_length"), given.whole("data.max_response_length")
    yield Flag("data.max_len", prompt + response)
    yield Flag("rollout.max_new_tokens", response)
    yield Note(
        "derived",
        "data.max_prompt_length, data.max_response_length",
        f"--data.max_len {prompt + response} is both together, prompt with images ({prompt}) and response ({response})",
    )


def _overlong_prompts(given: Given) -> Results:
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
        "all models and engines share the same GPUs and take turns, as they do there",
    )


def _validation(given: Given) -> Results:
    names, split = yield from _files(given, "data.val_files")
    steps, before = given.whole("trainer.val_freq"), given.switch("trainer.val_before_train")
    yield Flag("eval.before_training", bool(names) and before)
    if not names:
        for setting, asked in (("trainer.val_freq", steps >= 1), ("trainer.val_before_train", before)):
            if given.has(setting) and asked:
                yield Note("without counterpart", setting, "there are no data.val_files to evaluate on")
        return
    if steps < 1 and not before:
        yield Note("without counterpart", "data.val_files", "they are evaluated on with trainer.val_freq above 0")
        return
    yield Flag("eval.dataset", ",".join(names))
    if len(names) > 1:
        yield Note("another meaning", "data.val_files", "the metrics are means over the rows of all files together")
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
            f'the file itself says it: add REWARD_TYPE = "{kind}" to it if that is missing',
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
                "without counterpart", "trainer.logger", f"{unknown}; --logger.trackers has {', '.join(TRACKERS)}"
            )
    limit = -1 if given["trainer.save_limit"] is None else given.whole("trainer.save_limit")
    yield Flag("ckpt.max_num", KEEP_ALL if limit < 0 else limit)
    if given.switch("trainer.save_model_only"):
        yield Flag("ckpt.disable_ds", True)
        yield Flag("ckpt.save_hf", True)
        yield Note("another meaning", "trainer.save_model_only", "a stopped run can then not be continued")


RULES: tuple[Rule, ...] = (
    *ALGORITHM_RULES,
    _rows,
    lengths,
    _overlong_prompts,
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


def _to(name: str, *flags: str, default: object) -> Setting:
    return Setting(name=name, flags=flags, default=default)


def _ruled(name: str, default: object = None) -> Setting:
    return Setting(name=name, by_rule=True, default=default)


def _without(name: str, says: str, *harmless: object) -> Setting:
    return Setting(name=name, says=says, harmless=harmless, default=harmless[0] if harmless else None)


DATA = (
    _ruled("data.train_files", ""),
    _ruled("data.val_files"),
    _to("data.prompt_key", "data.input_key", default="prompt"),
    _to("data.answer_key", "data.label_key", default="answer"),
    _to("data.image_key", "data.image_key", default="images"),
    _without("data.video_key", "the column with videos is called videos here; rename it", "videos"),
    _to("data.image_dir", "data.image_dir", default=None),
    _without("data.video_fps", "fps is in the video part of a row", 2.0),
    _ruled("data.max_prompt_length", 512),
    _ruled("data.max_response_length", 512),
    _to("data.rollout_batch_size", "rollout.batch_size", default=512),
    _without(
        "data.mini_rollout_batch_size",
        "prompts are drawn, filtered and replaced until --rollout.batch_size groups are there, a few at a time",
        None,
    ),
    _without("data.val_batch_size", "all rows of --eval.dataset are generated together", -1),
    _to("data.format_prompt", "data.prompt_template", default=None),
    _without(
        "data.override_chat_template", "RL takes the chat template of the checkpoint; save it with another one", None
    ),
    _without("data.shuffle", "rows are shuffled in every episode", True),
    _ruled("data.seed", 1),
    _to("data.min_pixels", "data.min_pixels", default=262144),
    _to("data.max_pixels", "data.max_pixels", default=4194304),
    _ruled("data.filter_overlong_prompts", True),
    _without("data.filter_overlong_prompts_workers", "prompts are measured when they are generated for", 16),
)

ALGORITHM = (
    _ruled("algorithm.adv_estimator", "grpo"),
    _to("algorithm.gamma", "algo.advantage.gamma", default=1.0),
    _to("algorithm.lam", "algo.advantage.lambd", default=1.0),
    _ruled("algorithm.disable_kl", False),
    _ruled("algorithm.use_kl_loss", False),
    _ruled("algorithm.kl_penalty", "kl"),
    _ruled("algorithm.kl_coef", 1e-3),
    _ruled("algorithm.kl_type", "fixed"),
    _ruled("algorithm.kl_horizon", 10000.0),
    _ruled("algorithm.kl_target", 0.1),
    _ruled("algorithm.online_filtering", False),
    _ruled("algorithm.filter_key", "overall"),
    _ruled("algorithm.filter_low", 0.01),
    _ruled("algorithm.filter_high", 0.99),
)

ACTOR = (
    _without("worker.actor.strategy", SYNCED, "fsdp"),
    _ruled("worker.actor.global_batch_size", 256),
    _to("worker.actor.micro_batch_size_per_device_for_update", "train.micro_batch_size", default=4),
    _to("worker.actor.micro_batch_size_per_device_for_experience", "rollout.micro_batch_size", default=16),
    _to("worker.actor.max_grad_norm", "actor.max_norm", default=1.0),
    _ruled("worker.actor.clip_ratio_low", 0.2),
    _ruled("worker.actor.clip_ratio_high", 0.3),
    _ruled("worker.actor.clip_ratio_dual", 3.0),
    _ruled("worker.actor.loss_type", "default"),
    _ruled("worker.actor.loss_avg_mode", "token"),
    _to("worker.actor.ppo_epochs", "train.max_epochs", default=1),
    _ruled("worker.actor.padding_free", True),
    _ruled("worker.actor.dynamic_batching", True),
    _to("worker.actor.ulysses_size", "ds.ulysses_size", default=1),
    _without("worker.actor.use_torch_compile", "nothing is compiled unless --ds.deepcompile is given", True),
    _ruled("worker.actor.tau_positive", 1.0),
    _ruled("worker.actor.tau_negative", 1.05),
    _to("worker.actor.model.model_path", "actor.model_name_or_path", default=None),
    _ruled("worker.actor.model.tokenizer_path"),
    _without("worker.actor.model.override_config", "the checkpoint's config is taken as it is; change it there", {}),
    _to("worker.actor.model.enable_gradient_checkpointing", "actor.gradient_checkpointing_enable", default=True),
    _to("worker.actor.model.trust_remote_code", "train.trust_remote_code", default=False),
    _to("worker.actor.model.freeze_vision_tower", "actor.freeze_visual_encoder", default=False),
    _to("worker.actor.model.lora.rank", "ds.lora.rank", default=0),
    _ruled("worker.actor.model.lora.alpha", 64),
    _ruled("worker.actor.model.lora.target_modules", "all-linear"),
    _without(
        "worker.actor.model.lora.exclude_modules",
        "only the language model gets adapters; name the layers that get one with --ds.lora.target_modules",
        None,
        ".*visual.*",
    ),
    _to("worker.actor.optim.lr", "actor.adam.lr", default=1e-6),
    _to("worker.actor.optim.betas", "actor.adam.betas", default=(0.9, 0.999)),
    _to("worker.actor.optim.weight_decay", "actor.adam.weight_decay", default=1e-2),
    _without(
        "worker.actor.optim.strategy",
        "the optimizer's state and the master weights are in fp32 here, which takes more memory (--ds.adam_offload)",
        "adamw",
    ),
    _to("worker.actor.optim.lr_warmup_ratio", "actor.lr_warmup_ratio", default=0.0),
    _ruled("worker.actor.optim.lr_warmup_steps"),
    _ruled("worker.actor.optim.lr_scheduler_type", "constant"),
    _ruled("worker.actor.optim.min_lr_ratio"),
    _ruled("worker.actor.fsdp.enable_full_shard", True),
    _without("worker.actor.fsdp.enable_cpu_offload", "--ds.adam_offload keeps the optimizer's state there", False),
    _without("worker.actor.fsdp.enable_rank0_init", "every rank reads the checkpoint", True),
    _without("worker.actor.fsdp.use_orig_params", SYNCED, False),
    _ruled("worker.actor.fsdp.torch_dtype"),
    _without("worker.actor.fsdp.fsdp_size", "weights are sharded over all GPUs; look at --ds.zpg", -1),
    _to("worker.actor.fsdp.mp_param_dtype", "ds.param_dtype", default="bf16"),
    _to("worker.actor.fsdp.mp_reduce_dtype", "ds.grad_accum_dtype", default="fp32"),
    _without("worker.actor.fsdp.mp_buffer_dtype", "buffers are in fp32", "fp32"),
    _ruled("worker.actor.offload.offload_params", False),
    _ruled("worker.actor.offload.offload_optimizer", False),
)

ROLLOUT = (
    _without("worker.rollout.name", "vLLM generates", "vllm"),
    _to("worker.rollout.n", "rollout.n_samples_per_prompt", default=1),
    _to("worker.rollout.temperature", "rollout.temperature", default=1.0),
    _to("worker.rollout.top_p", "rollout.top_p", default=1.0),
    _to("worker.rollout.top_k", "rollout.top_k", default=-1),
    _without("worker.rollout.seed", "--train.seed seeds the engines too", 1),
    _to("worker.rollout.limit_images", "data.max_images_per_prompt", default=0),
    _without("worker.rollout.dtype", "the engines take --ds.param_dtype", "bf16"),
    _to("worker.rollout.gpu_memory_utilization", "vllm.gpu_memory_utilization", default=0.6),
    _to("worker.rollout.ignore_eos", "rollout.ignore_eos", default=False),
    _to("worker.rollout.enforce_eager", "vllm.enforce_eager", default=None),
    _without("worker.rollout.enable_chunked_prefill", "vLLM decides", False),
    _ruled("worker.rollout.tensor_parallel_size", 2),
    _without("worker.rollout.max_model_len", "the engines take --data.max_len", None),
    _without("worker.rollout.max_num_batched_tokens", "vLLM decides", 8192),
    _without("worker.rollout.disable_log_stats", "vLLM's statistics are not shown", True),
    _without("worker.rollout.disable_tqdm", "progress is a line per step", False),
    _ruled("worker.rollout.val_override_config", {}),
)

REF_AND_REWARD = (
    _without("worker.hybrid_engine", "policy and engines share their GPUs (--train.colocate_all)", True),
    _without("worker.ref.strategy", SYNCED, "fsdp"),
    _without("worker.ref.fsdp.enable_full_shard", "the reference model is sharded as the policy is", True),
    _ruled("worker.ref.fsdp.enable_cpu_offload", False),
    _without("worker.ref.fsdp.enable_rank0_init", "every rank reads the checkpoint", True),
    _without("worker.ref.fsdp.use_orig_params", SYNCED, False),
    _without("worker.ref.fsdp.torch_dtype", "the reference model takes --ds.param_dtype", None, "bf16"),
    _without("worker.ref.fsdp.fsdp_size", "weights are sharded over all GPUs; look at --ds.zpg", -1),
    _without("worker.ref.fsdp.mp_param_dtype", "the reference model takes --ds.param_dtype", "bf16"),
    _without("worker.ref.fsdp.mp_reduce_dtype", "the reference model has no gradients", "fp32"),
    _without("worker.ref.fsdp.mp_buffer_dtype", "buffers are in fp32", "fp32"),
    _ruled("worker.ref.offload.offload_params", False),
    _without("worker.ref.offload.offload_optimizer", "the reference model has no optimizer", False),
    _ruled("worker.reward.reward_function"),
    _ruled("worker.reward.reward_function_kwargs", {}),
    _ruled("worker.reward.reward_type"),
    _without("worker.reward.skip_special_tokens", "only the end token is removed from the response's text", None),
    _without("worker.reward.num_cpus", "the function runs next to each engine", 1),
)

CRITIC = tuple(
    _ruled(f"worker.critic.{name}", default)
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
    _to("trainer.total_epochs", "train.num_episodes", default=15),
    _ruled("trainer.max_steps"),
    _to("trainer.project_name", "logger.wandb.project", default="easy_r1"),
    _ruled("trainer.experiment_name", "demo"),
    _ruled("trainer.logger", ("console", "wandb")),
    _ruled("trainer.nnodes", 1),
    _ruled("trainer.n_gpus_per_node", 8),
    _ruled("trainer.max_try_make_batch", MAX_TRIES),
    _ruled("trainer.critic_warmup", 0),
    _ruled("trainer.val_freq", -1),
    _ruled("trainer.val_before_train", True),
    _without("trainer.val_only", "`lmm-r1 evaluate` measures a checkpoint", False),
    _without("trainer.val_generations_to_log", "`lmm-r1 report` shows responses of a run", 0),
    _without("trainer.train_generations_to_log", "--logger.rollouts_per_step responses are kept of each step", 0),
    _to("trainer.save_freq", "ckpt.save_steps", default=-1),
    _ruled("trainer.save_limit", -1),
    _ruled("trainer.save_model_only", False),
    _ruled("trainer.save_checkpoint_path"),
    _without(
        "trainer.load_checkpoint_path",
        "its checkpoints are FSDP's: merge one with its own model_merger and give the folder as "
        "--actor.model_name_or_path; the optimizer's state is lost",
        None,
    ),
    _to("trainer.find_last_checkpoint", "ckpt.load_enable", default=True),
    _without("trainer.ray_timeline", "`ray timeline` writes one", None),
)

OLD_NAMES = {
    "trainer.total_episodes": "trainer.total_epochs",
    "worker.actor.ulysses_sequence_parallel_size": "worker.actor.ulysses_size",
    "worker.reward.score_function": "worker.reward.reward_function",
    "worker.reward.score_function_kwargs": "worker.reward.reward_function_kwargs",
    "data.format_prompt_path": "data.format_prompt",
}
"""What settings were called in earlier versions."""

EASYR1 = Table(
    system="EasyR1",
    command="train_ppo_ray",
    settings=(*DATA, *ALGORITHM, *ACTOR, *ROLLOUT, *REF_AND_REWARD, *CRITIC, *TRAINER),
    rules=RULES,
    names=OLD_NAMES,
)
