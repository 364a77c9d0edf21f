"""Flags whose defaults deliberately differ from OpenRLHF's, and flags of OpenRLHF that have one value here."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from lmm_r1 import dotted
from lmm_r1.config.declared import has_effect

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

# Flags whose defaults change training, and not only file locations, speed or precision.
TRAINING_FLAGS = (
    "actor.adam.lr",
    "adam.lr",
    "algo.advantage.estimator",
    "critic.adam.lr",
    "data.max_len",
    "data.multiturn",
    "ds.lora.alpha",
    "rollout.batch_size",
    "rollout.n_samples_per_prompt",
    "train.batch_size",
)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A flag whose default is not OpenRLHF's."""

    command: str
    flag: str
    theirs: object
    """OpenRLHF's default; ours is at the field."""
    reason: str

    @property
    def teaches(self) -> bool:
        """Whether it changes training."""
        return self.flag in TRAINING_FLAGS


_Table: TypeAlias = Mapping[str, tuple[object, str]]
_ALL: _Table = {
    "ckpt.output_dir": ("./ckpt", "runs/ and the stage's name, so stages do not share a folder"),
    "ckpt.load_enable": (False, "the same command in the same folder resumes"),
    "ds.attn_implementation": ("flash_attention_2", "flash-attn is often not installed; auto uses it if it is"),
    "ds.grad_accum_dtype": (
        None,
        "half precision loses small gradients over many passes; OpenRLHF leaves it to DeepSpeed",
    ),
    "ds.lora.alpha": (16, "twice the rank"),
    "ds.param_dtype": ("bf16", "bf16, or fp32 on a CPU without bf16 instructions"),
}
_LIGER: _Table = {"ds.use_liger_kernel": (False, "the same results with fewer kernels, on GPUs that support them")}
_INPUT_KEY: _Table = {"data.input_key": ("input", "`message` or `messages`, whichever the rows have")}
_BATCH: _Table = {"train.batch_size": (128, "a fifth of the rows, at most 128: five steps or more per pass over them")}
_MICRO_BATCH: _Table = {"train.micro_batch_size": (8, "8, or a divisor of a GPU's share of an update")}
_RATE = "with LoRA ten times that"
_COUNTS = "the GPUs of the machine or cluster"


def _path(theirs: str) -> _Table:
    return {"ckpt.path": (theirs, "each run has its own checkpoints, by default in its output_dir")}


_PPO: _Table = {
    "actor.adam.lr": (1e-6, _RATE),
    "critic.adam.lr": (9e-6, _RATE),
    "algo.advantage.estimator": ("gae", "LMM-R1's recipe; it needs no critic"),
    "rollout.batch_size": (1024, "a fifth of the prompts, at most 1024: five steps or more per pass over them"),
    "rollout.n_samples_per_prompt": (1, "8 if the estimator compares the responses to one prompt, otherwise 1"),
    "train.batch_size": (128, "all samples of a step, at most 128"),
    **{
        f"{model}.{flag}": (theirs, _COUNTS)
        for model in ("actor", "ref", "critic", "reward")
        for flag, theirs in (("num_nodes", 1), ("num_gpus_per_node", 8))
    },
}
_SFT: _Table = {
    **_BATCH,
    "data.multiturn": (False, "rows are conversations, and the loss covers every assistant turn"),
    **_MICRO_BATCH,
    "adam.lr": (5e-6, _RATE),
}
_PAIRS: _Table = {"data.max_len": (512, "one image has hundreds of tokens; as in SFT and RL"), **_BATCH}
_COMMANDS: Mapping[str, _Table] = {
    "train_ppo_ray": {**_PPO, **_ALL, **_LIGER, **_INPUT_KEY, **_path("./ckpt/checkpoints_ppo_ray")},
    "train_sft": {**_SFT, **_ALL, **_LIGER, **_INPUT_KEY, **_path("./ckpt/checkpoints_sft")},
    "train_dpo": {
        **_PAIRS,
        **_MICRO_BATCH,
        **_ALL,
        **_LIGER,
        **_path("./ckpt/checkpoints_dpo"),
        "adam.lr": (1e-5, _RATE),
    },
    # OpenRLHF's train_rm has no flag for Liger's kernels, and the same micro-batch.
    "train_rm": {**_PAIRS, **_ALL, **_path("./ckpt/checkpoints_rm"), "adam.lr": (9e-6, _RATE)},
}
DIFFERENCES = tuple(
    Difference(command=command, flag=flag, theirs=theirs, reason=reason)
    for command, table in _COMMANDS.items()
    for flag, (theirs, reason) in table.items()
)


def differences_line(command: str, config: DataclassInstance, *, given: Container[str]) -> str | None:
    """Return a line with the defaults by which training differs from OpenRLHF's; None without any.

    Args:
        config: the run's settings.
        given: the flags that are set.
    """
    listed = [
        f"--{one.flag} {dotted.get(config, one.flag) or 'as many as the rows allow'} ({one.theirs} there)"
        for one in DIFFERENCES
        if one.teaches and one.command == command and one.flag not in given
        # One of those that follow from other flags may be OpenRLHF's all the same.
        and dotted.get(config, one.flag) != one.theirs and has_effect(one.flag, config)
    ]
    if not listed:
        return None
    return f"defaults that are not OpenRLHF's: {', '.join(listed)}; docs/migrating.md says why, and lists all"


@dataclass(frozen=True)
class OnlyDefault:
    """A flag of OpenRLHF, or of an earlier version, that is accepted with its default only."""

    value: str | int | float | bool | None
    """OpenRLHF's default. A command line or file that sets it is accepted."""
    instead: str
    """What to do instead of setting another value."""
    next_to: str
    """A flag of the commands that accept this one."""

    @property
    def kind(self) -> object:
        """The type of its value."""
        return str | None if self.value is None else type(self.value)

    def refusal(self, given: str) -> str:
        return f"{given} is not available in this version; {self.instead}"


