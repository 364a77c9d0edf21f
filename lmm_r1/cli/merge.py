"""Make a Hugging Face checkpoint of what was trained: `lmm-r1 merge --adapter DIR --output DIR`."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lmm_r1.cli.arguments import parse, user_errors
from lmm_r1.config.ppo import PPODeepSpeedConfig
from lmm_r1.data.atomic_folder import check_new_folder
from lmm_r1.errors import UserError

if TYPE_CHECKING:
    import torch

    from lmm_r1.lmm_kits import Checkpoint, LmmKit
    from lmm_r1.models.merge_check import LoadedWeights
    from lmm_r1.models.zero_checkpoint import TrainedWeights

PROG = "lmm-r1 merge"
DESCRIPTION = (
    "Write a checkpoint in Hugging Face format from a LoRA adapter, which is merged into its base model, or from a "
    "DeepSpeed ZeRO checkpoint. The files of a ZeRO checkpoint are pickles, which can run any code when they are read: "
    "give only those of a run that you trust."
)
RUN_CONFIG = "run_config.yaml"
_SIZE = re.compile(r"[1-9]\d*(\.\d+)?\s*([KMGT]i?)?B", re.IGNORECASE)
_FOLDERS_ABOVE = 3  # that are searched for the settings of the run which wrote a checkpoint


@dataclass(frozen=True, kw_only=True)
class MergeConfig:
    adapter: Path | None = None
    """Folder of a LoRA adapter in peft's format, such as the adapter/ beside a model trained with --ds.lora.rank."""
    checkpoint: Path | None = None
    """DeepSpeed checkpoint (pickles): the folder --ckpt.path of train_sft, _actor or _critic in that of train_ppo_ray."""
    tag: str | None = None
    """Which checkpoint in that folder, such as global_step20; None takes the newest."""
    base: str | None = None
    """Model that the run started from, a folder or a hub name; None takes the one that the adapter names."""
    output: Path
    """Folder to write; must not exist yet or be empty."""
    lora_alpha: int | None = None
    """--ds.lora.alpha of the run, where a DeepSpeed checkpoint holds adapters; None reads it from the run's settings."""
    run_config: Path | None = None
    """run_config.yaml of the run; None looks for it in the three folders above the checkpoint."""
    value_head_prefix: str = PPODeepSpeedConfig.value_head_prefix
    """Name of a critic's value head, where the config of the base names none."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of the written weights, which are merged in fp32; auto takes that of the base."""
    max_shard_size: str = "5GB"
    """Largest weight file."""
    check: bool = True
    """Load the written folder again and compare its logits with the unmerged model's; takes the memory of two models in
    fp32, and of one more where a DeepSpeed checkpoint is read."""
    push_to_hub: str | None = None
    """Upload the folder to this repository on the Hugging Face Hub, OWNER/NAME."""
    private: bool = True
    """Make that repository a private one, where it does not exist yet."""
    trust_remote_code: bool = False
    """Run Python code that the base brings along."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Source:
    """What is merged."""

    base: str
    load: Callable[[], LoadedWeights]
    """Gives the model with its adapters, in fp32; each time a new one."""
    described: str
    against: str
    """What the written model is compared with."""


def main(argv: list[str] | None = None) -> None:
    config = parse(MergeConfig, argv, prog=PROG, description=DESCRIPTION)
    with user_errors(PROG):
        _check_flags(config)
        merge(config)


def _check_flags(config: MergeConfig) -> None:
    if (config.adapter is None) == (config.checkpoint is None):
        raise UserError("give either --adapter or --checkpoint")
    if config.checkpoint is not None and config.base is None:
        raise UserError("--checkpoint needs --base, the model that the run started from")
    for flag in ("tag", "lora_alpha", "run_config"):
        if config.checkpoint is None and getattr(config, flag) is not None:
            raise UserError(f"--{flag} belongs to --checkpoint; leave it out")
    if config.lora_alpha is not None and config.lora_alpha < 1:
        raise UserError(f"--lora_alpha {config.lora_alpha}: must be at least 1")
    if not _SIZE.fullmatch(config.max_shard_size):
        raise UserError(f"--max_shard_size {config.max_shard_size}: write a number and a unit, such as 5GB or 500MB")
    check_new_folder(config.output, flag="--output")
    if config.push_to_hub is not None:
        from lmm_r1.hub import check_uploadable

        check_uploadable(config.push_to_hub, flag="--push_to_hub")


def merge(config: MergeConfig) -> None:
    """Write the folder and say what was merged, what difference that made, and what was written."""
    from lmm_r1 import cpu

    cpu.prepare_process()
    with _quiet_transformers():
        sentences = _written(config)
    for sentence in sentences:
        print(sentence)
    files = sorted(config.output.iterdir())
    size = sum(file.stat().st_size for file in files)
    print(f"{config.output}: {size / 1e6:.1f} MB in {', '.join(file.name for file in files)}")
    if config.push_to_hub is not None:
        from lmm_r1.hub import upload

        print(upload(config.output, config.push_to_hub, private=config.private, flag="--push_to_hub"))


def _written(config: MergeConfig) -> list[str]:
    """Write the folder and return what is to be said of it."""
    from lmm_r1.lmm_kits import Checkpoint
    from lmm_r1.models.merge_check import LoadedWeights, outputs_of, prompts_for
    from lmm_r1.models.merging import merge_adapter, write_checkpoint

    source = _adapter_source(config) if config.adapter is not None else _checkpoint_source(config)
    base = Checkpoint(source.base, trust_remote_code=config.trust_remote_code)
    kit, processor = base.kit, base.processor
    dtype = _output_dtype(config, base)
    loaded = source.load()
    prompts = prompts_for(kit, processor) if config.check else []
    unmerged = outputs_of(loaded, kit, prompts)
    merge_adapter(loaded.model)
    merged = outputs_of(loaded, kit, prompts)
    said: list[str] = []

    def verify(folder: Path) -> None:
        from lmm_r1.models.merge_check import check_written, difference, judge_merge

        head = None if loaded.head is None else loaded.head.to(dtype).float()
        again = _load_written(folder, kit, with_head=head is not None, trust_remote_code=config.trust_remote_code)
        written = check_written(
            folder, LoadedWeights(model=loaded.model, head=head), again=again, kit=kit, prompts=prompts
        )
        rounded = str(dtype) != "torch.float32"
        found = difference(merged if rounded else written, unmerged)
        said.append(
            f"check against {source.against}: {judge_merge(found, load=source.load, kit=kit, prompts=prompts)}"
        )
        if rounded:
            name = str(dtype).removeprefix("torch.")
            said.append(f"rounding to {name} moves the outputs by up to {difference(written, merged).largest:.1e}")

    added = {}
    if loaded.head is not None:
        from lmm_r1.models.value_head import head_name

        loaded.model.config.value_head_prefix = head_name(loaded.model.config, default=config.value_head_prefix)
        added[f"{loaded.model.config.value_head_prefix}.weight"] = loaded.head
    write_checkpoint(
        loaded.model,
        kit=kit,
        processor=processor,
        output=config.output,
        dtype=dtype,
        max_shard_size=config.max_shard_size,
        added=added,
        verify=verify if config.check else None,
    )
    return [source.described, *said]


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Keep bars of progress, and reports of layers that a value model does not have, off the terminal."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _adapter_source(config: MergeConfig) -> Source:
    import torch

    from lmm_r1.models.merge_check import LoadedWeights
    from lmm_r1.models.merging import adapter_base, load_with_adapter

    adapter = config.adapter
    base = config.base or adapter_base(adapter)
    if base is None:
        raise UserError(f"--adapter {adapter}: its config names no base model; give one with --base")

    def load() -> LoadedWeights:
        return LoadedWeights(
            model=load_with_adapter(base, adapter, dtype=torch.float32, trust_remote_code=config.trust_remote_code)
        )

    return Source(
        base=base, load=load, described=f"merged the adapter {adapter} into {base}", against="the unmerged model"
    )


def _checkpoint_source(config: MergeConfig) -> Source:
    import torch

    from lmm_r1.lmm_kits import kit_of
    from lmm_r1.models.merge_check import LoadedWeights
    from lmm_r1.models.zero_checkpoint import checkpoint_folder, load_trained, read_weights

    # Told before the shards are read.
    kit_of(config.base, trust_remote_code=config.trust_remote_code)
    folder = checkpoint_folder(config.checkpoint, tag=config.tag)
    weights = read_weights(folder)
    alpha, where = _lora_alpha(config, weights) if weights.adapted else (None, "")

    def load() -> LoadedWeights:
        model = load_trained(
            config.base,
            weights,
            lora_alpha=alpha,
            dtype=torch.float32,
            trust_remote_code=config.trust_remote_code,
        )
        return LoadedWeights(model=model, head=None if weights.head is None else weights.head.float())

    described = f"gathered the weights of {folder}" + (" and its value head" if weights.head is not None else "")
    if weights.adapted:
        described += (
            f" and merged adapters of {len(weights.adapted)} layers: rank {weights.rank}, alpha {alpha} ({where})"
        )
    against = "the unmerged model" if weights.adapted else "the gathered weights"
    return Source(base=config.base, load=load, described=described, against=against)


def _lora_alpha(config: MergeConfig, weights: TrainedWeights) -> tuple[int, str]:
    """Return the alpha of the adapters in a checkpoint, and where it was found."""
    if config.lora_alpha is not None:
        return config.lora_alpha, "--lora_alpha"
    above = weights.folder.absolute().parents[:_FOLDERS_ABOVE]
    file = config.run_config or next((path / RUN_CONFIG for path in above if (path / RUN_CONFIG).is_file()), None)
    if file is None:
        raise UserError(
            f"--checkpoint {config.checkpoint}: holds adapters, and no {RUN_CONFIG} above it tells --ds.lora.alpha of the "
            "run; give --lora_alpha, or that file with --run_config"
        )
    import yaml

    try:
        lora = yaml.safe_load(file.read_text(encoding="utf-8"))["ds"]["lora"]
        rank, alpha = int(lora["rank"]), int(lora["alpha"])
    except OSError as error:
        raise UserError(f"--run_config {file}: cannot be read ({error.strerror}); check the path") from error
    except (ValueError, KeyError, TypeError, yaml.YAMLError) as error:
        raise UserError(f"{file}: not the settings of a training run (no ds.lora in it); give --lora_alpha") from error
    if rank != weights.rank:
        raise UserError(
            f"{file}: is of a run with --ds.lora.rank {rank}, and the adapters of {weights.folder} have rank "
            f"{weights.rank}; give the right file with --run_config, or --lora_alpha"
        )
    return alpha, str(file)


def _output_dtype(config: MergeConfig, base: Checkpoint) -> torch.dtype:
    import torch

    if config.dtype != "auto":
        return getattr(torch, config.dtype)
    dtype = base.config.dtype or base.config.get_text_config().dtype or torch.float32
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype


def _load_written(folder: Path, kit: LmmKit, *, with_head: bool, trust_remote_code: bool) -> LoadedWeights:
    import torch

    from lmm_r1.models.merge_check import LoadedWeights

    model = kit.load_model(
        str(folder), dtype=torch.float32, attn_implementation="sdpa", trust_remote_code=trust_remote_code
    ).eval()
    if not with_head:
        return LoadedWeights(model=model)
    from lmm_r1.models.value_head import stored_weight
    from lmm_r1.models.value_model import drop_output_layer

    drop_output_layer(model)
    head = stored_weight(str(folder), name=model.config.value_head_prefix, config=model.config, required=True)
    return LoadedWeights(model=model, head=head.float())


if __name__ == "__main__":
    main()
