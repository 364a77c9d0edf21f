"""Conversion of R1-V's GRPO and supervised training, whose arguments are those of Hugging Face's trainers."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from lmm_r1.config.ppo import DEFAULT_VERIFIER
from lmm_r1.migrate.table import (
    Flag,
    Given,
    Results,
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
    config = given.text("deepspeed")
    match = re.search(r"z(?:ero)?_?-?([0123])", config or "", re.IGNORECASE)
    if config and match is None:
        yield lacks("deepspeed", f"{config} is not read; --ds.zero_stage and --ds.adam_offload")
    elif config and match is not None:
        yield Flag("ds.zero_stage", int(match[1]))
        yield from [Flag("ds.adam_offload", True)] if "offload" in config else []
        yield derived("deepspeed", f"the stage is that in the name {config}; other settings of the file are not read")
    yield from trackers(given, "report_to", "none", "None")
    strategy = given.text("save_strategy")
    if strategy == "steps":
        steps = given.number("save_steps")
        yield Flag("ckpt.save_steps", int(steps))
        if steps < 1:
            yield lacks("save_steps", "a share of all steps; --ckpt.save_steps counts steps")
    elif strategy not in ("no", "False"):
        yield lacks("save_strategy", f"{strategy}; --ckpt.save_steps counts steps")
    yield from checkpoints_kept(given, "save_total_limit", "save_only_model")
    if given["push_to_hub"] is True:
        repository = given.text("hub_model_id") or ""
        if "/" in repository:
            yield Flag("ckpt.push_to_hub", repository)
        else:
            yield lacks("push_to_hub", "--ckpt.push_to_hub takes the repository, OWNER/NAME")


def _evaluation(given: Given) -> Results:
    if not given["dataset_test_name"]:
        if given.text("eval_strategy") not in ("no", None):
            yield lacks("eval_strategy", "the file names no rows to evaluate on")
        return
    yield Flag("eval.dataset", given.text("dataset_test_name"))
    if given.has("dataset_test_split"):
        yield Flag("eval.split", given["dataset_test_split"])
    if given.text("eval_strategy") == "epoch" or not isinstance(every := given["eval_steps"], int):
        yield differs("eval_strategy", "it is evaluated every --eval.steps steps; set that flag")
    else:
        yield Flag("eval.steps", every)


def _adapter(given: Given) -> Results:
    if given["use_peft"] is True:
        yield Flag("ds.lora.rank", given.whole("lora_r"))
        yield Flag("ds.lora.alpha", given.whole("lora_alpha"))
        yield Flag("ds.lora.dropout", given.number("lora_dropout"))
        if layers := given["lora_target_modules"]:
            yield Flag("ds.lora.target_modules", layers if isinstance(layers, list) else str(layers).split(","))


def _batch(given: Given, *, responses: int = 1) -> Results:
    """Convert the samples of an update, which are counted over all GPUs here, and in GRPO over all responses."""
    count = None if given["nproc_per_node"] is None else given.whole("nproc_per_node") * given.whole("nnodes")
    each = given.whole("per_device_train_batch_size")
    prompts = each * given.whole("gradient_accumulation_steps") * (count or 1)
    yield Flag("train.micro_batch_size", each)
    yield Flag("train.batch_size", prompts * responses)
    result = f"--train.batch_size {prompts * responses}"
    if responses > 1:
        yield Flag("rollout.batch_size", prompts)
        result = f"--rollout.batch_size {prompts} prompts with {responses} responses, {result}"
    if count is not None:
        yield derived(_BOTH, f"{result} counts the samples on all {count} GPUs")
        return
    text = (
        "is for one GPU, because the file names no number of GPUs: give it after the file's name as nproc_per_node=8"
    )
    yield differs(_BOTH, f"{result} {text}")


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
    yield derived(
        "max_prompt_length, max_completion_length",
        f"--data.max_len {prompt + response} is prompt with images and response together",
    )


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
        text = f"{', '.join(own)}: functions of the script are not read, and {DEFAULT_VERIFIER} judges here; give yours as"
        yield differs("reward_funcs", f"{text} --reward.remote_url FILE.py:FUNCTION")
    else:
        yield differs("reward_funcs", "the verifier judges answer and format by its own rules, with these weights")


def _trained_tokens(given: Given) -> Results:
    """Convert which tokens of a conversation are trained on: by default all in TRL."""
    if not given["assistant_only_loss"]:
        what = "the assistant's turns are trained on; without it TRL trains on all tokens of rows of messages"
        yield differs("assistant_only_loss", f"{what}, as --model.pretrain_mode_enable does")


R1_V: Mapping[str, Table] = {
    "grpo": Table(
        system="R1-V",
        command="train_ppo_ray",
        settings=settings_of("r1_v r1_v_grpo", optimizer="actor.", model="actor"),
        rules=(lambda given: _optimizer(given, "actor."), _records, _evaluation, _adapter, _group, _policy),
        names=names_of("r1_v_names"),
        prefix="--",
    ),
    "sft": Table(
        system="R1-V",
        command="train_sft",
        settings=settings_of("r1_v r1_v_sft", optimizer="", model="model"),
        rules=(lambda given: _optimizer(given, ""), _records, _evaluation, _adapter, _batch, _trained_tokens),
        names=names_of("r1_v_names"),
        prefix="--",
    ),
}
"""By the trainer's name."""
