"""Flags whose defaults deliberately differ from OpenRLHF's, and flags of OpenRLHF that have one value here."""

from collections.abc import Container
from dataclasses import dataclass
from typing import Literal

from lmm_r1 import dotted


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A flag whose default is not OpenRLHF's."""

    command: Literal["train_ppo_ray", "train_sft", "train_dpo", "train_rm"]
    flag: str
    theirs: object
    """OpenRLHF's default; ours is at the field."""
    reason: str
    teaches: bool = False
    """Whether it changes training, and not only file locations, speed or precision."""


_ATTENTION = "flash-attn is often not installed; auto uses it if it is"
_OWN_CHECKPOINTS = "each run has its own checkpoints, by default in its output_dir"
_RESUMES = "the same command in the same folder resumes"
_COUNTS = "the GPUs of the machine or cluster"
_PARAM_DTYPE = "bf16, or fp32 on a CPU without bf16 instructions"
_INPUT_KEY = "`message` or `messages`, whichever the rows have"
_ACCUMULATION = "half precision loses small gradients over many passes; OpenRLHF leaves it to DeepSpeed"
_LIGER = "the same results with fewer kernels, on GPUs that support them"

_BATCH = "a fifth of the rows, at most 128: five steps or more per pass over them"
_MICRO_BATCH = "8, or a divisor of a GPU's share of an update"
_OUTPUT = "runs/ and the stage's name, so stages do not share a folder"

_TEACHING = ("data.max_len", "train.batch_size")


def _of_pairs(command: Literal["train_dpo", "train_rm"], *, checkpoints: str) -> tuple[Difference, ...]:
    """Differences of a command that trains on pairs of responses."""
    theirs: dict[str, tuple[object, str]] = {
        "ckpt.path": (checkpoints, _OWN_CHECKPOINTS),
        "ckpt.load_enable": (False, _RESUMES),
        "ckpt.output_dir": ("./ckpt", _OUTPUT),
        "data.max_len": (512, "one image has hundreds of tokens; as in SFT and RL"),
        "ds.attn_implementation": ("flash_attention_2", _ATTENTION),
        "ds.grad_accum_dtype": (None, _ACCUMULATION),
        "ds.param_dtype": ("bf16", _PARAM_DTYPE),
        "train.batch_size": (128, _BATCH),
        # Of train_rm ours is OpenRLHF's.
        **({"train.micro_batch_size": (8, _MICRO_BATCH)} if command == "train_dpo" else {}),
        # train_rm of OpenRLHF has no such flag.
        **({"ds.use_liger_kernel": (False, _LIGER)} if command == "train_dpo" else {}),
    }
    return tuple(
        Difference(command=command, flag=flag, theirs=value, reason=reason, teaches=flag in _TEACHING)
        for flag, (value, reason) in theirs.items()
    )


