"""Conversion of LLaMA-Factory's YAML files and command lines."""

from __future__ import annotations

from collections.abc import Mapping

from lmm_r1.migrate.hugging_face import (
    Results,
    adapter,
    batch,
    evaluation,
    not_needed,
    ruled,
    to,
    trainer_rules,
    trainer_settings,
    without,
    words,
)
from lmm_r1.migrate.table import Command, Flag, Given, Note, Rule, Setting, Table

_SETTINGS = (
    to("model_name_or_path", "model.model_name_or_path"),
    ruled("stage", "sft"),
    ruled("finetuning_type", "lora"),
    ruled("dataset"),
    without("dataset_dir", "datasets are files or names here, without dataset_info.json", "data"),
    without("template", "the chat template is the checkpoint's; --data.tokenizer_chat_template gives another one"),
    to("cutoff_len", "data.max_len", default=2048),
    to("max_samples", "data.max_samples"),
    ruled("eval_dataset"),
    without("val_size", "give rows of their own to evaluate on: --eval.dataset", 0, 0.0),
    to("image_max_pixels", "data.max_pixels", default=768 * 768),
    to("image_min_pixels", "data.min_pixels"),
    without("video_max_pixels", "bounds of videos are in the video part of a row", 65536),
    to("default_system", "data.system_prompt"),
    ruled("lora_rank", 8),
    ruled("lora_alpha"),
    ruled("lora_dropout", 0.0),
    ruled("lora_target", "all"),
    to("use_dora", "ds.lora.use_dora"),
    to("use_rslora", "ds.lora.use_rslora"),
    ruled("quantization_bit"),
    ruled("freeze_vision_tower", True),
    without("freeze_multi_modal_projector", "--model.freeze_prefix names what is not trained", True),
    without("freeze_language_model", "--model.freeze_prefix names what is not trained", False),
    to("packing", "ds.packing_samples"),
    to("neat_packing", "ds.packing_samples"),
    to("enable_liger_kernel", "ds.use_liger_kernel"),
    without("adapter_name_or_path", "merge the adapter first (`lmm-r1 merge`), and train the result", None),
    without("quantization_method", "weights are quantized by bitsandbytes", "bitsandbytes", "bnb"),
    *not_needed("double_quantization tokenized_path streaming cache_dir ray_num_workers pure_bf16"),
)
_NAMES = {"flash_attn": "attn_implementation", "evaluation_strategy": "eval_strategy", "dtype": "torch_dtype"}
_LORA = adapter(
    rank="lora_rank",
    alpha="lora_alpha",
    dropout="lora_dropout",
    modules="lora_target",
    enabled=lambda given: given["finetuning_type"] == "lora",
)


def _rows(given: Given) -> Results:
    names = words(given["dataset"])
    if names:
        yield Flag("data.dataset", ",".join(name.strip() for name in names))
        yield Note(
            "another meaning",
            "dataset",
            "names of dataset_info.json are not looked up; give the files, of whichever of their formats",
        )


def _method(given: Given) -> Results:
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


def _table(command: Command, *settings: Setting) -> Table:
    return Table(
        system="LLaMA-Factory",
        command=command,
        settings=(*trainer_settings(command, lr=5e-5), *_SETTINGS, *settings),
        rules=(*trainer_rules(command), batch, _LORA, _rows, _method, evaluation("eval_dataset"), _loss(command)),
        names=_NAMES,
        prefix="",
    )


def _loss(command: Command) -> Rule:
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


_REFERENCE = (to("ref_model", "ref.model_name_or_path"), to("pref_beta", "model.beta", default=0.1))
_SFT = (
    to("train_on_prompt", "model.pretrain_mode_enable"),
    without("mask_history", "--data.no_multiturn trains on the last turn only", False),
)
LLAMA_FACTORY: Mapping[str, Table] = {
    "sft": _table("train_sft", *_SFT),
    "pt": _table("train_sft", *_SFT),
    "dpo": _table(
        "train_dpo",
        *_REFERENCE,
        ruled("pref_loss", "sigmoid"),
        to("pref_ftx", "model.nll_loss_coef"),
        to("dpo_label_smoothing", "model.label_smoothing"),
        to("simpo_gamma", "model.simpo_gamma"),
    ),
    "kto": _table(
        "train_kto",
        *_REFERENCE,
        to("kto_chosen_weight", "model.desirable_loss_weight"),
        to("kto_rejected_weight", "model.undesirable_loss_weight"),
    ),
    "rm": _table("train_rm"),
}
"""By the names of LLaMA-Factory's stages."""
