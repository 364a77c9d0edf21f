"""Conversion of command lines: of OpenRLHF 0.3 to 0.11, of LMM-R1's own scripts, and of R1-V, which has Hugging Face's arguments."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from lmm_r1.config.differences import DIFFERENCES, only_defaults
from lmm_r1.config.ppo import DEFAULT_VERIFIER
from lmm_r1.dotted import leaf_types
from lmm_r1.tools.migrate.table import (
    CONFIG_CLASSES,
    OURS,
    Command,
    Given,
    Rule,
    Setting,
    Table,
    checkpoints_kept,
    listed,
    names_of,
    settings_of,
    trackers,
)

VISION_TOWERS = ("visual", "vision_tower", "model.visual", "model.vision_tower")
"""Prefixes of parameters that are a vision tower's in the architectures that LMM-R1 trains."""


def _machine(given: Given) -> None:
    if given.has("bf16"):
        given.set("ds.param_dtype", "bf16")
    if given.has("flash_attn"):
        given.derived("flash_attn", "--ds.attn_implementation auto takes the fastest attention installed")
    if given.whole("ring_attn_size") > 1:
        given.set("ds.ulysses_size", given.whole("ring_attn_size"))
        given.differs("ring_attn_size", _DIVISOR)
    if given.has("use_wandb"):
        given.set("logger.trackers", ["wandb"])
        given.differs("use_wandb", "the key is not written down; set WANDB_API_KEY")


def _lengths(given: Given) -> None:
    own = "max_new_tokens" if given.has("max_new_tokens") else "generate_max_len"
    prompt, response = given.whole("prompt_max_len"), given.whole(own)
    total = prompt + response if given["max_len"] is None else given.whole("max_len")
    given.set("data.max_len", total)
    given.set("rollout.max_new_tokens", response)
    if given["max_len"] is None:
        text = f"--data.max_len {total} is prompt with images ({prompt}) and response ({response}) together"
        given.derived("prompt_max_len, generate_max_len", text)
    else:
        given.differs("max_len", f"a prompt may have {total - response} tokens, whatever prompt_max_len says")


def _policy(given: Given) -> None:
    backend = given.text("vllm_sync_backend")
    if backend != "nccl":
        given.differs("vllm_sync_backend", f"weights travel by NCCL, or with --vllm.sync_with_ray, not {backend}")
    if given["remote_rm_url"] is None and (models := given.text("reward_pretrain")) is not None:
        first, *others = models.split(",")
        given.set("reward.normalize_enable", given.switch("normalize_reward"))
        given.set("reward.model_name_or_path", first)
        if others:
            given.lacks("reward_pretrain", f"one reward model is taken, {first}; left out: {others}")
    if given["use_kl_estimator_k3"]:
        given.set("algo.kl.estimator", "k3")
    if coefficient := given.number("entropy_loss_coef"):
        given.set("actor.entropy_coef", coefficient)
    if given["enable_vllm_is_correction"]:
        kind = "icepop" if given["use_icepop"] else given.text("vllm_is_correction_type") or "tis"
        if kind not in _CORRECTIONS:
            given.lacks("vllm_is_correction_type", f"{kind}; tis is written instead")
        _correction(given, kind)
        given.set("algo.advantage.is_correction_threshold", listed(given["vllm_is_truncated_threshold"]))


_DIVISOR = "Ulysses splits attention heads, whose number it must divide"
_CORRECTIONS = {"tis": ("token", "clip"), "icepop": ("token", "mask"), "seq-mask-tis": ("seq", "mask")}
"""Level and mode of each kind of correction between engine and trainer."""


def _correction(given: Given, kind: str) -> None:
    for what, value in zip(("level", "mode"), _CORRECTIONS.get(kind, _CORRECTIONS["tis"]), strict=True):
        given.set(f"algo.advantage.is_correction_{what}", value)


def _images(given: Given) -> None:
    for kind, most in given.group("limit_mm_per_prompt").items():
        if kind == "image":
            given.set("data.max_images_per_prompt", most)
        else:
            given.lacks("limit_mm_per_prompt", f"{kind}: no limit is needed")
    for name, value in given.group("processor_kwargs").items():
        if name in ("min_pixels", "max_pixels"):
            given.set(f"data.{name}", value)
        else:
            given.lacks("processor_kwargs", f"{name}: the processor is the checkpoint's own")
    prefixes = [str(prefix) for prefix in listed(given["freeze_prefix"]) if prefix]
    if prefixes and all(prefix.rstrip(".") in VISION_TOWERS for prefix in prefixes):
        given.set("actor.freeze_visual_encoder", True)
        given.differs("freeze_prefix", "--actor.freeze_visual_encoder freezes the critic's tower, too")
    elif prefixes:
        given.set("actor.freeze_prefix", prefixes)


