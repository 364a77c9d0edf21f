"""Conversion of R1-V's GRPO and supervised training, whose arguments are those of Hugging Face's trainers."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from lmm_r1.config.ppo import DEFAULT_VERIFIER
from lmm_r1.tools.migrate.table import (
    Command,
    Flag,
    Given,
    Results,
    Rule,
    Table,
    checkpoints_kept,
    derived,
    differs,
    lacks,
    names_of,
    settings_of,
    trackers,
)

_SCHEDULES = {"cosine": "cosine_with_min_lr", "constant": "constant_with_warmup"}
"""Schedules that have another name here."""
_PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_BOTH = "per_device_train_batch_size, gradient_accumulation_steps"


def _optimizer(given: Given, prefix: str) -> Results:
    yield Flag(f"{prefix}adam.betas", [given.number("adam_beta1"), given.number("adam_beta2")])
    kind = given.text("lr_scheduler_type") or "linear"
    yield Flag(f"{prefix}lr_scheduler", _SCHEDULES.get(kind, kind))
    if kind == "cosine":
        yield Flag(f"{prefix}min_lr_ratio", 0.0)
    passes = given.number("num_train_epochs")
    yield Flag("train.num_episodes" if prefix else "train.max_epochs", max(1, math.ceil(passes)))
    if passes % 1:
        yield differs("num_train_epochs", f"passes are whole: {passes:g} becomes {math.ceil(passes)}")
    if given.group("gradient_checkpointing_kwargs").get("use_reentrant"):
        yield Flag(f"{'actor' if prefix else 'model'}.gradient_checkpointing_reentrant", True)
    named = _PRECISIONS.get((given.text("torch_dtype") or "").removeprefix("torch."))
    half = next((name for name in ("bf16", "fp16") if given[name] is True), named)
    if half:
        yield Flag("ds.param_dtype", half)


def _records(given: Given) -> Results:
    if config := given.text("deepspeed"):
        if match := re.search(r"z(?:ero)?_?-?([0123])", config, re.IGNORECASE):
            yield Flag("ds.zero_stage", int(match[1]))
            yield derived("deepspeed", f"the stage is that in the name {config}, of which nothing else is read")
        else:
            yield lacks("deepspeed", f"{config} is not read; --ds.zero_stage and --ds.adam_offload")
        if "offload" in config:
            yield Flag("ds.adam_offload", True)
    yield from trackers(given, "report_to", "none", "None")
    if (strategy := given.text("save_strategy")) == "steps":
        yield Flag("ckpt.save_steps", given.whole("save_steps"))
    elif strategy not in ("no", "False"):
        yield lacks("save_strategy", f"{strategy}; --ckpt.save_steps counts steps")
    yield from checkpoints_kept(given, "save_total_limit", "save_only_model")
    if given["push_to_hub"] is True:
        repository = given.text("hub_model_id") or ""
        named = Flag("ckpt.push_to_hub", repository)
        yield named if "/" in repository else lacks("push_to_hub", "--ckpt.push_to_hub takes OWNER/NAME")
    if given["use_peft"] is True:
        yield Flag("ds.lora.rank", given.whole("lora_r"))
        yield Flag("ds.lora.alpha", given.whole("lora_alpha"))
        yield Flag("ds.lora.dropout", given.number("lora_dropout"))
        if layers := given["lora_target_modules"]:
            yield Flag("ds.lora.target_modules", layers if isinstance(layers, list) else str(layers).split(","))


def _batch(given: Given, *, responses: int | None = None) -> Results:
    """Convert the samples of an update, which are counted over all GPUs here, and in GRPO over all responses."""
    count = None if given["nproc_per_node"] is None else given.whole("nproc_per_node") * given.whole("nnodes")
    each = given.whole("per_device_train_batch_size")
    prompts = each * given.whole("gradient_accumulation_steps") * (count or 1)
    yield Flag("train.micro_batch_size", each)
    yield Flag("train.batch_size", prompts * (responses or 1))
    result = f"--train.batch_size {prompts * (responses or 1)}"
    if responses is not None:
        yield Flag("rollout.batch_size", prompts)
        result = f"--rollout.batch_size {prompts} prompts with {responses} responses, {result}"
    if count is not None:
        yield derived(_BOTH, f"{result} counts the samples on all {count} GPUs")
    else:
        yield differs(_BOTH, f"{result} is for one GPU; give their number after the file's name: nproc_per_node=8")


def _group(given: Given) -> Results:
    """Convert the batches of GRPO: a batch counts prompts, and not responses."""
    responses = given.whole("num_generations")
    yield Flag("rollout.n_samples_per_prompt", responses)
    yield from _batch(given, responses=responses)
    for model in ("actor", "ref") if given["nproc_per_node"] is not None else ():
        yield Flag(f"{model}.num_nodes", given.whole("nnodes"))
        yield Flag(f"{model}.num_gpus_per_node", given.whole("nproc_per_node"))
    prompt, response = given.whole("max_prompt_length"), given.whole("max_completion_length")
    yield Flag("data.max_len", prompt + response)
    yield Flag("rollout.max_new_tokens", response)
    text = f"--data.max_len {prompt + response} is prompt with images and response together"
    yield derived("max_prompt_length, max_completion_length", text)


def _policy(given: Given) -> Results:
    """Convert loss, sampling and rewards. Without vLLM, R1-V fixes the temperature and keeps the 50 likeliest tokens."""
    yield Flag("actor.loss_agg_mode", "seq-mean-token-mean")
    yield Flag("algo.advantage.estimator", "group_norm")
    if given["epsilon"] is not None:
        yield Flag("actor.eps_clip_low_high", [given.number("epsilon"), given.number("epsilon")])
    beta = given.number("beta")
    yield Flag("algo.kl.init_coef", beta)
    if beta:
        yield Flag("algo.kl.use_loss", True)
        yield Flag("algo.kl.estimator", "k3")
    yield Flag("rollout.temperature", given.number("temperature") if given["use_vllm"] else 1.0)
    if not given["use_vllm"]:
        yield Flag("rollout.top_k", 50)
    functions = given["reward_funcs"]
    functions = functions if isinstance(functions, list) else str(functions).split(",")
    own = [one for one in functions if one not in ("accuracy", "format")]
    weights = ",".join(f"{part}_weight={functions.count(part)}" for part in ("accuracy", "format"))
    yield Flag("reward.remote_url", DEFAULT_VERIFIER if own else f"{DEFAULT_VERIFIER}:{weights}")
    if own:
        text = f"{', '.join(own)} of the script: {DEFAULT_VERIFIER} judges; give yours as --reward.remote_url FILE.py:NAME"
        yield differs("reward_funcs", text)
    else:
        yield differs("reward_funcs", "the verifier judges answer and format by its own rules, with these weights")


def _sft(given: Given) -> Results:
    yield from _batch(given)
    if not given["assistant_only_loss"]:
        text = (
            "only the assistant's turns are trained on, unless --model.pretrain_mode_enable; R1-V trains on all tokens"
        )
        yield differs("assistant_only_loss", text)


def _table(command: Command, group: str, *rules: Rule) -> Table:
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
    "grpo": _table("train_ppo_ray", "r1_v_grpo", _group, _policy),
    "sft": _table("train_sft", "r1_v_sft", _sft),
}
"""By the trainer's name."""
