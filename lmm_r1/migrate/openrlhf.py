"""Conversion of command lines of OpenRLHF 0.3 to 0.11, and of LMM-R1's own scripts."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from lmm_r1.config.differences import DIFFERENCES, only_defaults
from lmm_r1.dotted import leaf_types
from lmm_r1.migrate.table import CONFIG_CLASSES, OURS, Command, Flag, Given, Note, Rule, Setting, Table, to, without

Results = Iterator[Flag | Note]

VISION_TOWERS = ("visual", "vision_tower", "model.visual", "model.vision_tower")
"""Prefixes of parameters that are a vision tower's in the architectures that LMM-R1 trains."""


def _precision(given: Given) -> Results:
    if given.has("bf16"):
        yield Flag("ds.param_dtype", "bf16")
    if given.has("flash_attn"):
        yield Note("derived", "flash_attn", "--ds.attn_implementation auto takes the fastest attention installed")


def _long_sequences(given: Given) -> Results:
    size = given.whole("ring_attn_size")
    if size > 1:
        yield Flag("ds.ulysses_size", size)
        yield Note(
            "another meaning", "ring_attn_size", "Ulysses splits attention heads, of which it must be a divisor"
        )


def _adapters(given: Given) -> Results:
    if given.has("target_modules"):
        yield Flag("ds.lora.target_modules", _words(given["target_modules"]))


def _trackers(given: Given) -> Results:
    if given.has("use_wandb"):
        yield Flag("logger.trackers", ["wandb"])
        yield Note("another meaning", "use_wandb", "the key is not written down; set WANDB_API_KEY")


def _evaluation(given: Given) -> Results:
    dataset, steps = given.text("eval_dataset"), given.whole("eval_steps")
    if dataset is None:
        if given.has("eval_steps") and steps > 0:
            yield Note("without counterpart", "eval_steps", "there is no eval_dataset to evaluate on")
        return
    yield Flag("eval.dataset", dataset)
    yield Flag("eval.steps", steps)


def _weight_sync(given: Given) -> Results:
    backend = given.text("vllm_sync_backend")
    if backend != "nccl":
        yield Note(
            "another meaning",
            "vllm_sync_backend",
            f"weights travel by NCCL, or with --vllm.sync_with_ray, not {backend}",
        )


def _lengths(given: Given) -> Results:
    own = "max_new_tokens" if given.has("max_new_tokens") else "generate_max_len"
    prompt, response = given.whole("prompt_max_len"), given.whole(own)
    total = prompt + response if given["max_len"] is None else given.whole("max_len")
    yield Flag("data.max_len", total)
    yield Flag("rollout.max_new_tokens", response)
    if given["max_len"] is None:
        yield Note(
            "derived",
            "prompt_max_len, generate_max_len",
            f"--data.max_len {total} is prompt with images ({prompt}) and response ({response}) together",
        )
    else:
        yield Note(
            "another meaning", "max_len", f"a prompt may have {total - response} tokens, whatever prompt_max_len says"
        )


def _reward_model(given: Given) -> Results:
    models = given.text("reward_pretrain")
    if models is None:
        return
    if given["remote_rm_url"] is not None:
        yield Note("without counterpart", "reward_pretrain", "--reward.remote_url gives the rewards")
        return
    first, *others = models.split(",")
    yield Flag("reward.model_name_or_path", first)
    if others:
        yield Note("without counterpart", "reward_pretrain", f"one reward model is taken, {first}; left out: {others}")


def _divergence(given: Given) -> Results:
    if given["use_kl_estimator_k3"]:
        yield Flag("algo.kl.estimator", "k3")


_CORRECTIONS = {"tis": ("token", "clip"), "icepop": ("token", "mask"), "seq-mask-tis": ("seq", "mask")}
"""Level and mode of each kind of correction between engine and trainer."""