def _table(command: Command, groups: str) -> Table:
    known = leaf_types(CONFIG_CLASSES[command])
    shared = (one for one in settings_of("openrlhf_shared openrlhf_supervised") if set(one.flags) <= known.keys())
    return Table(
        system="OpenRLHF before 0.10",
        command=command,
        settings=(*shared, *settings_of(groups)),
        rules=(_machine,),
        prefix="--",
        # In versions between 0.9 and 0.10.
        names={"model_name_or_path": "pretrain", "ckpt_save_path": "save_path"},
    )


_RL = Table(
    system="OpenRLHF before 0.10",
    command="train_ppo_ray",
    settings=settings_of("openrlhf_shared openrlhf_ppo"),
    rules=(_machine, _lengths, _policy, _images),
    prefix="--",
)
TABLES: Mapping[str, Table] = {
    "train_ppo_ray": _RL,
    # Its one process per GPU is what these commands did before Ray.
    "train_ppo": _RL,
    "train_sft": _table("train_sft", "openrlhf_sft"),
    "train_dpo": _table("train_dpo", "openrlhf_pairs openrlhf_reference openrlhf_dpo"),
    "train_rm": _table("train_rm", "openrlhf_pairs openrlhf_rm"),
    "train_kd": _table("train_kd", "openrlhf_sft openrlhf_kd"),
}
"""By the names of OpenRLHF's commands."""


def dotted_table(command: Command) -> Table:
    """Return the conversion of a command line of OpenRLHF 0.10 or 0.11, whose flags are ours."""
    known = leaf_types(CONFIG_CLASSES[command])
    theirs = {one.flag: one.theirs for one in DIFFERENCES if one.command == command and one.teaches}
    same = (Setting(name, theirs.get(name, OURS), (name,)) for name in known if name != _KEY)
    defaults = {name: one for name, one in only_defaults(known).items() if name != _RING}
    fixed = [Setting(name, one.value, says=one.instead, harmless=(one.value,)) for name, one in defaults.items()]
    correction = (_CORRECTS, _CORRECTION_TYPE) if command == "train_ppo_ray" else ()
    return Table(
        system="OpenRLHF 0.11",
        command=command,
        settings=(*same, *fixed, *(Setting(name, by_rule=True) for name in (_KEY, _RING, *correction))),
        rules=(_dotted,),
        prefix="--",
    )


_KEY, _RING = "logger.wandb.key", "ds.ring_attn_size"
_CORRECTS, _CORRECTION_TYPE = (f"algo.advantage.is_correction_{what}" for what in ("enable", "type"))


def _dotted(given: Given) -> None:
    if given.has(_KEY):
        given.set("logger.trackers", ["wandb"])
        given.differs(_KEY, "the key is not written; set WANDB_API_KEY")
    if given.has(_RING) and given.whole(_RING) > 1:
        given.set("ds.ulysses_size", given.whole(_RING))
        given.differs(_RING, _DIVISOR)
    if given.has(_CORRECTS) and given[_CORRECTS]:
        _correction(given, given.text(_CORRECTION_TYPE) or "tis")


_SCHEDULES = {"cosine": "cosine_with_min_lr", "constant": "constant_with_warmup"}
"""Schedules that have another name here."""
_PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_BATCH_SETTINGS = "per_device_train_batch_size, gradient_accumulation_steps"


def _optimizer(given: Given, prefix: str) -> None:
    given.set(f"{prefix}adam.betas", [given.number("adam_beta1"), given.number("adam_beta2")])
    kind = given.text("lr_scheduler_type") or "linear"
    given.set(f"{prefix}lr_scheduler", _SCHEDULES.get(kind, kind))
    if kind == "cosine":
        given.set(f"{prefix}min_lr_ratio", 0.0)
    passes = given.number("num_train_epochs")
    given.set("train.num_episodes" if prefix else "train.max_epochs", max(1, math.ceil(passes)))
    if passes % 1:
        given.differs("num_train_epochs", f"passes are whole: {passes:g} becomes {math.ceil(passes)}")
    if given.group("gradient_checkpointing_kwargs").get("use_reentrant"):
        given.set(f"{'actor' if prefix else 'model'}.gradient_checkpointing_reentrant", True)
    named = _PRECISIONS.get((given.text("torch_dtype") or "").removeprefix("torch."))
    half = next((name for name in ("bf16", "fp16") if given[name] is True), named)
    if half:
        given.set("ds.param_dtype", half)


def _records(given: Given) -> None:
    if config := given.text("deepspeed"):
        if match := re.search(r"z(?:ero)?_?-?([0123])", config, re.IGNORECASE):
            given.set("ds.zero_stage", int(match[1]))
            given.derived("deepspeed", f"the stage is that in the name {config}, of which nothing else is read")
        else:
            given.lacks("deepspeed", f"{config} is not read; --ds.zero_stage and --ds.adam_offload")
        if "offload" in config:
            given.set("ds.adam_offload", True)
    trackers(given, "report_to", "none", "None")
    if (strategy := given.text("save_strategy")) == "steps":
        given.set("ckpt.save_steps", given.whole("save_steps"))
    elif strategy not in ("no", "False"):
        given.lacks("save_strategy", f"{strategy}; --ckpt.save_steps counts steps")
    checkpoints_kept(given, "save_total_limit", "save_only_model")
    if given["push_to_hub"] is True:
        if "/" in (repository := given.text("hub_model_id") or ""):
            given.set("ckpt.push_to_hub", repository)
        else:
            given.lacks("push_to_hub", "--ckpt.push_to_hub takes OWNER/NAME")
    if given["use_peft"] is True:
        given.set("ds.lora.rank", given.whole("lora_r"))
        given.set("ds.lora.alpha", given.whole("lora_alpha"))
        given.set("ds.lora.dropout", given.number("lora_dropout"))
        if layers := given["lora_target_modules"]:
            given.set("ds.lora.target_modules", layers if isinstance(layers, list) else str(layers).split(","))


