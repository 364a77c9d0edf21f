"""Conversion of two trainers around Hugging Face's: LLaMA-Factory's YAML files and command lines, and ms-swift's commands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from lmm_r1.migrate.hugging_face import (
    GRPO,
    Results,
    adapter,
    batch,
    evaluation,
    group_rule,
    policy,
    rewards,
    sequence_lengths,
    trainer_rules,
    trainer_settings,
    words,
)
from lmm_r1.migrate.table import Command, Flag, Given, Note, Rule, Setting, Table, ruled, settings_of, to, without

_REFERENCE = to("ref_model", "ref.model_name_or_path")
_BETA = to("beta", "model.beta", default=0.1)
_FACTORY_NAMES = {"flash_attn": "attn_implementation", "evaluation_strategy": "eval_strategy", "dtype": "torch_dtype"}
_FACTORY_LORA = adapter(
    rank="lora_rank",
    alpha="lora_alpha",
    dropout="lora_dropout",
    modules="lora_target",
    enabled=lambda given: given["finetuning_type"] == "lora",
)


def _factory_rows(given: Given) -> Results:
    names = words(given["dataset"])
    if names:
        yield Flag("data.dataset", ",".join(name.strip() for name in names))
        yield Note(
            "another meaning",
            "dataset",
            "names of dataset_info.json are not looked up; give the files, of whichever of their formats",
        )


def _factory_method(given: Given) -> Results:
    kind = given.text("finetuning_type")
    if kind not in ("lora", "full"):
        yield Note("without counterpart", "finetuning_type", f"{kind}; all weights are trained, or adapters (LoRA)")
    if kind == "full" and given["freeze_vision_tower"] is True:
        yield Note(
            "another meaning",
            "freeze_vision_tower",
            "the vision tower is not trained there, unless this is false; name its weights with --model.freeze_prefix",
        )
    bits = given["quantization_bit"]
    if bits == 4 and kind == "lora":
        yield Flag("ds.load_in_4bit", True)
    elif bits is not None:
        yield Note(
            "without counterpart", "quantization_bit", f"{bits}; weights under LoRA have 4 bits with --ds.load_in_4bit"
        )


def _factory_table(command: Command, *settings: Setting) -> Table:
    return Table(
        system="LLaMA-Factory",
        command=command,
        settings=(*trainer_settings(command, lr=5e-5), *settings_of("llama_factory"), *settings),
        rules=(
            *trainer_rules(command),
            batch,
            _FACTORY_LORA,
            _factory_rows,
            _factory_method,
            evaluation("eval_dataset"),
            _factory_loss(command),
        ),
        names=_FACTORY_NAMES,
        prefix="",
    )


def _factory_loss(command: Command) -> Rule:
    def rule(given: Given) -> Results:
        if command == "train_sft" and given["stage"] == "pt":
            yield Flag("model.pretrain_mode_enable", True)
        if command != "train_dpo":
            return
        kind = given.text("pref_loss") or "sigmoid"
        if kind in ("ipo", "simpo"):
            yield Flag(f"model.{kind}_enable", True)
        elif kind != "sigmoid":
            yield Note("without counterpart", "pref_loss", f"{kind}; there are sigmoid, ipo and simpo")

    return rule


_FACTORY_REFERENCE = (_REFERENCE, replace(_BETA, name="pref_beta"))
_FACTORY_SFT = (
    to("train_on_prompt", "model.pretrain_mode_enable"),
    without("mask_history", "--data.no_multiturn trains on the last turn only", False),
)
LLAMA_FACTORY: Mapping[str, Table] = {
    "sft": _factory_table("train_sft", *_FACTORY_SFT),
    "pt": _factory_table("train_sft", *_FACTORY_SFT),
    "dpo": _factory_table(
        "train_dpo",
        *_FACTORY_REFERENCE,
        ruled("pref_loss", "sigmoid"),
        to("pref_ftx", "model.nll_loss_coef"),
        to("dpo_label_smoothing", "model.label_smoothing"),
        to("simpo_gamma", "model.simpo_gamma"),
    ),
    "kto": _factory_table(
        "train_kto",
        *_FACTORY_REFERENCE,
        to("kto_chosen_weight", "model.desirable_loss_weight"),
        to("kto_rejected_weight", "model.undesirable_loss_weight"),
    ),
    "rm": _factory_table("train_rm"),
}
"""By the names of LLaMA-Factory's stages."""