def _correction(given: Given) -> Results:
    """Ratios between vLLM's and the trainer's log-probs, which the first versions clip above one bound."""
    if not given["enable_vllm_is_correction"]:
        for name in ("vllm_is_correction_type", "vllm_is_truncated_threshold", "use_icepop"):
            if given.has(name):
                yield Note("without counterpart", name, "it has no effect without enable_vllm_is_correction")
        return
    kind = "icepop" if given["use_icepop"] else given.text("vllm_is_correction_type") or "tis"
    if kind not in _CORRECTIONS:
        yield Note("without counterpart", "vllm_is_correction_type", f"{kind}; tis is written instead")
    level, mode = _CORRECTIONS.get(kind, _CORRECTIONS["tis"])
    threshold = given["vllm_is_truncated_threshold"]
    yield Flag("algo.advantage.is_correction_level", level)
    yield Flag("algo.advantage.is_correction_mode", mode)
    yield Flag("algo.advantage.is_correction_threshold", threshold if isinstance(threshold, list) else [threshold])


def _entropy(given: Given) -> Results:
    if coefficient := given.number("entropy_loss_coef"):
        yield Flag("actor.entropy_coef", coefficient)


def _media(given: Given) -> Results:
    for kind, most in given.group("limit_mm_per_prompt").items():
        if kind == "image":
            yield Flag("data.max_images_per_prompt", most)
        else:
            yield Note("without counterpart", "limit_mm_per_prompt", f"{kind}: no limit is needed")
    for name, value in given.group("processor_kwargs").items():
        if name in ("min_pixels", "max_pixels"):
            yield Flag(f"data.{name}", value)
        else:
            yield Note("without counterpart", "processor_kwargs", f"{name}: the processor is the checkpoint's own")


def _frozen(given: Given) -> Results:
    if not given.has("freeze_prefix"):
        return
    prefixes = [prefix.rstrip(".") for prefix in _words(given["freeze_prefix"])]
    if all(prefix in VISION_TOWERS for prefix in prefixes):
        yield Flag("actor.freeze_visual_encoder", True)
        yield Note("another meaning", "freeze_prefix", "--actor.freeze_visual_encoder freezes the critic's tower, too")
    else:
        yield Flag("actor.freeze_prefix", _words(given["freeze_prefix"]))


def _words(value: object) -> list[str]:
    return [str(word) for word in value] if isinstance(value, (list, tuple)) else [str(value)]


_SHARED: tuple[Rule, ...] = (_precision, _long_sequences, _adapters, _trackers, _evaluation)
PPO_RULES: tuple[Rule, ...] = (
    *_SHARED,
    _weight_sync,
    _lengths,
    _reward_model,
    _divergence,
    _correction,
    _entropy,
    _media,
    _frozen,
)
SUPERVISED_RULES: tuple[Rule, ...] = _SHARED


def _ruled(name: str, says: str, default: object = None) -> Setting:
    return Setting(name=name, by_rule=True, says=says, default=default)


