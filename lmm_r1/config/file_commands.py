"""Every flag of the commands that work on files: `lmm-r1 merge` and `lmm-r1 check_data`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from lmm_r1.config.declared import Below, Needs, Positional, Within, check_needs, check_ranges
from lmm_r1.config.ppo import PPODataConfig, PPODeepSpeedConfig
from lmm_r1.config.shared import RowsConfig
from lmm_r1.errors import UserError
from lmm_r1.files.atomic import check_new_folder, check_output_file

_SIZE = re.compile(r"[1-9]\d*(\.\d+)?\s*([KMGT]i?)?B", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class MergeConfig:
    adapter: Annotated[Path | None, Needs("!checkpoint", because="one of them is merged")] = None
    """Folder of a LoRA adapter in peft's format, such as adapter/ next to a model trained with --ds.lora.rank."""
    checkpoint: Annotated[
        Path | None, Needs("base", because="it holds no name of the model that the run started from")
    ] = None
    """DeepSpeed checkpoint (pickles): the folder --ckpt.path of train_sft, or _actor or _critic in that of
    train_ppo_ray."""
    tag: Annotated[str | None, Needs("checkpoint")] = None
    """Name of the checkpoint in that folder, such as global_step20; None takes the newest."""
    base: str | None = None
    """Model that the run started from, a folder or a hub name; None takes the one named by the adapter."""
    output: Path
    """Folder to write; must not exist yet or be empty."""
    lora_alpha: Annotated[int | None, Within("[1, inf)"), Needs("checkpoint")] = None
    """--ds.lora.alpha of the run, for a DeepSpeed checkpoint with adapters; None reads it from the run's settings."""
    use_rslora: Annotated[bool, Needs("lora_alpha", because="without it, both are read from the run's settings")] = (
        False
    )
    """With --lora_alpha: the run had --ds.lora.use_rslora."""
    run_config: Annotated[Path | None, Needs("checkpoint")] = None
    """run_config.yaml of the run; None looks for it in the three folders above the checkpoint."""
    value_head_prefix: str = PPODeepSpeedConfig.value_head_prefix
    """Name of a critic's value head, if the config of the base does not name it."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of the written weights, which are merged in fp32; auto takes the base's."""
    max_shard_size: str = "5GB"
    """Largest weight file."""
    check: bool = True
    """Load the written folder and compare its logits with the unmerged model's. This needs the memory of two models in
    fp32, or three for a DeepSpeed checkpoint."""
    push_to_hub: str | None = None
    """Upload the folder to this repository on the Hugging Face Hub, OWNER/NAME."""
    private: bool = True
    """Make the repository private if it does not exist yet."""
    trust_checkpoint: Annotated[bool, Needs("checkpoint")] = False
    """Load --checkpoint even if its files hold objects that can run code."""
    trust_remote_code: bool = False
    """Run Python code that comes with the base."""


def check_merge(config: MergeConfig) -> None:
    """Raise UserError for contradictions between flags, and for an output folder that must not be written to."""
    if config.adapter is None and config.checkpoint is None:
        raise UserError("give either --adapter or --checkpoint")
    check_ranges(config)
    check_needs(config, config)
    if not _SIZE.fullmatch(config.max_shard_size):
        raise UserError(f"--max_shard_size {config.max_shard_size}: write a number and a unit, such as 5GB or 500MB")
    check_new_folder(config.output, flag="--output")
    if config.push_to_hub is not None:
        from lmm_r1.hub import check_uploadable

        check_uploadable(config.push_to_hub, flag="--push_to_hub")


Kind: TypeAlias = Literal["prompts", "preference"]
"""What rows are for: RL and SFT; DPO and reward models."""


@dataclass(frozen=True, kw_only=True)
class CheckDataConfig(RowsConfig):
    file: Positional[str]
    """Row file, folder or dataset to check, as --data.prompt_dataset and --data.dataset take it."""
    model: str | None = None
    """Model whose processor counts the tokens, a folder or a hub name; None leaves lengths unchecked."""
    kind: Kind | None = None
    """Kind of the rows; None detects it from the columns of the file."""
    chosen_key: Annotated[str | None, Needs("kind=preference|None")] = None
    """Column of a preference with the better response; None takes `chosen`."""
    rejected_key: Annotated[str | None, Needs("kind=preference|None")] = None
    """Column of a preference with the worse response; None takes `rejected`."""
    against: tuple[str, ...] = ()
    """Other row files, for example held-out ones; rows that also occur there are reported."""
    reward: tuple[str, ...] = ("math",)
    """Verifiers, functions (FILE.py:NAME) or weighted lists of them (math=1,reward.py:length=0.1) that must accept every
    row's own answer."""
    max_len: Annotated[int, Within("[1, inf)")] = PPODataConfig.max_len
    """Longest sequence of the training, in tokens."""
    max_new_tokens: Annotated[int | None, Within("[1, inf)"), Below("max_len")] = None
    """Longest response. A prompt must leave this much room in max_len; None requires one token."""
    split: str = "train"
    """Split of a dataset that has several."""
    max_rows: Annotated[int | None, Within("[1, inf)")] = None
    """Rows taken from the start of each file; None takes all."""
    output: Path | None = None
    """JSON file to write with all findings."""
    judge_workers: Annotated[int, Within("[1, inf)")] = 2
    """Processes per verifier for answers that simple rules cannot judge."""
    judge_timeout: Annotated[float, Within("(0, inf)")] = 5.0
    """Processor seconds after which judging an answer is cut off; this is also a finding."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model's checkpoint."""


def check(config: CheckDataConfig) -> None:
    """Raise UserError for contradictions between flags."""
    check_ranges(config)
    check_needs(config, config)
    if config.output is not None:
        check_output_file(config.output, flag="--output")