def _batch(given: Given, *, responses: int | None = None) -> None:
    """Convert the samples of an update, which are counted over all GPUs here, and in GRPO over all responses."""
    count = None if given["nproc_per_node"] is None else given.whole("nproc_per_node") * given.whole("nnodes")
    each = given.whole("per_device_train_batch_size")
    prompts = each * given.whole("gradient_accumulation_steps") * (count or 1)
    given.set("train.micro_batch_size", each)
    given.set("train.batch_size", prompts * (responses or 1))
    result = f"--train.batch_size {prompts * (responses or 1)}"
    if responses is not None:
        given.set("rollout.batch_size", prompts)
        result = f"--rollout.batch_size {prompts} prompts with {responses} responses, {result}"
    if count is not None:
        given.derived(_BATCH_SETTINGS, f"{result} counts the samples on all {count} GPUs")
    else:
        advice = "give their number after the file's name: nproc_per_node=8"
        given.differs(_BATCH_SETTINGS, f"{result} is for one GPU; {advice}")


def _group(given: Given) -> None:
    """Convert the batches of GRPO: a batch counts prompts, and not responses."""
    responses = given.whole("num_generations")
    given.set("rollout.n_samples_per_prompt", responses)
    _batch(given, responses=responses)
    for model in ("actor", "ref") if given["nproc_per_node"] is not None else ():
        given.set(f"{model}.num_nodes", given.whole("nnodes"))
        given.set(f"{model}.num_gpus_per_node", given.whole("nproc_per_node"))
    prompt, response = given.whole("max_prompt_length"), given.whole("max_completion_length")
    given.set("data.max_len", prompt + response)
    given.set("rollout.max_new_tokens", response)
    text = f"--data.max_len {prompt + response} is prompt with images and response together"
    given.derived("max_prompt_length, max_completion_length", text)


def _grpo(given: Given) -> None:
    """Convert loss, sampling and rewards. Without vLLM, R1-V fixes the temperature and keeps the 50 likeliest tokens."""
    given.set("actor.loss_agg_mode", "seq-mean-token-mean")
    given.set("algo.advantage.estimator", "group_norm")
    if given["epsilon"] is not None:
        given.set("actor.eps_clip_low_high", [given.number("epsilon"), given.number("epsilon")])
    beta = given.number("beta")
    given.set("algo.kl.init_coef", beta)
    if beta:
        given.set("algo.kl.use_loss", True)
        given.set("algo.kl.estimator", "k3")
    given.set("rollout.temperature", given.number("temperature") if given["use_vllm"] else 1.0)
    if not given["use_vllm"]:
        given.set("rollout.top_k", 50)
    functions = given["reward_funcs"]
    functions = functions if isinstance(functions, list) else str(functions).split(",")
    own = [one for one in functions if one not in ("accuracy", "format")]
    weights = ",".join(f"{part}_weight={functions.count(part)}" for part in ("accuracy", "format"))
    given.set("reward.remote_url", DEFAULT_VERIFIER if own else f"{DEFAULT_VERIFIER}:{weights}")
    text = "the verifier judges answer and format by its own rules, with these weights"
    if own:
        text = f"{', '.join(own)} of the script: {DEFAULT_VERIFIER} judges; give yours as --reward.remote_url FILE.py:NAME"
    given.differs("reward_funcs", text)


def _sft(given: Given) -> None:
    _batch(given)
    if not given["assistant_only_loss"]:
        what = "only the assistant's turns are trained on, unless --model.pretrain_mode_enable"
        given.differs("assistant_only_loss", f"{what}; R1-V trains on all tokens")


def _r1_v_table(command: Command, group: str, *rules: Rule) -> Table:
    prefix, model = ("actor.", "actor") if command == "train_ppo_ray" else ("", "model")
    return Table(
        system="R1-V",
        command=command,
        settings=settings_of(f"r1_v {group}", optimizer=prefix, model=model),
        rules=(lambda given: _optimizer(given, prefix), _records, *rules),
        names=names_of("r1_v_names"),
        prefix="--",
    )


R1_V: Mapping[str, Table] = {
    "grpo": _r1_v_table("train_ppo_ray", "r1_v_grpo", _group, _grpo),
    "sft": _r1_v_table("train_sft", "r1_v_sft", _sft),
}
"""By the trainer's name."""
