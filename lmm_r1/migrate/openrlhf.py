"""Conversion of command lines of OpenRLHF 0.3 to 0.11, and of LMM-R1's own scripts."""

from __future__ import annotations

from collections.abc import Mapping

from lmm_r1.config.differences import DIFFERENCES, only_defaults
from lmm_r1.dotted import leaf_types
from lmm_r1.migrate.table import (
    CONFIG_CLASSES,
    OURS,
    Command,
    Flag,
    Given,
    Results,
    Rule,
    Table,
    derived,
    differs,
    idle,
    lacks,
    listed,
    ruled,
    settings_of,
    to,
    without,
)

VISION_TOWERS = ("visual", "vision_tower", "model.visual", "model.vision_tower")
"""Prefixes of parameters that are a vision tower's in the architectures that LMM-R1 trains."""


def _precision(given: Given) -> Results:
    if given.has("bf16"):
        yield Flag("ds.param_dtype", "bf16")
    if given.has("flash_attn"):
        yield derived("flash_attn", "--ds.attn_implementation auto takes the fastest attention installed")


def _long_sequences(given: Given) -> Results:
    size = given.whole("ring_attn_size")
    if size > 1:
        yield Flag("ds.ulysses_size", size)
        yield differs("ring_attn_size", "Ulysses splits attention heads, of which it must be a divisor")


def _trackers(given: Given) -> Results:
    if given.has("use_wandb"):
        yield Flag("logger.trackers", ["wandb"])
        yield differs("use_wandb", "the key is not written down; set WANDB_API_KEY")


def _weight_sync(given: Given) -> Results:
    backend = given.text("vllm_sync_backend")
    if backend != "nccl":
        yield differs("vllm_sync_backend", f"weights travel by NCCL, or with --vllm.sync_with_ray, not {backend}")


def _lengths(given: Given) -> Results:
    own = "max_new_tokens" if given.has("max_new_tokens") else "generate_max_len"
    prompt, response = given.whole("prompt_max_len"), given.whole(own)
    total = prompt + response if given["max_len"] is None else given.whole("max_len")
    yield Flag("data.max_len", total)
    yield Flag("rollout.max_new_tokens", response)
    if given["max_len"] is None:
        yield derived(
            "prompt_max_len, generate_max_len",
            f"--data.max_len {total} is prompt with images ({prompt}) and response ({response}) together",
        )
    else:
        yield differs("max_len", f"a prompt may have {total - response} tokens, whatever prompt_max_len says")


def _reward_model(given: Given) -> Results:
    models = given.text("reward_pretrain")
    if models is None or given["remote_rm_url"] is not None:
        yield from idle(given, "only the rewards of a model are normalized, as there", "normalize_reward")
        yield from idle(given, "--reward.remote_url gives the rewards", *(["reward_pretrain"] if models else []))
        return
    yield Flag("reward.normalize_enable", given.switch("normalize_reward"))
    first, *others = models.split(",")
    yield Flag("reward.model_name_or_path", first)
    if others:
        yield lacks("reward_pretrain", f"one reward model is taken, {first}; left out: {others}")


def _divergence(given: Given) -> Results:
    if given["use_kl_estimator_k3"]:
        yield Flag("algo.kl.estimator", "k3")


_CORRECTIONS = {"tis": ("token", "clip"), "icepop": ("token", "mask"), "seq-mask-tis": ("seq", "mask")}
"""Level and mode of each kind of correction between engine and trainer."""


def _correction(given: Given) -> Results:
    """Ratios between vLLM's and the trainer's log-probs, which the first versions clip above one bound."""
    if not given["enable_vllm_is_correction"]:
        yield from idle(
            given,
            "it has no effect without enable_vllm_is_correction",
            "vllm_is_correction_type",
            "vllm_is_truncated_threshold",
            "use_icepop",
        )
        return
    kind = "icepop" if given["use_icepop"] else given.text("vllm_is_correction_type") or "tis"
    if kind not in _CORRECTIONS:
        yield lacks("vllm_is_correction_type", f"{kind}; tis is written instead")
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
            yield lacks("limit_mm_per_prompt", f"{kind}: no limit is needed")
    for name, value in given.group("processor_kwargs").items():
        if name in ("min_pixels", "max_pixels"):
            yield Flag(f"data.{name}", value)
        else:
            yield lacks("processor_kwargs", f"{name}: the processor is the checkpoint's own")


def _frozen(given: Given) -> Results:
    if not given.has("freeze_prefix"):
        return
    prefixes = [prefix.rstrip(".") for prefix in [str(one) for one in listed(given["freeze_prefix"])]]
    if all(prefix in VISION_TOWERS for prefix in prefixes):
        yield Flag("actor.freeze_visual_encoder", True)
        yield differs("freeze_prefix", "--actor.freeze_visual_encoder freezes the critic's tower, too")
    else:
        yield Flag("actor.freeze_prefix", [str(one) for one in listed(given["freeze_prefix"])])


_SHARED: tuple[Rule, ...] = (_precision, _long_sequences, _trackers)
_OF_RL: tuple[Rule, ...] = (_weight_sync, _lengths, _reward_model, _divergence, _correction, _entropy, _media, _frozen)


_LATER_NAMES = {"model_name_or_path": "pretrain", "ckpt_save_path": "save_path"}
"""Names in versions between 0.9 and 0.10."""


def _table(command: Command, groups: str) -> Table:
    known = leaf_types(CONFIG_CLASSES[command])
    shared = (one for one in settings_of("openrlhf_shared openrlhf_supervised") if set(one.flags) <= known.keys())
    return Table(
        system="OpenRLHF before 0.10",
        command=command,
        settings=(*shared, *settings_of(groups)),
        rules=_SHARED,
        prefix="--",
        names=_LATER_NAMES,
    )


_RL = Table(
    system="OpenRLHF before 0.10",
    command="train_ppo_ray",
    settings=settings_of("openrlhf_shared openrlhf_ppo"),
    rules=(*_SHARED, *_OF_RL),
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
    same = (to(name, name, default=theirs.get(name, OURS)) for name in known if name != _KEY)
    fixed = (without(name, one.instead, one.value) for name, one in only_defaults(known).items() if name != _RING)
    correction = (_CORRECTS, _CORRECTION_TYPE) if command == "train_ppo_ray" else ()
    return Table(
        system="OpenRLHF 0.11",
        command=command,
        settings=(*same, *fixed, *(ruled(name) for name in (_KEY, _RING, *correction))),
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
        yield differs(_RING, "Ulysses splits attention heads, whose number it must divide")
    if given.has(_CORRECTS) and given[_CORRECTS]:
        kind = given.text(_CORRECTION_TYPE) or "tis"
        level, mode = _CORRECTIONS.get(kind, _CORRECTIONS["tis"])
        yield Flag("algo.advantage.is_correction_level", level)
        yield Flag("algo.advantage.is_correction_mode", mode)