ONLY_DEFAULTS = {
    "data.dataloader_num_workers": OnlyDefault(
        0, "leave it out: in RL all rows are read before the first step", "data.prompt_dataset"
    ),
    "data.disable_fast_tokenizer": OnlyDefault(
        False, "leave it out: transformers 5 has one tokenizer for each of these models", "data.apply_chat_template"
    ),
    "ds.ring_attn_head_stride": OnlyDefault(1, "take --ds.ulysses_size to split long sequences", "ds.ulysses_size"),
    "ds.ring_attn_size": OnlyDefault(1, "take --ds.ulysses_size", "ds.ulysses_size"),
    "model.compute_fp32_loss_enable": OnlyDefault(
        False, "leave it out: rewards and their loss are always in single precision", "model.margin_loss_enable"
    ),
    **{
        f"{owner}muon.{name}": OnlyDefault(value, "leave it out: DeepSpeed's Muon has no setting for it", next_to)
        for owner, next_to in (("", "muon.lr"), ("actor.", "actor.muon.lr"), ("critic.", "critic.adam.lr"))
        for name, value in (("ns_steps", 5), ("nesterov", True))
    },
    **{
        flag: OnlyDefault(value, instead, next_to)
        for flag, value, instead, next_to in (
            ("muon.momentum", 0.95, "leave it out", "muon.lr"),
            ("algo.advantage.pass_k", 4, "write the estimator into a file: docs/extending.md", "algo.advantage.gamma"),
            ("actor.muon.momentum", 0.95, "leave it out", "actor.muon.lr"),
            ("agent.overturn_penalty", 1.0, "leave it out, or scale the environment's rewards", "agent.overturn"),
            ("agent.prefix_caching", True, "take --vllm.no_enable_prefix_caching", "agent.max_turns"),
            ("agent.thought.end", "</think>", "set it in an environment's TurnOptions", "agent.thought.max_tokens"),
            (
                "agent.thought.continue_with",
                "Wait",
                "set it in an environment's TurnOptions",
                "agent.thought.max_tokens",
            ),
            ("agent.thought.min_tokens", None, "set it in an environment's TurnOptions", "agent.thought.max_tokens"),
            ("ckpt.max_restarts", 0, "repeat the command after a failure: it resumes", "data.prompt_dataset"),
            ("critic.adam.eps", 1e-8, "leave it out", "critic.adam.lr"),
            ("critic.adam.vision_lr", None, "leave it out: --critic.adam.lr is for all weights", "critic.adam.lr"),
            ("critic.min_lr_ratio", 0.1, "leave it out", "critic.adam.lr"),
            ("critic.muon.lr", 0.02, "leave it out", "critic.adam.lr"),
            ("critic.muon.momentum", 0.95, "leave it out", "critic.adam.lr"),
            ("data.allow_private_urls", False, "set LMM_R1_ALLOW_PRIVATE_URLS=1", "data.max_len"),
            ("data.max_image_megapixels", 64.0, "set LMM_R1_MAX_IMAGE_MEGAPIXELS", "data.max_len"),
            ("ds.image_cache_gib", 2.0, "leave it out", "ds.zero_stage"),
            ("ds.use_universal_ckpt", False, "leave it out: runs resume on other numbers of GPUs", "ds.zero_stage"),
            ("ds.deepcompile", False, "leave it out: DeepCompile is not supported", "ds.zero_stage"),
            ("eval.max_new_tokens", 1024, "leave it out", "data.multiturn"),
            ("eval.reward", None, "measure answers with lmm-r1 evaluate", "data.multiturn"),
            ("local_rank", -1, "leave it out: Ray starts the workers", "data.prompt_dataset"),
            ("logger.wandb.mode", None, "set WANDB_MODE", "logger.wandb.group"),
            ("logger.worker_logs", False, "set LMM_R1_VERBOSE=1", "data.prompt_dataset"),
            ("ref.during_generation", False, "leave it out: the reference runs after generation", "ref.num_nodes"),
            (
                "ref.refresh_steps",
                0,
                "start another run from the trained model, which is then the reference",
                "ref.num_nodes",
            ),
            ("rollout.on_policy_share", 0.0, "sample in rounds with lmm-r1 batch_inference", "teacher.offload"),
            ("rollout.max_new_tokens", 1024, "leave it out", "teacher.offload"),
            ("rollout.temperature", 1.0, "leave it out", "teacher.offload"),
            ("rollout.top_p", 1.0, "leave it out", "teacher.offload"),
            (
                "rollout.oversample",
                1.0,
                "take --train.async_enable with --train.partial_rollout_enable",
                "rollout.top_k",
            ),
            ("rollout.oversample_max_held", 1, "leave it out", "rollout.top_k"),
            ("vllm.enforce_eager", None, "leave it out", "teacher.offload"),
            ("vllm.gpu_memory_utilization", None, "leave it out", "teacher.offload"),
            ("vllm.speculative_method", "ngram", "leave it out", "vllm.speculative_tokens"),
        )
    },
    "use_ms": OnlyDefault(False, "leave it out: models come from the Hugging Face hub", "ckpt.save_hf"),
    "vllm.sync_backend": OnlyDefault("nccl", "leave it out, or take --vllm.sync_with_ray", "vllm.sync_with_ray"),
}


def only_defaults(flags: Container[str]) -> dict[str, OnlyDefault]:
    """Return those of ONLY_DEFAULTS that a command with these flags accepts."""
    return {name: known for name, known in ONLY_DEFAULTS.items() if known.next_to in flags}
