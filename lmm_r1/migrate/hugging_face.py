"""Conversion of the arguments of Hugging Face's trainers: TRL's and R1-V's."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace

from lmm_r1.config.ppo import DEFAULT_VERIFIER
from lmm_r1.migrate.table import (
    KEEP_ALL,
    Command,
    Flag,
    Given,
    Results,
    Rule,
    Setting,
    Table,
    derived,
    differs,
    idle,
    lacks,
    listed,
    names_of,
    settings_of,
    to,
    trackers,
    without,
)

SCHEDULES = {"cosine": "cosine_with_min_lr", "constant": "constant_with_warmup"}
"""Schedules that have another name here."""
PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
MARKS_OF_GRPO = ("num_generations", "max_completion_length", "reward_funcs")
"""Arguments that only GRPO has."""


def trainer_settings(command: Command, *, lr: float) -> tuple[Setting, ...]:
    """Return the arguments of transformers' trainer.

    Args:
        lr: their default learning rate.
    """
    optimizer, model = ("actor.", "actor") if command == "train_ppo_ray" else ("", "model")
    return (
        to("learning_rate", f"{optimizer}adam.lr", default=lr),
        *settings_of("trainer", optimizer=optimizer, model=model),
        (
            without("dataloader_num_workers", "all rows are read before the first step")
            if command == "train_ppo_ray"
            else to("dataloader_num_workers", "data.dataloader_num_workers")
        ),
        *settings_of("trainer_end"),
    )


def trainer_rules(command: Command) -> tuple[Rule, ...]:
    """Return what becomes of several arguments of transformers' trainer together."""

    prefix, model = ("actor.", "actor") if command == "train_ppo_ray" else ("", "model")

    def optimizer(given: Given) -> Results:
        yield Flag(f"{prefix}adam.betas", [given.number("adam_beta1"), given.number("adam_beta2")])
        kind = given.text("lr_scheduler_type") or "linear"
        yield Flag(f"{prefix}lr_scheduler", SCHEDULES.get(kind, kind))
        if kind == "cosine":
            yield Flag(f"{prefix}min_lr_ratio", 0.0)

    def epochs(given: Given) -> Results:
        passes = given.number("num_train_epochs")
        flag = "train.num_episodes" if command == "train_ppo_ray" else "train.max_epochs"
        yield Flag(flag, max(1, math.ceil(passes)))
        if passes % 1:
            yield differs("num_train_epochs", f"passes are whole: {passes:g} becomes {math.ceil(passes)}")

    def recomputation(given: Given) -> Results:
        if given.group("gradient_checkpointing_kwargs").get("use_reentrant"):
            yield Flag(f"{model}.gradient_checkpointing_reentrant", True)

    return (optimizer, epochs, recomputation, _precision, _sharding, _trackers, _checkpoints, _evaluation, _adapter)


def _precision(given: Given) -> Results:
    named = PRECISIONS.get((given.text("torch_dtype") or "").removeprefix("torch."))
    if given["bf16"] is True or given["fp16"] is True:
        named = "bf16" if given["bf16"] is True else "fp16"
    if named:
        yield Flag("ds.param_dtype", named)


def _sharding(given: Given) -> Results:
    config = given["deepspeed"]
    if config is None:
        return
    match = re.search(r"z(?:ero)?_?-?([0123])", str(config), re.IGNORECASE)
    if match is None:
        yield lacks("deepspeed", f"{config} is not read; --ds.zero_stage and --ds.adam_offload")
        return
    yield Flag("ds.zero_stage", int(match[1]))
    if "offload" in str(config):
        yield Flag("ds.adam_offload", True)
    yield derived("deepspeed", f"the stage is that in the name {config}; other settings of the file are not read")


def _trackers(given: Given) -> Results:
    yield from trackers(given, "report_to", "none", "None")


def _checkpoints(given: Given) -> Results:
    strategy = given.text("save_strategy")
    steps = given.number("save_steps")
    if strategy == "steps" and steps >= 1:
        yield Flag("ckpt.save_steps", int(steps))
    elif strategy == "steps":
        yield lacks("save_steps", "a share of all steps; --ckpt.save_steps counts steps")
    elif strategy not in ("no", "False"):
        yield lacks("save_strategy", f"{strategy}; --ckpt.save_steps counts steps")
    limit = given["save_total_limit"]
    yield Flag("ckpt.max_num", KEEP_ALL if limit is None or limit == -1 else limit)
    if given["save_only_model"] is True:
        yield Flag("ckpt.save_hf", True)
        yield differs("save_only_model", "each checkpoint has the model, and what a stopped run resumes from")
    if given["push_to_hub"] is True:
        repository = given.text("hub_model_id")
        if repository is not None and "/" in repository:
            yield Flag("ckpt.push_to_hub", repository)
        else:
            yield lacks("push_to_hub", "--ckpt.push_to_hub takes the repository, OWNER/NAME")
    elif given.has("hub_model_id"):
        yield lacks("hub_model_id", "it has no effect without push_to_hub")