SHARED = (
    to("local_rank", "local_rank"),
    without("use_ms", "models come from the Hugging Face hub", False),
    to("seed", "train.seed", default=42),
    to("full_determinism", "train.full_determinism_enable", default=False),
    to("train_batch_size", "train.batch_size", default=128),
    to("max_epochs", "train.max_epochs"),
    to("zero_stage", "ds.zero_stage", default=2),
    _ruled("bf16", "--ds.param_dtype bf16 here, the default on GPUs", False),
    to("param_dtype", "ds.param_dtype"),
    to("attn_implementation", "ds.attn_implementation"),
    without("disable_trace_cache", "DeepSpeed's parameter trace is always kept", False),
    without("torch_compile", "nothing is compiled unless --ds.deepcompile is given", False),
    to("best_metric_key", "ckpt.best_metric_key"),
    to("image_key", "data.image_key"),
    to("zpg", "ds.zpg", default=1),
    to("adam_offload", "ds.adam_offload", default=False),
    _ruled("flash_attn", "left out here: the fastest attention that is installed is taken (--ds.attn_implementation)"),
    to("use_liger_kernel", "ds.use_liger_kernel"),
    to("grad_accum_dtype", "ds.grad_accum_dtype"),
    to("overlap_comm", "ds.overlap_comm", default=False),
    to("deepcompile", "ds.deepcompile", default=False),
    to("use_ds_universal_ckpt", "ds.use_universal_ckpt", default=False),
    to("ds_tensor_parallel_size", "ds.tensor_parallel_size", default=1),
    to("packing_samples", "ds.packing_samples", default=False),
    _ruled("ring_attn_size", "--ds.ulysses_size here, which splits packed sequences by attention heads", 1),
    without("ring_head_stride", "there is no ring attention; --ds.ulysses_size splits long sequences", 1),
    to("load_in_4bit", "ds.load_in_4bit", default=False),
    to("lora_rank", "ds.lora.rank", default=0),
    to("lora_alpha", "ds.lora.alpha", default=16),
    _ruled("target_modules", "--ds.lora.target_modules here"),
    without("exclude_modules", "name the layers that get an adapter with --ds.lora.target_modules", None),
    to("lora_dropout", "ds.lora.dropout", default=0.0),
    without("disable_fast_tokenizer", "transformers 5 has one tokenizer for each of these models", False),
    to("apply_chat_template", "data.apply_chat_template", default=False),
    to("max_samples", "data.max_samples"),
    to("input_key", "data.input_key", default="input"),
    to("save_path", "ckpt.output_dir", default="./ckpt"),
    to("save_steps", "ckpt.save_steps", default=-1),
    to("save_hf_ckpt", "ckpt.save_hf", default=False),
    to("disable_ds_ckpt", "ckpt.disable_ds", default=False),
    to("ckpt_path", "ckpt.path"),
    to("max_ckpt_num", "ckpt.max_num", default=3),
    to("max_ckpt_mem", "ckpt.max_mem"),
    to("load_checkpoint", "ckpt.load_enable"),
    to("logging_steps", "logger.logging_steps", default=1),
    _ruled("eval_dataset", "--eval.dataset here"),
    to("eval_split", "eval.split", default="train"),
    _ruled("eval_steps", "--eval.steps here", -1),
    _ruled("use_wandb", "--logger.trackers wandb here, with the key in WANDB_API_KEY"),
    to("wandb_org", "logger.wandb.org", default=None),
    to("wandb_group", "logger.wandb.group", default=None),
    to("wandb_project", "logger.wandb.project"),
    to("wandb_run_name", "logger.wandb.run_name"),
    to("use_tensorboard", "logger.tensorboard_dir", default=None),
)

