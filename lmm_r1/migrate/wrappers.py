"""Conversion of two trainers around Hugging Face's: LLaMA-Factory's YAML files and command lines, and ms-swift's commands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from lmm_r1.migrate.hugging_face import (
    GRPO_RULES,
    adapter,
    batch,
    evaluation,
    frozen_tower,
    group_rule,
    trainer_rules,
    trainer_settings,
    words,
)
from lmm_r1.migrate.table import Command, Flag, Given, Results, Rule, Table, differs, lacks, names_of, settings_of

_FACTORY_LORA = adapter(
    "lora_rank lora_alpha lora_dropout lora_target", enabled=lambda given: given["finetuning_type"] == "lora"
)


def _factory_rows(given: Given) -> Results:
    names = words(given["dataset"])
    if names:
        yield Flag("data.dataset", ",".join(name.strip() for name in names))
        yield differs(
            "dataset", "names of dataset_info.json are not looked up; give the files, of whichever of their formats"
        )


def _factory_method(given: Given) -> Results:
    kind = given.text("finetuning_type")
    if kind not in ("lora", "full"):
        yield lacks("finetuning_type", f"{kind}; all weights are trained, or adapters (LoRA)")
    bits = given["quantization_bit"]
    if bits == 4 and kind == "lora":
        yield Flag("ds.load_in_4bit", True)
    elif bits is not None:
        yield lacks("quantization_bit", f"{bits}; weights under LoRA have 4 bits with --ds.load_in_4bit")


_FACTORY_RULES: tuple[Rule, ...] = (
    *(_factory_rows, _factory_method, evaluation("eval_dataset")),
    frozen_tower("freeze_vision_tower freeze_multi_modal_projector finetuning_type", model="model"),
)


def _factory_table(command: Command, groups: str = "") -> Table:
    return Table(
        system="LLaMA-Factory",
        command=command,
        settings=(*trainer_settings(command, lr=5e-5), *settings_of(f"llama_factory {groups}")),
        rules=(*trainer_rules(command), batch, _FACTORY_LORA, *_FACTORY_RULES, _factory_loss(command)),
        names=names_of("llama_factory_names"),
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
            yield lacks("pref_loss", f"{kind}; there are sigmoid, ipo and simpo")

    return rule


LLAMA_FACTORY: Mapping[str, Table] = {
    "sft": _factory_table("train_sft", "llama_factory_sft"),
    "pt": _factory_table("train_sft", "llama_factory_sft"),
    "dpo": _factory_table("train_dpo", "llama_factory_dpo"),
    "rm": _factory_table("train_rm"),
}
"""By the names of LLaMA-Factory's stages."""

_FULL_LR, _LORA_LR = 1e-5, 1e-4
_SWIFT_LORA = adapter(
    "lora_rank lora_alpha lora_dropout target_modules", enabled=lambda given: given["train_type"] in ("lora", "qlora")
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
            yield differs("dataset", "all rows are read; the number after # is left out (--data.max_samples)")
        if not given.has("learning_rate"):
            adapts = given["train_type"] in ("lora", "qlora")
            yield Flag("actor.adam.lr" if plays else "adam.lr", _LORA_LR if adapts else _FULL_LR)
        if given["train_type"] not in ("lora", "qlora", "full"):
            yield lacks("train_type", f"{given['train_type']}; all weights are trained, or LoRA's")
        for name, flag in (("MAX_PIXELS", "data.max_pixels"), ("MIN_PIXELS", "data.min_pixels")):
            if given[name] is not None:
                yield Flag(flag, given.whole(name))
        bits = given["quant_bits"]
        if bits == 4:
            yield Flag("ds.load_in_4bit", True)
        elif bits:
            yield lacks("quant_bits", f"{bits}; base weights have 4 bits with --ds.load_in_4bit")

    return rule


def _swift_table(command: Command, groups: str, rules: tuple[Rule, ...] = (batch,)) -> Table:
    defaults = names_of("swift_defaults")
    shared = tuple(
        replace(one, default=defaults.get(one.name, one.default)) for one in trainer_settings(command, lr=_LORA_LR)
    )
    tower = frozen_tower(
        "freeze_vit freeze_aligner train_type", model="actor" if command == "train_ppo_ray" else "model"
    )
    return Table(
        system="ms-swift",
        command=command,
        settings=(*shared, *settings_of(f"swift {groups}")),
        rules=(*trainer_rules(command), _SWIFT_LORA, _swift_common(command), tower, evaluation("val_dataset"), *rules),
        names=names_of("swift_names"),
        prefix="--",
    )


SWIFT: Mapping[str, Table] = {
    "sft": _swift_table("train_sft", "swift_sft"),
    "pt": _swift_table("train_sft", "swift_sft"),
    "rlhf dpo": _swift_table("train_dpo", "swift_dpo"),
    "rlhf rm": _swift_table("train_rm", "swift_sft"),
    "rlhf grpo": _swift_table("train_ppo_ray", "grpo swift_grpo", (group_rule(counts_prompts=False), *GRPO_RULES)),
}
"""By the words after `swift`."""