def _evaluation(given: Given) -> Results:
    names, every = words(given["dataset_test_name"]), given["eval_steps"]
    if not names:
        if given.text("eval_strategy") not in ("no", None):
            yield lacks("eval_strategy", "the file names no rows to evaluate on")
        return
    yield Flag("eval.dataset", ",".join(names))
    if given.has("dataset_test_split"):
        yield Flag("eval.split", given["dataset_test_split"])
    if given.text("eval_strategy") == "epoch" or not isinstance(every, int):
        yield differs("eval_strategy", "it is evaluated every --eval.steps steps; set that flag")
    else:
        yield Flag("eval.steps", every)


def words(value: object) -> list[str]:
    """Return the names in a value: a list, or text that separates them by commas."""
    if value is None or value == "":
        return []
    return [str(one) for one in value] if isinstance(value, (list, tuple)) else str(value).split(",")


def gpus(given: Given) -> int | None:
    """Return the number of GPUs that the command line names, None if it names none."""
    if given["nproc_per_node"] is None:
        return None
    return given.whole("nproc_per_node") * given.whole("nnodes")


def update_samples(given: Given) -> int:
    """Return how many samples an update has; without a number of GPUs, on one."""
    passes = given.whole("per_device_train_batch_size") * given.whole("gradient_accumulation_steps")
    return passes * (gpus(given) or 1)


def batch(given: Given) -> Results:
    """Samples of an update are counted over all GPUs here."""
    samples, count = update_samples(given), gpus(given)
    yield Flag("train.micro_batch_size", given.whole("per_device_train_batch_size"))
    yield Flag("train.batch_size", samples)
    yield from batch_note(given, f"--train.batch_size {samples}", count)


def batch_note(given: Given, result: str, count: int | None) -> Results:
    both = "per_device_train_batch_size, gradient_accumulation_steps"
    if count is None:
        yield differs(
            both,
            f"{result} is for one GPU, because the file names no number of GPUs: give it after the file's name as "
            "nproc_per_node=8",
        )
    else:
        yield derived(both, f"{result} counts the samples on all {count} GPUs")


def _adapter(given: Given) -> Results:
    rank, alpha, dropout, modules = "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules"
    if given["use_peft"] is not True:
        yield from idle(given, "it has no effect without LoRA", rank, alpha, dropout, modules)
        return
    yield Flag("ds.lora.rank", given.whole(rank))
    yield Flag("ds.lora.alpha", given.whole(alpha))
    yield Flag("ds.lora.dropout", given.number(dropout))
    if layers := words(given[modules]):
        yield Flag("ds.lora.target_modules", layers)


SCORED_BY_NAME = {"accuracy": "math", "accuracy_reward": "math", "math": "math"} | dict.fromkeys(
    ("format", "format_reward", "think_format_reward"), ""
)
"""Verifiers that judge as rewards of these names do; the empty one is part of every verifier."""


def _rewards(given: Given) -> Results:
    functions = words(given["reward_funcs"])
    known = [SCORED_BY_NAME[one] for one in functions if SCORED_BY_NAME.get(one)]
    own = [one for one in functions if one not in SCORED_BY_NAME]
    weights = {"accuracy": 0.0, "format": 0.0}
    for one, weight in zip(functions, listed(given["reward_weights"] or [1.0] * len(functions)), strict=False):
        weights["accuracy" if SCORED_BY_NAME.get(one) else "format"] += float(str(weight))
    told = ",".join(f"{part}_weight={value:g}" for part, value in weights.items() if functions and not own)
    yield Flag("reward.remote_url", (known[0] if known else DEFAULT_VERIFIER) + (told and f":{told}"))
    what = f"{', '.join(own)}: functions of the script are not read" if own else "its rewards are in the script"
    if own or not functions:
        yield differs(
            "reward_funcs",
            f"{what}, and {DEFAULT_VERIFIER} judges here; give yours as --reward.remote_url FILE.py:FUNCTION",
        )
    elif "format" in " ".join(functions):
        yield differs("reward_funcs", "the verifier judges answer and format by its own rules, with these weights")


LOSS_MEANS = names_of("hugging_face_loss_means")


def group_rule(*, counts_prompts: bool) -> Rule:
    """Return the rule of GRPO's batches.

    Args:
        counts_prompts: whether a batch counts prompts, as with R1-V, and not responses.
    """

    def rule(given: Given) -> Results:
        responses, count = given.whole("num_generations"), gpus(given)
        samples = update_samples(given) * (responses if counts_prompts else 1)
        each = given["steps_per_generation"]
        updates = (
            1 if each is None else given.whole("steps_per_generation") / given.whole("gradient_accumulation_steps")
        )
        prompts = max(1, math.ceil(samples * updates / responses))
        yield Flag("rollout.n_samples_per_prompt", responses)
        yield Flag("rollout.batch_size", prompts)
        yield Flag("train.batch_size", min(samples, prompts * responses) if updates >= 1 else prompts * responses)
        yield Flag("train.micro_batch_size", given.whole("per_device_train_batch_size"))
        result = f"--rollout.batch_size {prompts} prompts with {responses} responses, --train.batch_size {samples}"
        yield from batch_note(given, result, count)
        if count is not None:
            per_node = given.whole("nproc_per_node")
            for model in ("actor", "ref"):
                yield Flag(f"{model}.num_nodes", given.whole("nnodes"))
                yield Flag(f"{model}.num_gpus_per_node", per_node)

    return rule


