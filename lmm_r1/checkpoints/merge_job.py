"""What `lmm-r1 merge` does: load what was trained, merge its adapters, write the folder, load that again and compare."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml
from transformers.utils import logging

from lmm_r1.checkpoints.merge_check import (
    LoadedWeights,
    check_written,
    difference,
    judge_merge,
    outputs_of,
    prompts_for,
)
from lmm_r1.checkpoints.merging import (
    adapter_base,
    load_with_adapter,
    merge_adapter,
    quantized_from,
    write_checkpoint,
)
from lmm_r1.checkpoints.zero_checkpoint import TrainedWeights, checkpoint_folder, load_trained, read_weights
from lmm_r1.config.merge import MergeConfig
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits import Checkpoint, LmmKit, kit_of
from lmm_r1.lmm_kits.weight_files import torch_dtype

RUN_CONFIG = "run_config.yaml"
_FOLDERS_ABOVE = 3  # that are searched for the settings of the run which wrote a checkpoint


@dataclass(frozen=True, kw_only=True, eq=False)
class Source:
    """What is merged."""

    base: str
    load: Callable[[], LoadedWeights]
    """Gives the model with its adapters, in fp32; each time a new one."""
    described: str
    against: str
    """What the written model is compared with."""


def write_merged(config: MergeConfig) -> list[str]:
    """Write the folder, and return in sentences what was merged and what difference that made.

    Raises UserError for what cannot be merged, and where the written folder does not compute what was trained.
    """
    with _quiet_transformers():
        if config.adapter is not None:
            return _write(config, _adapter_source(config, config.adapter))
        assert config.checkpoint is not None, "one of the two is required by config.merge"
        assert config.base is not None, "required beside --checkpoint"
        return _write(config, _checkpoint_source(config, config.checkpoint, base=config.base))


def _write(config: MergeConfig, source: Source) -> list[str]:
    base = Checkpoint(source.base, trust_remote_code=config.trust_remote_code)
    kit, processor = base.kit, base.processor
    dtype = torch_dtype(config.dtype, config=base.config)
    loaded = source.load()
    prompts = prompts_for(kit, processor) if config.check else []
    unmerged = outputs_of(loaded, kit, prompts)
    merge_adapter(loaded.model)
    merged = outputs_of(loaded, kit, prompts)
    said: list[str] = []

    def verify(folder: Path) -> None:
        head = None if loaded.head is None else loaded.head.to(dtype).float()
        again = _load_written(folder, kit, with_head=head is not None, trust_remote_code=config.trust_remote_code)
        written = check_written(
            folder, LoadedWeights(model=loaded.model, head=head), again=again, kit=kit, prompts=prompts
        )
        rounded = dtype != torch.float32
        found = difference(merged if rounded else written, unmerged)
        said.append(
            f"check against {source.against}: {judge_merge(found, load=source.load, kit=kit, prompts=prompts)}"
        )
        if rounded:
            name = str(dtype).removeprefix("torch.")
            said.append(f"rounding to {name} moves the outputs by up to {difference(written, merged).largest:.1e}")

    write_checkpoint(
        loaded.model,
        kit=kit,
        processor=processor,
        output=config.output,
        dtype=dtype,
        max_shard_size=config.max_shard_size,
        added=_named_head(loaded, default=config.value_head_prefix),
        verify=verify if config.check else None,
    )
    return [source.described, *said]


def _named_head(loaded: LoadedWeights, *, default: str) -> dict[str, torch.Tensor]:
    """Return a critic's value head under its name in the checkpoint, which the model's config gets to know."""
    if loaded.head is None:
        return {}
    # Imports OpenRLHF and DeepSpeed, which no other merge needs.
    from lmm_r1.models.value_model import head_name

    loaded.model.config.value_head_prefix = head_name(loaded.model.config, default=default)
    return {f"{loaded.model.config.value_head_prefix}.weight": loaded.head}


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Keep reports of layers that a value model does not have off the terminal."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def _adapter_source(config: MergeConfig, adapter: Path) -> Source:
    base = config.base or adapter_base(adapter)
    if base is None:
        raise UserError(f"--adapter {adapter}: its config names no base model; give one with --base")

    def load() -> LoadedWeights:
        return LoadedWeights(
            model=load_with_adapter(base, adapter, dtype=torch.float32, trust_remote_code=config.trust_remote_code)
        )

    described = f"merged the adapter {adapter} into {base}"
    if quantized_from(adapter) is not None:
        described += ", whose language model is rounded to 4 bits as in training"
    return Source(base=base, load=load, described=described, against="the unmerged model")


def _checkpoint_source(config: MergeConfig, checkpoint: Path, *, base: str) -> Source:
    # Told before the shards are read.
    kit_of(base, trust_remote_code=config.trust_remote_code)
    folder = checkpoint_folder(checkpoint, tag=config.tag)
    weights = read_weights(folder)
    alpha, use_rslora, where = _lora_scale(config, weights) if weights.adapted else (None, False, "")

    def load() -> LoadedWeights:
        model = load_trained(
            base,
            weights,
            lora_alpha=alpha,
            use_rslora=use_rslora,
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
    return Source(base=base, load=load, described=described, against=against)


def _lora_scale(config: MergeConfig, weights: TrainedWeights) -> tuple[int, bool, str]:
    """Return the alpha of the adapters in a checkpoint, whether they are rsLoRA's, and where that was found."""
    if config.lora_alpha is not None:
        return config.lora_alpha, config.use_rslora, "--lora_alpha"
    above = weights.folder.absolute().parents[:_FOLDERS_ABOVE]
    file = config.run_config or next((path / RUN_CONFIG for path in above if (path / RUN_CONFIG).is_file()), None)
    if file is None:
        raise UserError(
            f"--checkpoint {config.checkpoint}: holds adapters, and no {RUN_CONFIG} above it tells --ds.lora.alpha of the "
            "run; give --lora_alpha, or that file with --run_config"
        )
    try:
        lora = yaml.safe_load(file.read_text(encoding="utf-8"))["ds"]["lora"]
        # Settings from before there was rsLoRA do not name it.
        rank, alpha, use_rslora = int(lora["rank"]), int(lora["alpha"]), bool(lora.get("use_rslora"))
    except OSError as error:
        raise UserError(f"--run_config {file}: cannot be read ({error.strerror}); check the path") from error
    except (ValueError, KeyError, TypeError, yaml.YAMLError) as error:
        raise UserError(f"{file}: not the settings of a training run (no ds.lora in it); give --lora_alpha") from error
    if rank != weights.rank:
        raise UserError(
            f"{file}: is of a run with --ds.lora.rank {rank}, and the adapters of {weights.folder} have rank "
            f"{weights.rank}; give the right file with --run_config, or --lora_alpha"
        )
    return alpha, use_rslora, str(file)


def _load_written(folder: Path, kit: LmmKit, *, with_head: bool, trust_remote_code: bool) -> LoadedWeights:
    model = kit.load_model(
        str(folder), dtype=torch.float32, attn_implementation="sdpa", trust_remote_code=trust_remote_code
    ).eval()
    if not with_head:
        return LoadedWeights(model=model)
    from lmm_r1.models.value_model import drop_output_layer, stored_weight

    drop_output_layer(model)
    head = stored_weight(str(folder), name=model.config.value_head_prefix, config=model.config, required=True)
    assert head is not None, "it is required"
    return LoadedWeights(model=model, head=head.float())
