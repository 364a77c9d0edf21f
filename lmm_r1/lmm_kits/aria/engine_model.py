"""vLLM's Aria, corrected so that its log-probs equal those of the training forward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models import aria
from vllm.model_executor.models.utils import AutoWeightsLoader

_EXPERT_WEIGHTS = (".experts.fc1.weight", ".experts.fc2.weight")


class AriaForConditionalGeneration(aria.AriaForConditionalGeneration):
    """vLLM's class that loads the experts, hides the padding of images and places patches as transformers does."""

    lm_head: ParallelLMHead

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config, prefix)
        # vLLM hides the padding of an image only from the projector; the model also hides it from the vision tower.
        self.vision_tower.apply_encoder_attention_mask = True
        if self.config.text_config.tie_word_embeddings:
            self.lm_head = self.lm_head.tie_weights(self.language_model.embed_tokens)

    def _process_image_input(self, image_input: Any) -> torch.Tensor:
        """Return the projected images, (images, placeholders, width)."""
        patch_mask = self._create_patch_attention_mask(image_input["pixel_mask"])  # (images, rows, columns)
        features = self.vision_tower(
            pixel_values=image_input["pixel_values"],
            patch_attention_mask=patch_mask,
            position_ids=patch_positions(patch_mask, side=self.vision_tower.embeddings.num_patches_per_side),
        )
        return self.multi_modal_projector(features, ~patch_mask.flatten(1))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load a checkpoint and return the names of the parameters that it filled."""
        return AutoWeightsLoader(self).load_weights(_oriented(weights), mapper=self.hf_to_vllm_mapper)


def patch_positions(patch_mask: torch.Tensor, *, side: int) -> torch.Tensor:
    """Return each patch's index into the position embedding, (images, rows * columns), 0 for padding.

    In transformers' order of rounding; vLLM's own differs by one in some rows of images of 49 or 58 patches a side.

    Args:
        patch_mask: (images, rows, columns), true for patches of the image.
        side: rows, and columns, of the largest image, which has one embedding per patch.
    """
    boundaries = torch.arange(1 / side, 1.0, 1 / side, device=patch_mask.device)

    def places(counts: torch.Tensor, length: int) -> torch.Tensor:
        steps = torch.arange(length, dtype=torch.float32, device=patch_mask.device)
        fractions = (steps[None, :] * (1.0 / counts)[:, None]).clamp(max=1.0 - 1e-6)
        return torch.bucketize(fractions, boundaries, right=True)  # (images, length)

    rows = places(patch_mask[:, :, 0].sum(1), patch_mask.shape[1])
    columns = places(patch_mask[:, 0, :].sum(1), patch_mask.shape[2])
    return ((rows[:, :, None] * side + columns[:, None, :]) * patch_mask).flatten(1)


def _oriented(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and turn the experts' weights, (experts, in, out), as vLLM's loader takes them: (experts, out, in)."""
    for name, weight in weights:
        if name.endswith(_EXPERT_WEIGHTS):
            name, weight = name.removesuffix(".weight"), weight.transpose(1, 2)
        yield name, weight