PPO = (
    without("dataloader_num_workers", "all rows are read before the first step", 0),
    *(
        to(f"{model}_{what}", f"{model}.{what}")
        for model in ("actor", "ref", "critic", "reward")
        for what in ("num_nodes", "num_gpus_per_node")
    ),
    to("pretrain", "actor.model_name_or_path"),
    _ruled("reward_pretrain", "--reward.model_name_or_path here"),
    to("critic_pretrain", "critic.model_name_or_path"),
    to("remote_rm_url", "reward.remote_url"),
    to("value_head_prefix", "ds.value_head_prefix", default="score"),
    to("ref_reward_offload", "ref.offload", "reward.offload", default=False),
    to("colocate_all_models", "train.colocate_all", default=False),
    to("colocate_actor_ref", "train.colocate_actor_ref", default=False),
    to("colocate_critic_reward", "train.colocate_critic_reward", default=False),
    to("vllm_num_engines", "vllm.num_engines"),
    to("vllm_tensor_parallel_size", "vllm.tensor_parallel_size", default=1),
    _ruled(
        "vllm_sync_backend",
        "left out here: new weights travel by NCCL, or with --vllm.sync_with_ray through Ray",
        "nccl",
    ),
    to("vllm_sync_with_ray", "vllm.sync_with_ray", default=False),
    to("vllm_enable_sleep", "vllm.enable_sleep", default=False),
    to("vllm_gpu_memory_utilization", "vllm.gpu_memory_utilization", default=0.95),
    to("enable_prefix_caching", "vllm.enable_prefix_caching", default=False),
    to("enforce_eager", "vllm.enforce_eager"),
    _ruled("limit_mm_per_prompt", "--data.max_images_per_prompt here; left out, images are counted in the data"),
    _ruled(
        "processor_kwargs", "--data.min_pixels and --data.max_pixels here, or min_pixels and max_pixels in the rows"
    ),
    _ruled("freeze_prefix", "--actor.freeze_visual_encoder here, for the vision tower"),
    to("gradient_checkpointing", "actor.gradient_checkpointing_enable", default=False),
    to("gradient_checkpointing_use_reentrant", "actor.gradient_checkpointing_reentrant", default=False),
    to("deepspeed_enable_sleep", "ds.enable_sleep", default=False),
    without("actor_init_on_gpu", "models are loaded where they are trained", None),
    to("enable_ema", "train.enable_ema", default=False),
    to("ema_beta", "train.ema_beta", default=0.992),
    to("num_episodes", "train.num_episodes", default=1),
    to("max_global_steps", "train.max_steps"),
    to("rollout_batch_size", "rollout.batch_size", default=1024),
    to("micro_rollout_batch_size", "rollout.micro_batch_size", default=8),
    to("micro_train_batch_size", "train.micro_batch_size", default=4),
    to("n_samples_per_prompt", "rollout.n_samples_per_prompt", default=1),
    without(
        "store_extra_buffers", "with --algo.dynamic_filtering_enable groups are drawn until the batch is full", None
    ),
    without(
        "custom_experience_filter",
        "--algo.experience_filter takes a function of one group's samples, and no experience maker: write it anew",
        None,
    ),
    _ruled("prompt_max_len", "a part of --data.max_len here, which is prompt and response together", 1024),
    _ruled("generate_max_len", "--rollout.max_new_tokens here, and a part of --data.max_len", 1024),
    _ruled("max_len", "--data.max_len here, which is prompt and response together"),
    to("max_norm", "actor.max_norm", "critic.max_norm", default=1.0),
    to("l2", "actor.adam.weight_decay", "critic.adam.weight_decay", default=0.0),
    to("adam_betas", "actor.adam.betas", "critic.adam.betas", default=(0.9, 0.95)),
    to("lr_warmup_ratio", "actor.lr_warmup_ratio", "critic.lr_warmup_ratio", default=0.03),
    to("actor_learning_rate", "actor.adam.lr", default=1e-6),
    to("critic_learning_rate", "critic.adam.lr", default=9e-6),
    *(
        without(name, "RL has no additional pre-training loss", default)
        for name, default in {
            "ptx_coef": 0.05,
            "pretrain_data": None,
            "pretrain_data_probs": "1.0",
            "pretrain_split": "train",
        }.items()
    ),
    _ruled("use_kl_estimator_k3", "--algo.kl.estimator k3 here", False),
    _ruled("enable_vllm_is_correction", "--algo.advantage.is_correction_level here", False),
    _ruled("vllm_is_correction_type", "--algo.advantage.is_correction_mode here", "tis"),
    _ruled("use_icepop", "--algo.advantage.is_correction_mode mask here", False),
    _ruled("vllm_is_truncated_threshold", "--algo.advantage.is_correction_threshold here", 2),
    to("async_train", "train.async_enable"),
    to("async_queue_size", "train.async_queue_size"),
    to("partial_rollout", "train.partial_rollout_enable"),
    to("use_dynamic_batch", "train.dynamic_batch_enable"),
    to("rollout_max_tokens_per_gpu", "rollout.max_tokens_per_gpu"),
    to("train_max_tokens_per_gpu", "train.max_tokens_per_gpu"),
    to("vllm_generate_batch_size", "rollout.vllm_generate_batch_size"),
    to("eps_clip_low_high", "actor.eps_clip_low_high"),
    to("dual_clip", "actor.dual_clip"),
    to("lr_scheduler", "actor.lr_scheduler", "critic.lr_scheduler"),
    to("policy_loss_type", "actor.policy_loss_type"),
    to("overlong_buffer_len", "reward.overlong_buffer_len"),
    to("overlong_penalty_factor", "reward.overlong_penalty_factor"),
    to("stop_properly_penalty_coef", "reward.stop_properly_penalty_coef"),
    to("agent_func_path", "train.agent_func_path"),
    to("dynamic_filtering", "algo.dynamic_filtering_enable"),
    to("dynamic_filtering_reward_range", "algo.dynamic_filtering_range"),
    _ruled("max_new_tokens", "--rollout.max_new_tokens here"),
    to("aux_loss_coef", "actor.aux_loss_coef", default=0.0),
    _ruled("entropy_loss_coef", "--actor.entropy_coef here", 0.0),
    to("eps_clip", "actor.eps_clip", default=0.2),
    to("value_clip", "critic.value_clip", default=0.2),
    to("advantage_estimator", "algo.advantage.estimator", default="gae"),
    to("lambd", "algo.advantage.lambd", default=1.0),
    to("gamma", "algo.advantage.gamma", default=1.0),
    to("no_advantage_std_norm", "algo.advantage.no_std_norm", default=False),
    to("init_kl_coef", "algo.kl.init_coef", default=0.01),
    to("kl_target", "algo.kl.target", default=None),
    to("kl_horizon", "algo.kl.horizon", default=10000),
    to("kl_estimator", "algo.kl.estimator", default="k1"),
    to("use_kl_loss", "algo.kl.use_loss", default=False),
    to("reward_clip_range", "reward.clip_range", default=(-10.0, 10.0)),
    to("normalize_reward", "reward.normalize_enable", default=False),
    to("freezing_actor_steps", "critic.freezing_steps", default=-1),
    to("save_value_network", "critic.save_value_network", default=False),
    to("temperature", "rollout.temperature", default=1.0),
    to("top_p", "rollout.top_p", default=1.0),
    to("prompt_data", "data.prompt_dataset"),
    to("prompt_data_probs", "data.prompt_probs", default=None),
    to("prompt_split", "data.prompt_split", default="train"),
    to("label_key", "data.label_key"),
    to("input_template", "data.input_template", default=None),
    to("eval_temperature", "eval.temperature", default=0.6),
    to("eval_n_samples_per_prompt", "eval.n_samples_per_prompt", default=4),
    without("perf", "speed is always logged", None),
)