DIFFERENCES = (
    Difference(
        command="train_ppo_ray",
        flag="algo.advantage.estimator",
        theirs="gae",
        reason="LMM-R1's recipe; it needs no critic",
        teaches=True,
    ),
    Difference(command="train_ppo_ray", flag="data.input_key", theirs="input", reason=_INPUT_KEY),
    Difference(command="train_ppo_ray", flag="ds.attn_implementation", theirs="flash_attention_2", reason=_ATTENTION),
    Difference(command="train_ppo_ray", flag="ds.grad_accum_dtype", theirs=None, reason=_ACCUMULATION),
    Difference(
        command="train_ppo_ray", flag="ckpt.path", theirs="./ckpt/checkpoints_ppo_ray", reason=_OWN_CHECKPOINTS
    ),
    Difference(command="train_ppo_ray", flag="ckpt.output_dir", theirs="./ckpt", reason=_OUTPUT),
    Difference(
        command="train_ppo_ray",
        flag="rollout.batch_size",
        theirs=1024,
        reason="a fifth of the prompts, at most 1024: five steps or more per pass over them",
        teaches=True,
    ),
    Difference(
        command="train_ppo_ray",
        flag="rollout.n_samples_per_prompt",
        theirs=1,
        reason="8 if the estimator compares the responses to one prompt, otherwise 1",
        teaches=True,
    ),
    Difference(
        command="train_ppo_ray",
        flag="train.batch_size",
        theirs=128,
        reason="all samples of a step, at most 128",
        teaches=True,
    ),
    Difference(command="train_ppo_ray", flag="ckpt.load_enable", theirs=False, reason=_RESUMES),
    Difference(command="train_ppo_ray", flag="ds.param_dtype", theirs="bf16", reason=_PARAM_DTYPE),
    Difference(command="train_ppo_ray", flag="ds.use_liger_kernel", theirs=False, reason=_LIGER),
    *(
        Difference(command="train_ppo_ray", flag=f"{model}.{flag}", theirs=theirs, reason=_COUNTS)
        for model in ("actor", "ref", "critic", "reward")
        for flag, theirs in (("num_nodes", 1), ("num_gpus_per_node", 8))
    ),
    Difference(command="train_sft", flag="ckpt.path", theirs="./ckpt/checkpoints_sft", reason=_OWN_CHECKPOINTS),
    Difference(command="train_sft", flag="ckpt.output_dir", theirs="./ckpt", reason=_OUTPUT),
    Difference(command="train_sft", flag="train.batch_size", theirs=128, reason=_BATCH, teaches=True),
    Difference(command="train_sft", flag="train.micro_batch_size", theirs=8, reason=_MICRO_BATCH),
    Difference(command="train_sft", flag="ckpt.load_enable", theirs=False, reason=_RESUMES),
    Difference(command="train_sft", flag="data.input_key", theirs="input", reason=_INPUT_KEY),
    Difference(
        command="train_sft",
        flag="data.multiturn",
        theirs=False,
        reason="rows are conversations, and the loss covers every assistant turn",
        teaches=True,
    ),
    Difference(command="train_sft", flag="ds.attn_implementation", theirs="flash_attention_2", reason=_ATTENTION),
    Difference(command="train_sft", flag="ds.grad_accum_dtype", theirs=None, reason=_ACCUMULATION),
    Difference(command="train_sft", flag="ds.param_dtype", theirs="bf16", reason=_PARAM_DTYPE),
    Difference(command="train_sft", flag="ds.use_liger_kernel", theirs=False, reason=_LIGER),
    *_of_pairs("train_dpo", checkpoints="./ckpt/checkpoints_dpo"),
    *_of_pairs("train_rm", checkpoints="./ckpt/checkpoints_rm"),
)


def differences_line(command: str, config: object, *, given: Container[str]) -> str | None:
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
        and dotted.get(config, one.flag) != one.theirs
    ]
    if not listed:
        return None
    return f"defaults that are not OpenRLHF's: {', '.join(listed)}; docs/migrating.md says why, and lists all"


@dataclass(frozen=True)
class OnlyDefault:
    """A flag of OpenRLHF whose default is the only value that works here, so that no config has it as a field."""

    value: str | int | bool
    """OpenRLHF's default. A command line or file that sets it is accepted."""
    instead: str
    """What to do instead of setting another value."""
    next_to: str
    """A flag of the commands that accept this one."""

    def refusal(self, given: str) -> str:
        return f"{given} is not available in this version; {self.instead}"


ONLY_DEFAULTS = {
    "data.disable_fast_tokenizer": OnlyDefault(
        False, "leave it out: transformers 5 has one tokenizer for each of these models", "data.apply_chat_template"
    ),
    "ds.ring_attn_head_stride": OnlyDefault(1, "take --ds.ulysses_size to split long sequences", "ds.ulysses_size"),
    "ds.ring_attn_size": OnlyDefault(1, "take --ds.ulysses_size", "ds.ulysses_size"),
    "model.compute_fp32_loss_enable": OnlyDefault(
        False, "leave it out: rewards and their loss are always in single precision", "model.margin_loss_enable"
    ),
    "use_ms": OnlyDefault(False, "leave it out: models come from the Hugging Face hub", "ckpt.save_hf"),
    "vllm.sync_backend": OnlyDefault("nccl", "leave it out, or take --vllm.sync_with_ray", "vllm.sync_with_ray"),
}


def only_defaults(flags: Container[str]) -> dict[str, OnlyDefault]:
    """Return those of ONLY_DEFAULTS that a command with these flags accepts."""
    return {name: known for name, known in ONLY_DEFAULTS.items() if known.next_to in flags}
