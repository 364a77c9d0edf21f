"""Flags whose defaults deliberately differ from OpenRLHF's, and flags of OpenRLHF that have one value here."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import TypeAlias

# Flags whose defaults change training, and not only file locations, speed or precision.
TRAINING_FLAGS = tuple(
    "actor.adam.lr adam.lr algo.advantage.estimator critic.adam.lr data.max_len data.multiturn ds.lora.alpha "
    "rollout.batch_size rollout.n_samples_per_prompt train.batch_size".split()
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


@dataclass(frozen=True)
class OnlyDefault:
    """A flag of OpenRLHF, or of an earlier version, that is accepted with its default only."""

    value: str | int | float | bool | None
    """OpenRLHF's default. A command line or file that sets it is accepted."""
    next_to: str
    """A flag of the commands that accept this one."""
    instead: str = "leave it out"
    """What to do instead of setting another value."""

    @property
    def kind(self) -> object:
        """The type of its value."""
        return str | None if self.value is None else type(self.value)

    def refusal(self, given: str) -> str:
        return f"{given} is not available in this version; {self.instead}"


_OWN_TURNS = "set it in an environment's TurnOptions"
ONLY_DEFAULTS = {
    "actor.muon.momentum": OnlyDefault(0.95, "actor.muon.lr"),
    "agent.overturn_penalty": OnlyDefault(1.0, "agent.overturn", "scale the environment's rewards"),
    "agent.prefix_caching": OnlyDefault(True, "agent.max_turns", "take --vllm.no_enable_prefix_caching"),
    "agent.thought.continue_with": OnlyDefault("Wait", "agent.thought.max_tokens", _OWN_TURNS),
    "agent.thought.end": OnlyDefault("</think>", "agent.thought.max_tokens", _OWN_TURNS),
    "agent.thought.min_tokens": OnlyDefault(None, "agent.thought.max_tokens", _OWN_TURNS),
    "critic.adam.eps": OnlyDefault(1e-8, "critic.adam.lr"),
    "critic.adam.vision_lr": OnlyDefault(None, "critic.adam.lr", "--critic.adam.lr is for all weights"),
    "critic.min_lr_ratio": OnlyDefault(0.1, "critic.adam.lr"),
    "critic.muon.lr": OnlyDefault(0.02, "critic.adam.lr"),
    "critic.muon.momentum": OnlyDefault(0.95, "critic.adam.lr"),
    "data.allow_private_urls": OnlyDefault(False, "data.max_len", "set LMM_R1_ALLOW_PRIVATE_URLS=1"),
    "data.dataloader_num_workers": OnlyDefault(0, "data.prompt_dataset", "all rows are read before the first step"),
    "data.disable_fast_tokenizer": OnlyDefault(False, "data.apply_chat_template", "each model has one tokenizer"),
    "data.max_image_megapixels": OnlyDefault(64.0, "data.max_len", "set LMM_R1_MAX_IMAGE_MEGAPIXELS"),
    "ds.deepcompile": OnlyDefault(False, "ds.zero_stage", "DeepCompile is not supported"),
    "ds.image_cache_gib": OnlyDefault(2.0, "ds.zero_stage"),
    "ds.ring_attn_head_stride": OnlyDefault(1, "ds.ulysses_size", "take --ds.ulysses_size"),
    "ds.ring_attn_size": OnlyDefault(1, "ds.ulysses_size", "take --ds.ulysses_size"),
    "ds.use_universal_ckpt": OnlyDefault(False, "ds.zero_stage", "runs resume on other numbers of GPUs"),
    "local_rank": OnlyDefault(-1, "data.prompt_dataset", "Ray starts the workers"),
    "logger.wandb.mode": OnlyDefault(None, "logger.wandb.group", "set WANDB_MODE"),
    "logger.worker_logs": OnlyDefault(False, "data.prompt_dataset", "set LMM_R1_VERBOSE=1"),
    "model.compute_fp32_loss_enable": OnlyDefault(False, "model.margin_loss_enable", "rewards are in fp32"),
    "muon.momentum": OnlyDefault(0.95, "muon.lr"),
    "rollout.oversample_max_held": OnlyDefault(1, "rollout.top_k"),
    "use_ms": OnlyDefault(False, "ckpt.save_hf", "models come from the Hugging Face hub"),
    "vllm.speculative_method": OnlyDefault("ngram", "vllm.speculative_tokens"),
    "vllm.sync_backend": OnlyDefault("nccl", "vllm.sync_with_ray", "take --vllm.sync_with_ray"),
    **{
        f"{owner}muon.{name}": OnlyDefault(value, next_to)
        for owner, next_to in (("", "muon.lr"), ("actor.", "actor.muon.lr"), ("critic.", "critic.adam.lr"))
        for name, value in (("ns_steps", 5), ("nesterov", True))
    },
    "algo.advantage.pass_k": OnlyDefault(
        4, "algo.advantage.gamma", "write the estimator into a file: docs/extending.md"
    ),
    "ckpt.max_restarts": OnlyDefault(0, "data.prompt_dataset", "repeat the command after a failure: it resumes"),
    "eval.max_new_tokens": OnlyDefault(1024, "data.multiturn"),
    "eval.reward": OnlyDefault(None, "data.multiturn", "measure answers with lmm-r1 evaluate"),
    "ref.during_generation": OnlyDefault(False, "ref.num_nodes", "the reference runs after generation"),
    "ref.refresh_steps": OnlyDefault(0, "ref.num_nodes", "start another run from the trained model"),
    "rollout.max_new_tokens": OnlyDefault(1024, "teacher.offload"),
    "rollout.on_policy_share": OnlyDefault(0.0, "teacher.offload", "sample in rounds with lmm-r1 batch_inference"),
    "rollout.oversample": OnlyDefault(
        1.0, "rollout.top_k", "take --train.async_enable with --train.partial_rollout_enable"
    ),
    "rollout.temperature": OnlyDefault(1.0, "teacher.offload"),
    "rollout.top_p": OnlyDefault(1.0, "teacher.offload"),
    "vllm.enforce_eager": OnlyDefault(None, "teacher.offload"),
    "vllm.gpu_memory_utilization": OnlyDefault(None, "teacher.offload"),
}


def only_defaults(flags: Container[str]) -> dict[str, OnlyDefault]:
    """Return those of ONLY_DEFAULTS that a command with these flags accepts."""
    return {name: known for name, known in ONLY_DEFAULTS.items() if known.next_to in flags}
