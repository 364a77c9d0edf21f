"""The operations that an update cannot do without: those of unique tokens, forward and backward, and nothing else.

A forward pass takes two operations, a multiplication and an addition, per weight and token, a backward pass twice as
many: 6 N per token for N weights. Embeddings are looked up and count nothing; the output layer counts for response
tokens alone, of which there are log-probs; a tower of vision counts per patch. Attention of one layer with heads of W
numbers in all takes 4 W per pair of a query and a key that it sees (scores, and the sum of values), three times that with the
backward pass: 12 W. Padding, prompts computed again for each response, activations computed again for checkpointing,
logits computed again in the backward pass, norms and rotations count nothing, so that all ways are judged by one number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """What a model multiplies."""

    text_weights: int
    """Per token: the language model's layers, without embeddings."""
    head_weights: int
    """Per predicted token."""
    text_layers: int
    text_width: int
    """Numbers of all query heads."""
    patch_weights: int
    """Per patch: the vision tower's layers."""
    merged_weights: int
    """Per token of an image: what joins patches."""
    patches_per_token: int
    whole_layers: int
    """Vision layers in which a patch sees its whole image."""
    window_layers: int
    vision_width: int
    window_patches: int
    """How many patches a window holds at most."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> ModelSizes:
        """Return the sizes of a model of the Qwen2.5-VL kind."""
        text, vision = model.config.text_config, model.config.vision_config
        weights = {
            part: sum(weight.numel() for name, weight in model.named_parameters() if marker in name)
            for part, marker in (("text", ".layers."), ("blocks", ".blocks."), ("merger", ".merger."))
        }
        whole = len([index for index in vision.fullatt_block_indexes if index < vision.depth])
        return cls(
            text_weights=weights["text"],
            # By its shape: a tied one is not among the parameters a second time.
            head_weights=model.get_output_embeddings().weight.numel(),
            text_layers=text.num_hidden_layers,
            text_width=text.hidden_size,
            patch_weights=weights["blocks"],
            merged_weights=weights["merger"],
            patches_per_token=vision.spatial_merge_size**2,
            whole_layers=whole,
            window_layers=vision.depth - whole,
            vision_width=vision.hidden_size,
            window_patches=(vision.window_size // vision.patch_size) ** 2,
        )


@dataclass(frozen=True, kw_only=True)
class GroupWork:
    """One group: its prompt and images once, and each of its responses."""

    prompt: int
    """Tokens, those of images included."""
    responses: tuple[int, ...]
    images: tuple[int, ...] = ()
    """Patches of each image."""

    @property
    def tokens(self) -> int:
        return self.prompt + sum(self.responses)


def useful_operations(sizes: ModelSizes, groups: Sequence[GroupWork]) -> int:
    """Return the operations of a forward and a backward pass over the unique tokens of groups."""
    tokens = sum(group.tokens for group in groups)
    targets = sum(sum(group.responses) for group in groups)
    # Of n tokens behind p others: each sees these, itself and those before it.
    pairs = sum(
        group.prompt * (group.prompt + 1) // 2
        + sum(length * group.prompt + length * (length + 1) // 2 for length in group.responses)
        for group in groups
    )
    images = [patches for group in groups for patches in group.images]
    patches = sum(images)
    seen = sum(
        count * (sizes.whole_layers * count + sizes.window_layers * min(count, sizes.window_patches))
        for count in images
    )
    weights = sizes.text_weights * tokens + sizes.head_weights * targets
    weights += sizes.patch_weights * patches + sizes.merged_weights * patches // sizes.patches_per_token
    return 6 * weights + 12 * (sizes.text_layers * sizes.text_width * pairs + sizes.vision_width * seen)
