"""A model with the proportions of Qwen2.5-VL-3B and random weights, and groups of one image for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from gpu_stages.operations import GroupWork, ModelSizes, useful_operations
from gpu_stages.policy import Policy, policy_loss, prepare_tower
from gpu_stages.record import Result
from gpu_stages.setting import Device
from train_batches import GroupBatch, GroupSizes, build_tiny_checkpoint, make_batch

from lmm_r1.data.sample import placed
from lmm_r1.lmm_kits import LmmKit, get_kit
from lmm_r1.models.liger import use_liger
from lmm_r1.models.packed.attention import use_packed_attention

KIT = "qwen2_5_vl"
# An image of 32 x 32 tokens of 28 x 28 pixels each, and some text.
GROUP = GroupSizes(prompt_tokens=1024 + 64, responses=(1024, 1024), image_side=896)
SAMPLES = 16


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of a model; the defaults are those of Qwen2.5-VL-3B."""

    hidden_size: int = 2048
    layers: int = 36
    vision_layers: int = 32
    vocabulary: int = 151936

    def scaled(self, scale: float) -> Shape:
        """Return a smaller one of heads that are as wide, or of one head."""
        if scale >= 1:
            return self
        return Shape(
            hidden_size=max(64, round(self.hidden_size * scale / 128) * 128),
            layers=max(1, round(self.layers * scale)),
            vision_layers=max(1, round(self.vision_layers * scale)),
            vocabulary=max(1024, round(self.vocabulary * scale)),
        )


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A policy and what its batches are made of."""

    policy: Policy
    processor: Any
    sizes: ModelSizes

    def batch(self, sizes: GroupSizes, *, samples: int, groups: int = 1) -> GroupBatch:
        """Return groups whose responses have any tokens of the vocabulary except media tokens."""
        kit, config = self.policy.kit, self.policy.model.config
        batch = make_batch(kit, self.processor, config, groups=[sizes] * groups, samples=samples)
        return replace(batch, sequences=self._with_any_tokens(batch))

    def _with_any_tokens(self, batch: GroupBatch) -> torch.Tensor:
        """Return the sequences with other responses: a tiny tokenizer has few tokens, and their embeddings are few."""
        banned = self.policy.sampler.banned_token_ids.cpu()
        tokens = torch.arange(self.policy.model.config.get_text_config().vocab_size)
        tokens = tokens[~torch.isin(tokens, banned)]
        drawn = torch.randint(len(tokens), batch.sequences.shape, generator=torch.Generator().manual_seed(1))
        responses = torch.nn.functional.pad(batch.action_mask, (1, 0))
        return torch.where(responses, tokens[drawn], batch.sequences)

    def operations(self, batch: GroupBatch, *, samples: int) -> int:
        """Return the operations that an update on a batch cannot do without.

        Args:
            samples: rows of each group but the last, which may have fewer.
        """
        groups = [
            GroupWork(
                prompt=prompt,
                responses=batch.response_lengths[index * samples : (index + 1) * samples],
                images=tuple(len(item.tensors["pixel_values"]) for item in placed(batch.media[index * samples])),
            )
            for index, prompt in enumerate(batch.prompt_lengths)
        ]
        return useful_operations(self.sizes, groups)

    def rates(self, batch: GroupBatch, *, samples: int, seconds: float, device: Device) -> Result:
        """Return what an update on a batch computes per second, if it takes `seconds`."""
        useful = self.operations(batch, samples=samples)
        return {
            "seconds": round(seconds, 4),
            "useful_tflop": round(useful / 1e12, 3),
            "utilisation": None if device.peak is None else round(useful / seconds / device.peak, 4),
            "unique_tokens": batch.unique_tokens,
            "unique_tokens_per_s": round(batch.unique_tokens / seconds),
        }

    def update(self, batch: GroupBatch, *, layout: str, logits: str) -> None:
        """Make the forward and backward pass of an update; no gradient is left, whether or not it ends well."""
        try:
            self.loss(batch, layout=layout, logits=logits).backward()
        finally:
            self.policy.model.zero_grad(set_to_none=True)

    def loss(self, batch: GroupBatch, *, layout: str, logits: str) -> torch.Tensor:
        log_probs = self.policy.log_probs(batch, layout=layout, logits=logits)
        advantages = torch.randn(len(batch.sequences), 1, generator=torch.Generator().manual_seed(0))
        return policy_loss(log_probs, advantages.to(log_probs.device), batch.action_mask.to(log_probs.device))


def make_subject(shape: Shape, folder: Path, device: Device, *, dtype: torch.dtype, checkpointing: bool) -> Subject:
    """Return a model of a shape with random weights, ready for training.

    Args:
        folder: where the tokenizer and the processor are made.
    """
    kit = get_kit(KIT)
    if not folder.exists():
        build_tiny_checkpoint(kit, folder, hidden_size=64, layers=1)
    processor = kit.load_processor(str(folder), trust_remote_code=False)
    model = random_model(shape, kit, folder, device, dtype=dtype)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    # A real tokenizer has nearly all of the vocabulary; the tiny one's ids end early.
    banned = tuple(sorted(kit.media_token_ids(model.config, kit.tokenizer_of(processor))))
    return Subject(policy=Policy.of(kit, model, banned=banned), processor=processor, sizes=ModelSizes.of(model))


def random_model(shape: Shape, kit: LmmKit, folder: Path, device: Device, *, dtype: torch.dtype) -> Any:
    """Return a random model with the tokens of a tiny checkpoint, in training mode, on packed attention."""
    config = shaped_config(shape, kit, folder)
    config.use_cache = config.text_config.use_cache = False
    torch.manual_seed(0)
    with device.place:
        model = kit.model_class._from_config(config, dtype=dtype, attn_implementation="sdpa")
    prepare_tower(model, kit)
    use_packed_attention(model)
    if device.is_cuda:
        use_liger(model)
    return model.to(device.place).train()


def write_checkpoint(folder: Path, *, shape: Shape | None = None) -> None:
    """Write a random checkpoint of a shape, Qwen2.5-VL-3B's by default, in bf16 and with a tiny checkpoint's tokenizer."""
    kit = get_kit(KIT)
    build_tiny_checkpoint(kit, folder, hidden_size=64, layers=1)
    torch.manual_seed(0)
    # Drawing 3.8 billion numbers takes a card a second, and a CPU a minute.
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = kit.model_class._from_config(shaped_config(shape or Shape(), kit, folder), dtype=torch.bfloat16)
    model.save_pretrained(folder)


def shaped_config(shape: Shape, kit: LmmKit, folder: Path) -> Any:
    """Return the config of a tiny checkpoint with the sizes of a shape."""
    config, width = kit.load_config(str(folder), trust_remote_code=False), shape.hidden_size
    text, vision = config.text_config, config.vision_config
    heads, of_head = max(1, width // 128), min(128, width)
    config.tie_word_embeddings = text.tie_word_embeddings = True
    text.hidden_size, text.intermediate_size = width, 11008 * width // 2048
    text.num_hidden_layers, text.vocab_size = shape.layers, shape.vocabulary
    text.num_attention_heads, text.num_key_value_heads = heads, max(1, heads // 8)
    text.layer_types, text.initializer_range = ["full_attention"] * shape.layers, 0.02
    # An eighth, and twice three sixteenths: half of a head.
    sections = [of_head // 8, 3 * of_head // 16, 3 * of_head // 16]
    text.rope_parameters = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections}
    vision.num_heads, vision.depth = max(1, 16 * width // 2048), shape.vision_layers
    vision.hidden_size, vision.intermediate_size = 80 * vision.num_heads, 3420 * width // 2048
    vision.out_hidden_size, vision.initializer_range = width, 0.02
    # The last layer, and every eighth: one of them at least sees whole images.
    vision.fullatt_block_indexes = sorted({*range(7, shape.vision_layers, 8), shape.vision_layers - 1})
    return config


def first_rows(batch: GroupBatch, rows: int, *, samples: int) -> GroupBatch:
    """Return a batch of the first rows alone; the last group may have fewer than `samples` of them."""
    width = int(batch.attention_mask[:rows].sum(1).max())
    groups = -(-rows // samples)
    return GroupBatch(
        sequences=batch.sequences[:rows, :width],
        attention_mask=batch.attention_mask[:rows, :width],
        action_mask=batch.action_mask[:rows, : width - 1],
        media=list(batch.media[:rows]),
        samples=samples,
        prompt_lengths=batch.prompt_lengths[:groups],
        response_lengths=batch.response_lengths[:rows],
    )


def rows_within(tokens: int, *, prompts: Sequence[int], responses: Sequence[int], samples: int) -> int:
    """Return how many rows hold at most `tokens` unique tokens; 0 where the first is too long."""
    rows, room = 0, tokens
    for row, length in enumerate(responses):
        room -= length + (prompts[row // samples] if row % samples == 0 else 0)
        if room < 0:
            break
        rows += 1
    return rows