def policy(given: Given) -> Results:
    """The loss of GRPO and its variants."""
    kind = given.text("loss_type") or "grpo"
    if kind in ("cispo", "sapo"):
        yield Flag("actor.policy_loss_type", kind)
    if kind in LOSS_MEANS:
        yield Flag("actor.loss_agg_mode", LOSS_MEANS[kind])
    else:
        yield lacks("loss_type", f"{kind}; --actor.policy_loss_type and --actor.loss_agg_mode")
    if given.text("importance_sampling_level") in ("sequence", "sequence_token"):
        token = given.text("importance_sampling_level") == "sequence_token"
        yield Flag("actor.policy_loss_type", "gspo_token" if token else "gspo")
    scale = given["scale_rewards"]
    yield Flag("algo.advantage.estimator", "dr_grpo" if scale in (False, "none") else "group_norm")
    if scale == "batch":
        yield lacks("scale_rewards", "batch: advantages are divided by their group's deviation")
    if kind == "sapo":
        for side in ("pos", "neg"):
            yield Flag(f"actor.sapo_temperature_{side}", given.number(f"sapo_temperature_{side}"))
    elif given["epsilon"] is not None:
        low, high = (given.number("epsilon" if given[name] is None else name) for name in ("epsilon", "epsilon_high"))
        # CISPO's only bound there is the largest weight itself.
        yield Flag("actor.eps_clip_low_high", [1.0, high - 1] if kind == "cispo" else [low, high])
    beta = given.number("beta")
    yield Flag("algo.kl.init_coef", beta)
    if beta:
        yield Flag("algo.kl.use_loss", True)
        yield Flag("algo.kl.estimator", "k3")
    if (most := given["top_k"]) is not None:
        yield Flag("rollout.top_k", most if isinstance(most, int) and most > 0 else -1)


def sequence_lengths(given: Given) -> Results:
    prompt, response = given.whole("max_prompt_length"), given.whole("max_completion_length")
    yield Flag("data.max_len", prompt + response)
    yield Flag("rollout.max_new_tokens", response)
    yield derived(
        "max_prompt_length, max_completion_length",
        f"--data.max_len {prompt + response} is prompt with images and response together",
    )


def _r1_v_sampling(given: Given) -> Results:
    """Without vLLM, the trainer fixes the temperature and leaves the rest to transformers' GenerationConfig."""
    if not given["use_vllm"]:
        yield Flag("rollout.temperature", 1.0)
        yield Flag("rollout.top_k", 50)


def _trained_tokens(given: Given) -> Results:
    """Which tokens of a conversation are trained on: all, by default, in TRL."""
    if not given["assistant_only_loss"]:
        what = "the assistant's turns are trained on; without it TRL trains on all tokens of rows of messages"
        yield differs("assistant_only_loss", f"{what}, as --model.pretrain_mode_enable does")


def _supervised(command: Command, *, lr: float, groups: str = "") -> Table:
    return Table(
        system="TRL",
        command=command,
        settings=(*trainer_settings(command, lr=lr), *settings_of(f"trl_supervised trl_data trl_lora {groups}")),
        rules=(*trainer_rules(command), batch, *((_trained_tokens,) if groups == "trl_sft" else ())),
        names=names_of("trl_names"),
        prefix="--",
    )


def _grpo(
    system: str, *, counts_prompts: bool, groups: str = "", rules: tuple[Rule, ...] = (), **defaults: object
) -> Table:
    command: Command = "train_ppo_ray"
    own = (*trainer_settings(command, lr=1e-6), *settings_of(f"trl_grpo trl_data trl_lora {groups} grpo"))
    return Table(
        system=system,
        command=command,
        settings=tuple(replace(one, default=defaults.get(one.name, one.default)) for one in own),
        rules=(
            *trainer_rules(command),
            group_rule(counts_prompts=counts_prompts),
            sequence_lengths,
            policy,
            _rewards,
            *rules,
        ),
        names=names_of("trl_names"),
        prefix="--",
    )


TRL: Mapping[str, Table] = {
    "sft": _supervised("train_sft", lr=2e-5, groups="trl_sft"),
    "dpo": _supervised("train_dpo", lr=1e-6, groups="trl_dpo"),
    "reward": _supervised("train_rm", lr=1e-4),
    "grpo": _grpo("TRL", counts_prompts=False, loss_type="dapo"),
    "r1_v": _grpo("R1-V", counts_prompts=True, groups="r1_v", rules=(_r1_v_sampling,), **names_of("r1_v_defaults")),
}
"""By the names of TRL's commands; R1-V's own trainer counts prompts."""