SUPERVISED = (
    to("dataloader_num_workers", "data.dataloader_num_workers"),
    to("pretrain", "model.model_name_or_path"),
    to("gradient_checkpointing", "model.gradient_checkpointing_enable", default=False),
    to("gradient_checkpointing_use_reentrant", "model.gradient_checkpointing_reentrant", default=False),
    to("aux_loss_coef", "model.aux_loss_coef", default=0.0),
    to("adam_betas", "adam.betas", default=(0.9, 0.95)),
    to("l2", "adam.weight_decay", default=0.0),
    to("optim", "optim"),
    to("lr_scheduler", "lr_scheduler", default="cosine_with_min_lr"),
    to("min_lr_ratio", "min_lr_ratio"),
    to("lr_warmup_ratio", "lr_warmup_ratio", default=0.03),
    to("max_norm", "max_norm", default=1.0),
    to("dataset", "data.dataset"),
    to("dataset_probs", "data.dataset_probs", default=None),
    to("dataset_split", "data.dataset_split", default="train"),
    without("train_split", "--data.dataset_split names the split", "train"),
    to("tokenizer_chat_template", "data.tokenizer_chat_template", default=None),
)
"""Flags of all commands that train on rows."""
PAIRS = (
    to("prompt_key", "data.prompt_key", default=None),
    to("chosen_key", "data.chosen_key", default="chosen"),
    to("rejected_key", "data.rejected_key", default="rejected"),
    to("input_template", "data.input_template", default=None),
    to("max_len", "data.max_len", default=512),
)
REFERENCE = (
    to("ref_pretrain", "ref.model_name_or_path", default=None),
    to("ref_offload", "ref.offload", default=False),
)
SFT = (
    to("micro_train_batch_size", "train.micro_batch_size", default=8),
    to("pretrain_mode", "model.pretrain_mode_enable", default=False),
    to("learning_rate", "adam.lr", default=5e-6),
    to("max_len", "data.max_len", default=2048),
    to("multiturn", "data.multiturn"),
    to("output_key", "data.output_key", default=None),
    to("input_template", "data.input_template", default="User: {}\nAssistant: "),
)
DPO = (
    *PAIRS,
    *REFERENCE,
    to("micro_train_batch_size", "train.micro_batch_size", default=8),
    to("learning_rate", "adam.lr", default=1e-5),
    to("beta", "model.beta", default=0.1),
    to("ipo", "model.ipo_enable", default=False),
    to("label_smoothing", "model.label_smoothing", default=0.0),
    to("nll_loss_coef", "model.nll_loss_coef", default=0),
)
RM = (
    *PAIRS,
    to("micro_train_batch_size", "train.micro_batch_size", default=1),
    to("learning_rate", "adam.lr", default=9e-6),
    to("value_head_prefix", "ds.value_head_prefix"),
    to("margin_loss", "model.margin_loss_enable", default=False),
    to("loss", "model.loss_type", default="sigmoid"),
    without("compute_fp32_loss", "rewards and their loss are always in single precision", False, True),
)
KTO = (
    *REFERENCE,
    to("micro_train_batch_size", "train.micro_batch_size", default=8),
    to("learning_rate", "adam.lr", default=1e-5),
    to("beta", "model.beta", default=0.01),
    to("desirable_loss_weight", "model.desirable_loss_weight", default=1.0),
    to("undesirable_loss_weight", "model.undesirable_loss_weight", default=1.0),
    to("label_key", "data.label_key", default="label"),
    to("output_key", "data.output_key"),
    to("input_template", "data.input_template", default=None),
    to("max_len", "data.max_len", default=2048),
)
PRM = (
    to("micro_train_batch_size", "train.micro_batch_size", default=1),
    to("learning_rate", "adam.lr", default=1e-6),
    to("placeholder_token", "model.placeholder_token", default=None),
    _ruled("reward_tokens", "--model.reward_tokens here"),
    to("label_key", "data.label_key", default="label"),
    to("max_len", "data.max_len", default=2048),
)
KD = (
    *SFT,
    to("teacher_model", "teacher.model_name_or_path"),
    to("teacher_offload", "teacher.offload", default=False),
    to("kd_coef", "model.kd_coef", default=0.4),
)


