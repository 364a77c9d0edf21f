"""Conversion of command lines of OpenRLHF 0.3 to 0.11, and of LMM-R1's own scripts."""

from __future__ import annotations

from collections.abc import Mapping

from lmm_r1.config.differences import DIFFERENCES, only_defaults
from lmm_r1.dotted import leaf_types
from lmm_r1.tools.migrate.table import (
    CONFIG_CLASSES,
    OURS,
    Command,
    Flag,
    Given,
    Results,
    Setting,
    Table,
    derived,
    differs,
    lacks,
    listed,
    settings_of,
)

VISION_TOWERS = ("visual", "vision_tower", "model.visual", "model.vision_tower")
"""Prefixes of parameters that are a vision tower's in the architectures that LMM-R1 trains."""


def _machine(given: Given) -> Results:
    if given.has("bf16"):
        yield Flag("ds.param_dtype", "bf16")
    if given.has("flash_attn"):
        yield derived("flash_attn", "--ds.attn_implementation auto takes the fastest attention installed")
    if given.whole("ring_attn_size") > 1:
        yield Flag("ds.ulysses_size", given.whole("ring_attn_size"))
        yield differs("ring_attn_size", _DIVISOR)
    if given.has("use_wandb"):
        yield Flag("logger.trackers", ["wandb"])
        yield differs("use_wandb", "the key is not written down; set WANDB_API_KEY")


def _lengths(given: Given) -> Results:
    own = "max_new_tokens" if given.has("max_new_tokens") else "generate_max_len"
    prompt, response = given.whole("prompt_max_len"), given.whole(own)
    total = prompt + response if given["max_len"] is None else given.whole("max_len")
    yield Flag("data.max_len", total)
    yield Flag("rollout.max_new_tokens", response)
    if given["max_len"] is None:
        text = f"--data.max_len {total} is prompt with images ({prompt}) and response ({response}) together"
        yield derived("prompt_max_len, generate_max_len", text)
    else:
        yield differs("max_len", f"a prompt may have {total - response} tokens, whatever prompt_max_len says")


def _policy(given: Given) -> Results:
    backend = given.text("vllm_sync_backend")
    if backend != "nccl":
        yield differs("vllm_sync_backend", f"weights travel by NCCL, or with --vllm.sync_with_ray, not {backend}")
    if given["remote_rm_url"] is None and (models := given.text("reward_pretrain")) is not None:
        first, *others = models.split(",")
        yield Flag("reward.normalize_enable", given.switch("normalize_reward"))
        yield Flag("reward.model_name_or_path", first)
        if others:
            yield lacks("reward_pretrain", f"one reward model is taken, {first}; left out: {others}")
    if given["use_kl_estimator_k3"]:
        yield Flag("algo.kl.estimator", "k3")
    if coefficient := given.number("entropy_loss_coef"):
        yield Flag("actor.entropy_coef", coefficient)
    if given["enable_vllm_is_correction"]:
        kind = "icepop" if given["use_icepop"] else given.text("vllm_is_correction_type") or "tis"
        if kind not in _CORRECTIONS:
            yield lacks("vllm_is_correction_type", f"{kind}; tis is written instead")
        yield from _correction(kind)
        yield Flag("algo.advantage.is_correction_threshold", listed(given["vllm_is_truncated_threshold"]))


_DIVISOR = "Ulysses splits attention heads, whose number it must divide"
_CORRECTIONS = {"tis": ("token", "clip"), "icepop": ("token", "mask"), "seq-mask-tis": ("seq", "mask")}
"""Level and mode of each kind of correction between engine and trainer."""


def _correction(kind: str) -> Results:
    for what, value in zip(("level", "mode"), _CORRECTIONS.get(kind, _CORRECTIONS["tis"]), strict=True):
        yield Flag(f"algo.advantage.is_correction_{what}", value)


def _images(given: Given) -> Results:
    for kind, most in given.group("limit_mm_per_prompt").items():
        if kind == "image":
            yield Flag("data.max_images_per_prompt", most)
        else:
            yield lacks("limit_mm_per_prompt", f"{kind}: no limit is needed")
    for name, value in given.group("processor_kwargs").items():
        if name in ("min_pixels", "max_pixels"):
            yield Flag(f"data.{name}", value)
        else:
            yield lacks("processor_kwargs", f"{name}: the processor is the checkpoint's own")
    prefixes = [str(prefix) for prefix in listed(given["freeze_prefix"]) if prefix]
    if prefixes and all(prefix.rstrip(".") in VISION_TOWERS for prefix in prefixes):
        yield Flag("actor.freeze_visual_encoder", True)
        yield differs("freeze_prefix", "--actor.freeze_visual_encoder freezes the critic's tower, too")
    elif prefixes:
        yield Flag("actor.freeze_prefix", prefixes)


_LATER_NAMES = {"model_name_or_path": "pretrain", "ckpt_save_path": "save_path"}
"""Names in versions between 0.9 and 0.10."""


def _table(command: Command, groups: str) -> Table:
    known = leaf_types(CONFIG_CLASSES[command])
    shared = (one for one in settings_of("openrlhf_shared openrlhf_supervised") if set(one.flags) <= known.keys())
    return Table(
        system="OpenRLHF before 0.10",
        command=command,
        settings=(*shared, *settings_of(groups)),
        rules=(_machine,),
        prefix="--",
        names=_LATER_NAMES,
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
    fixed = [
        Setting(name, one.value, says=one.instead, harmless=(one.value,))
        for name, one in only_defaults(known).items()
        if name != _RING
    ]
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


def _dotted(given: Given) -> Results:
    if given.has(_KEY):
        yield Flag("logger.trackers", ["wandb"])
        yield differs(_KEY, "the key is not written; set WANDB_API_KEY")
    if given.has(_RING) and given.whole(_RING) > 1:
        yield Flag("ds.ulysses_size", given.whole(_RING))
        yield differs(_RING, _DIVISOR)
    if given.has(_CORRECTS) and given[_CORRECTS]:
        yield from _correction(given.text(_CORRECTION_TYPE) or "tis")
