"""What flags of OpenRLHF 0.6 are here where several make up one, or a value is written in another way."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from lmm_r1.config.conversion.table import Flag, Given, Note, Rule
from lmm_r1.errors import UserError

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
    prompt, response = given.whole("prompt_max_len"), given.whole("generate_max_len")
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


def _entropy(given: Given) -> Results:
    if coefficient := given.number("entropy_loss_coef"):
        yield Flag("actor.entropy_coef", coefficient)


def _media(given: Given) -> Results:
    for kind, most in _json(given, "limit_mm_per_prompt").items():
        if kind == "image":
            yield Flag("data.max_images_per_prompt", most)
        else:
            yield Note("without counterpart", "limit_mm_per_prompt", f"{kind}: no limit is needed")
    for name, value in _json(given, "processor_kwargs").items():
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


def _json(given: Given, name: str) -> Mapping[str, object]:
    value = given[name]
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise UserError(f"--{name} {value!r} is no JSON: {error}") from error
    if value is not None and not isinstance(value, dict):
        raise UserError(f"--{name} {value!r} must be a JSON object")
    return value or {}


def _words(value: object) -> list[str]:
    return [str(word) for word in value] if isinstance(value, (list, tuple)) else [str(value)]


_SHARED: tuple[Rule, ...] = (_precision, _long_sequences, _adapters, _trackers, _evaluation)
PPO_RULES: tuple[Rule, ...] = (*_SHARED, _weight_sync, _lengths, _reward_model, _entropy, _media, _frozen)
SFT_RULES: tuple[Rule, ...] = _SHARED