def _reward_tokens(given: Given) -> Results:
    if given.has("reward_tokens"):
        yield Flag("model.reward_tokens", _words(given["reward_tokens"]))


_LATER_NAMES = {"model_name_or_path": "pretrain", "ckpt_save_path": "save_path"}
"""Names in versions between 0.9 and 0.10."""


def _table(command: Command, settings: tuple[Setting, ...], rules: tuple[Rule, ...] = SUPERVISED_RULES) -> Table:
    known = leaf_types(CONFIG_CLASSES[command])
    shared = tuple(one for one in (*SHARED, *SUPERVISED) if set(one.flags) <= known.keys())
    return Table(
        system="OpenRLHF before 0.10",
        command=command,
        settings=(*shared, *settings),
        rules=rules,
        prefix="--",
        names=_LATER_NAMES,
    )


_RL = Table(
    system="OpenRLHF before 0.10", command="train_ppo_ray", settings=(*SHARED, *PPO), rules=PPO_RULES, prefix="--"
)
TABLES: Mapping[str, Table] = {
    "train_ppo_ray": _RL,
    # Its one process per GPU is what these commands did before Ray.
    "train_ppo": _RL,
    "train_sft": _table("train_sft", SFT),
    "train_dpo": _table("train_dpo", DPO),
    "train_rm": _table("train_rm", RM),
    "train_kto": _table("train_kto", KTO),
    "train_prm": _table("train_prm", PRM, (*SUPERVISED_RULES, _reward_tokens)),
    "train_kd": _table("train_kd", KD),
}
"""By the names of OpenRLHF's commands."""


