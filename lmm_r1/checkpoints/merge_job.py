"""What `lmm-r1 merge` does: load what was trained, merge its adapters, write the folder, load that again and compare."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from PIL import Image
from transformers import PreTrainedModel
from transformers.utils import logging

from lmm_r1.checkpoints.merging import (
    TrainedWeights,
    adapter_base,
    checkpoint_folder,
    listed,
    load_trained,
    load_with_adapter,
    merge_adapter,
    quantized_from,
    read_weights,
    write_checkpoint,
)
from lmm_r1.config.evaluate import MergeConfig
from lmm_r1.data.messages import ImagePart, Message, TextPart
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits import Checkpoint, EncodedPrompt, LmmKit, kit_of
from lmm_r1.lmm_kits.checkpoint import torch_dtype

LIMIT = 1e-5
"""Largest difference of outputs of equal weights in single precision, as a share of the largest one."""
MERGE_LIMIT = 1e-4
"""The same of a merged and an adapted model, which add up the same numbers in another order."""
_SIDE = 84  # of the drawn image, in pixels

Outputs = list[torch.Tensor]
"""Logits (T, V) of each prompt, or values (T, 1) of a critic."""


@dataclass(frozen=True, kw_only=True)
class MergeDifference:
    """The largest difference of two outputs, and their largest absolute value."""

    largest: float
    scale: float

    def within(self, limit: float) -> bool:
        """Return whether the difference is at most `limit`, or that share of the largest value if it is above 1."""
        return self.largest <= limit * max(1.0, self.scale)


@dataclass(frozen=True, kw_only=True, eq=False)
class LoadedWeights:
    """A model, and the value head (1, H) of a critic."""

    model: PreTrainedModel
    head: torch.Tensor | None = None


def prompts_for(kit: LmmKit, processor: Any) -> list[EncodedPrompt]:
    """Return a text prompt, and one with an image if the kit takes images."""
    text = TextPart(text="What is 12 + 34? Think first, and then say what you found.")
    messages: list[tuple[Message, list[Image.Image]]] = [(Message(role="user", parts=(text,)), [])]
    if kit.takes_images:
        image = Image.linear_gradient("L").resize((_SIDE, _SIDE)).convert("RGB")
        question = TextPart(text="What does the picture show?")
        messages.append((Message(role="user", parts=(ImagePart(source=image), question)), [image]))
    return [
        kit.encode(processor, [message], images=images, videos=[], add_generation_prompt=True)
        for message, images in messages
    ]


@torch.no_grad()
def outputs_of(loaded: LoadedWeights, kit: LmmKit, prompts: Sequence[EncodedPrompt]) -> Outputs:
    """Return what the model computes of the prompts, one after the other, in its own precision."""
    model, found = loaded.model, []
    for prompt in prompts:
        sequences = torch.tensor([prompt.token_ids])
        mask = torch.ones_like(sequences)
        media = None if prompt.media is None else kit.merge_media([prompt.media])
        if media is not None:
            media = {key: data.to(model.dtype) if data.is_floating_point() else data for key, data in media.items()}
        inputs = kit.forward_inputs(model.config, sequences, mask, media)
        inputs |= {"input_ids": sequences, "attention_mask": mask}
        if loaded.head is None:
            found.append(model(**inputs, use_cache=False).logits[0])
        else:
            hidden = kit.backbone_of(model)(**inputs, use_cache=False).last_hidden_state[0]
            found.append(hidden @ loaded.head.to(hidden.dtype).T)
    return found


def difference(one: Outputs, other: Outputs) -> MergeDifference:
    """Return how far two outputs for the same prompts are apart."""
    pairs = list(zip(one, other, strict=True))
    return MergeDifference(
        largest=max(float((a - b).abs().max()) for a, b in pairs), scale=max(float(a.abs().max()) for a, _ in pairs)
    )


def judge_merge(found: MergeDifference) -> str:
    """Return a few words about the difference that merging made; raises UserError if it is more than rounding."""
    said = f"largest difference {found.largest:.1e} in fp32, of values up to {found.scale:.1f}"
    if not found.within(MERGE_LIMIT):
        raise UserError(
            f"the merged model is not the adapted one: {said}; report this, or skip the check by --no_check"
        )
    return said


def check_written(
    folder: Path, loaded: LoadedWeights, *, again: LoadedWeights, kit: LmmKit, prompts: Sequence[EncodedPrompt]
) -> Outputs:
    """Return what a written folder computes; raises UserError unless it is what the model in memory computes.

    Args:
        loaded: the model as it was written, which is left in fp32.
        again: what was loaded from the folder, in fp32.
    """
    loaded.model.float()
    own, stored = loaded.model.state_dict(), again.model.state_dict()
    changed = [name for name in own if name not in stored or not torch.equal(own[name], stored[name])]
    if changed or len(own) != len(stored):
        raise UserError(f"{folder}: loaded again, other weights than were written come back ({listed(changed)})")
    expected, found = outputs_of(loaded, kit, prompts), outputs_of(again, kit, prompts)
    apart = difference(expected, found)
    if not apart.within(LIMIT):
        raise UserError(
            f"{folder}: loaded again, the same weights compute other outputs, by up to {apart.largest:.1e}; "
            "the config of the base model is not kept by transformers"
        )
    return found


RUN_CONFIG = "run_config.yaml"
_FOLDERS_ABOVE = 3  # that are searched for the settings of the run which wrote a checkpoint


@dataclass(frozen=True, kw_only=True, eq=False)
class MergeSource:
    """The settings of a merge."""

    base: str
    loaded: LoadedWeights
    """The model with its adapters, in fp32."""
    described: str
    against: str
    """What the written model is compared with."""


def write_merged(config: MergeConfig) -> list[str]:
    """Write the folder, and return in sentences what was merged and what difference that made.

    Raises UserError for what cannot be merged, and if the written folder does not compute what was trained.
    """
    with _quiet_transformers():
        if config.adapter is not None:
            return _write(config, _adapter_source(config, config.adapter))
        assert config.checkpoint is not None, "one of the two is required by config.merge"
        assert config.base is not None, "required beside --checkpoint"
        return _write(config, _checkpoint_source(config, config.checkpoint, base=config.base))


def _write(config: MergeConfig, source: MergeSource) -> list[str]:
    base = Checkpoint(source.base, trust_remote_code=config.trust_remote_code)
    kit, processor = base.kit, base.processor
    dtype = torch_dtype(config.dtype, config=base.config)
    loaded = source.loaded
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
        said.append(f"check against {source.against}: {judge_merge(found)}")
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
    from lmm_r1.models.actor import head_name

    loaded.model.config.value_head_prefix = head_name(loaded.model.config, default=default)
    return {f"{loaded.model.config.value_head_prefix}.weight": loaded.head}


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def _adapter_source(config: MergeConfig, adapter: Path) -> MergeSource:
    base = config.base or adapter_base(adapter)
    if base is None:
        raise UserError(f"--adapter {adapter}: its config names no base model; give one with --base")

    model = load_with_adapter(base, adapter, dtype=torch.float32, trust_remote_code=config.trust_remote_code)
    described = f"merged the adapter {adapter} into {base}"
    if quantized_from(adapter) is not None:
        described += ", whose language model is rounded to 4 bits as in training"
    return MergeSource(base=base, loaded=LoadedWeights(model=model), described=described, against="the unmerged model")


def _checkpoint_source(config: MergeConfig, checkpoint: Path, *, base: str) -> MergeSource:
    # Told before the shards are read.
    kit_of(base, trust_remote_code=config.trust_remote_code)
    folder = checkpoint_folder(checkpoint, tag=config.tag)
    weights = read_weights(folder, trust=config.trust_checkpoint)
    alpha, use_rslora, where = _lora_scale(config, weights) if weights.adapted else (None, False, "")

    model = load_trained(
        base,
        weights,
        lora_alpha=alpha,
        use_rslora=use_rslora,
        dtype=torch.float32,
        trust_remote_code=config.trust_remote_code,
    )
    loaded = LoadedWeights(model=model, head=None if weights.head is None else weights.head.float())

    described = f"gathered the weights of {folder}" + (" and its value head" if weights.head is not None else "")
    if weights.adapted:
        described += (
            f" and merged adapters of {len(weights.adapted)} layers: rank {weights.rank}, alpha {alpha} ({where})"
        )
    against = "the unmerged model" if weights.adapted else "the gathered weights"
    return MergeSource(base=base, loaded=loaded, described=described, against=against)


def _lora_scale(config: MergeConfig, weights: TrainedWeights) -> tuple[int, bool, str]:
    """Return the alpha of the adapters in a checkpoint, whether they are rsLoRA's, and the source of both."""
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
        rank, alpha, use_rslora = int(lora["rank"]), int(lora["alpha"] or 0), bool(lora.get("use_rslora"))
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
    from lmm_r1.models.actor import drop_output_layer, stored_weight

    drop_output_layer(model)
    head = stored_weight(str(folder), name=model.config.value_head_prefix, config=model.config, required=True)
    assert head is not None, "it is required"
    return LoadedWeights(model=model, head=head.float())