_DEFAULT_LENGTH = 2048
_FULL_LR, _LORA_LR = 1e-5, 1e-4
_SWIFT_NAMES = {
    "model_id_or_path": "model",
    "sft_type": "train_type",
    "tuner_type": "train_type",
    "attn_impl": "attn_implementation",
    "evaluation_strategy": "eval_strategy",
    "lora_target_modules": "target_modules",
    "custom_train_dataset_path": "dataset",
    "custom_val_dataset_path": "val_dataset",
    "batch_size": "per_device_train_batch_size",
    "dtype": "torch_dtype",
    "max_pixels": "MAX_PIXELS",
}
_SWIFT_LORA = adapter(
    rank="lora_rank",
    alpha="lora_alpha",
    dropout="lora_dropout",
    modules="target_modules",
    enabled=lambda given: given["train_type"] in ("lora", "qlora"),
)


def _swift_common(command: Command) -> Rule:
    """Return the rule of the model, the rows and the learning rate."""
    plays = command == "train_ppo_ray"

    def rule(given: Given) -> Results:
        if (model := given.text("model")) is not None:
            yield Flag("actor.model_name_or_path" if plays else "model.model_name_or_path", model)
        named = given["dataset"]
        names = words(named) if isinstance(named, (list, tuple)) else [str(named)] if named else []
        files = [name.partition("#")[0] for name in names]
        if files:
            yield Flag("data.prompt_dataset" if plays else "data.dataset", ",".join(files))
        if files != names:
            yield Note(
                "another meaning", "dataset", "all rows are read; the number after # is left out (--data.max_samples)"
            )
        if not given.has("learning_rate"):
            adapts = given["train_type"] in ("lora", "qlora")
            yield Flag("actor.adam.lr" if plays else "adam.lr", _LORA_LR if adapts else _FULL_LR)
        if given["train_type"] not in ("lora", "qlora", "full"):
            yield Note(
                "without counterpart", "train_type", f"{given['train_type']}; all weights are trained, or LoRA's"
            )
        for name, flag in (("MAX_PIXELS", "data.max_pixels"), ("MIN_PIXELS", "data.min_pixels")):
            if given[name] is not None:
                yield Flag(flag, given.whole(name))
        bits = given["quant_bits"]
        if bits == 4:
            yield Flag("ds.load_in_4bit", True)
        elif bits:
            yield Note("without counterpart", "quant_bits", f"{bits}; base weights have 4 bits with --ds.load_in_4bit")

    return rule


def _swift_table(command: Command, *settings: Setting, rules: tuple[Rule, ...] = (batch,)) -> Table:
    defaults = {
        "gradient_checkpointing": True,
        "weight_decay": 0.1,
        "adam_beta2": 0.95,
        "lr_scheduler_type": "cosine",
        "warmup_ratio": 0.0,
    }
    shared = tuple(
        replace(one, default=defaults.get(one.name, one.default)) for one in trainer_settings(command, lr=_LORA_LR)
    )
    return Table(
        system="ms-swift",
        command=command,
        settings=(*shared, *settings_of("swift"), *settings),
        rules=(*trainer_rules(command), _SWIFT_LORA, _swift_common(command), evaluation("val_dataset"), *rules),
        names=_SWIFT_NAMES,
        prefix="--",
    )


_LENGTH = to("max_length", "data.max_len", default=_DEFAULT_LENGTH)
_FREEZE = without(
    "freeze_vit", "only the language model gets adapters; --model.freeze_prefix names what is not trained", True
)
SWIFT: Mapping[str, Table] = {
    "sft": _swift_table("train_sft", _LENGTH, _FREEZE),
    "pt": _swift_table("train_sft", _LENGTH, _FREEZE),
    "rlhf dpo": _swift_table("train_dpo", _LENGTH, _FREEZE, _BETA, _REFERENCE, to("rpo_alpha", "model.nll_loss_coef")),
    "rlhf kto": _swift_table("train_kto", _LENGTH, _FREEZE, _BETA, _REFERENCE),
    "rlhf rm": _swift_table("train_rm", _LENGTH, _FREEZE),
    "rlhf grpo": _swift_table(
        "train_ppo_ray",
        *GRPO,
        to("freeze_vit", "actor.freeze_visual_encoder"),
        without("max_length", "--data.max_len is prompt and response together", None),
        without("multi_turn_scheduler", "write an environment (docs/agents.md): --train.agent FILE.py", None),
        without("max_turns", "--agent.max_turns, with an environment", None),
        without("dynamic_sample", "--algo.dynamic_filtering_enable draws groups again", False),
        without("max_resample_times", "--algo.dynamic_filtering_max_batches", None),
        ruled("beta", 0.04),
        ruled("max_completion_length", 512),
        ruled("reward_funcs"),
        rules=(group_rule(counts_prompts=False), sequence_lengths, policy, rewards("reward_funcs")),
    ),
}
"""By the words after `swift`."""