def dotted_table(command: Command) -> Table:
    """Return the conversion of a command line of OpenRLHF 0.10 or 0.11, whose flags are ours."""
    known = leaf_types(CONFIG_CLASSES[command])
    theirs = {one.flag: one.theirs for one in DIFFERENCES if one.command == command and one.teaches}
    same = (to(name, name, default=theirs.get(name, OURS)) for name in known if name != _KEY)
    fixed = (without(name, one.instead, one.value) for name, one in only_defaults(known).items() if name != _RING)
    correction = (_CORRECTS, _CORRECTION_TYPE) if command == "train_ppo_ray" else ()
    return Table(
        system="OpenRLHF 0.11",
        command=command,
        settings=(*same, *fixed, *(_ruled(name, "") for name in (_KEY, _RING, *correction))),
        rules=(_dotted,),
        prefix="--",
    )


_KEY, _RING = "logger.wandb.key", "ds.ring_attn_size"
_CORRECTS, _CORRECTION_TYPE = (f"algo.advantage.is_correction_{what}" for what in ("enable", "type"))


def _dotted(given: Given) -> Results:
    if given.has(_KEY):
        yield Flag("logger.trackers", ["wandb"])
        yield Note("another meaning", _KEY, "the key is not written; set WANDB_API_KEY")
    if given.has(_RING) and given.whole(_RING) > 1:
        yield Flag("ds.ulysses_size", given.whole(_RING))
        yield Note("another meaning", _RING, "Ulysses splits attention heads, whose number it must divide")
    if given.has(_CORRECTS) and given[_CORRECTS]:
        kind = given.text(_CORRECTION_TYPE) or "tis"
        level, mode = _CORRECTIONS.get(kind, _CORRECTIONS["tis"])
        yield Flag("algo.advantage.is_correction_level", level)
        yield Flag("algo.advantage.is_correction_mode", mode)


def old_flag(name: str, *, config_class: type) -> str | None:
    """Return what an old flag is here, as the end of a sentence that begins with it; None for one that never was.

    Args:
        name: without the hyphens in front, with underscores.
        config_class: of the command that was given it; of others than the trainers no old flag is known.
    """
    command = next((command for command, known in CONFIG_CLASSES.items() if known is config_class), None)
    setting = TABLES[command].by_name.get(name) if command else None
    if setting is None:
        return None
    if setting.flags and set(setting.flags) <= leaf_types(config_class).keys():
        return f"is {' and '.join(f'--{flag}' for flag in setting.flags)} here"
    return f"is {setting.says}" if setting.by_rule else f"has no counterpart here: {setting.says}"


_MODELS = ("pretrain", "model_name_or_path", "model.model_name_or_path", "actor.model_name_or_path")
_REWARD_MODELS = ("reward_pretrain", "reward.model_name_or_path")
_RENAMED: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(_MODELS, ("model",)),
    **dict.fromkeys(_REWARD_MODELS, ("reward_model", "model")),
    "model_path": ("base", "model"),
    "lora_path": ("adapter",),
    "output_path": ("output",),
    "dataset": ("data",),
    "prompt_data": ("data",),
    "dataset_split": ("split",),
    "max_samples": ("max_rows",),
    "best_of_n": ("n_samples",),
    "tp_size": ("tensor_parallel_size",),
    "max_len": ("max_len", "max_model_len"),
    "data.max_len": ("max_len", "max_model_len"),
    "prompt_max_len": ("max_model_len",),
    "rollout_batch_size": ("batch_rows",),
    "batch_size": ("max_batch_tokens",),
    "normalize_reward": ("normalize",),
    "ds.value_head_prefix": ("value_head_prefix",),
    "bf16": ("dtype",),
    "param_dtype": ("dtype",),
    "ds.param_dtype": ("dtype",),
    "greedy_sampling": ("temperature",),
}
"""Flags of OpenRLHF's commands that generate, chat, serve and merge, and the names that ours may have for them."""
_VALUES = {"bf16": " bf16", "greedy_sampling": " 0"}
"""What a switch becomes if ours takes a value."""


def renamed_flag(name: str, *, known: Collection[str]) -> str | None:
    """Return what an old flag is in a command that does not train, as the end of a sentence; None if it has no new name.

    Args:
        name: without the hyphens before it, with underscores.
        known: the names of the command's flags.
    """
    new = next((candidate for candidate in _RENAMED.get(name, ()) if candidate in known), None)
    return None if new is None or new == name else f"is --{new}{_VALUES.get(name, '')} here"
