"""What a kit's model gets for a padded batch: the batch itself, or its samples as a packed sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from transformers import PretrainedConfig

from lmm_r1.data.sample import SampleMedia, placed
from lmm_r1.lmm_kits import LmmKit, Media
from lmm_r1.models.packed.packing import PackedSequence, Targets, pack_batch


@dataclass(frozen=True, kw_only=True)
class BatchInputs:
    """Turns batches (B, T), with one entry of media per row, into arguments of the model's forward."""

    kit: LmmKit
    config: PretrainedConfig
    dtype: torch.dtype
    """Of pixel values; grids and sizes stay integers."""

    @classmethod
    def of(cls, model: torch.nn.Module, *, kit: LmmKit, config: PretrainedConfig) -> BatchInputs:
        """Return the inputs of a model whose weights are of one dtype; an engine's config is not always the model's."""
        return cls(kit=kit, config=config, dtype=next(model.parameters()).dtype)

    def padded(
        self, sequences: torch.Tensor, attention_mask: torch.Tensor, media: Sequence[SampleMedia]
    ) -> dict[str, torch.Tensor]:
        """Return all arguments for the batch, which may have a row more than given; see `_with_filler_row`."""
        given = [item.tensors for row in media for item in placed(row)]
        if not given and self._needs_filler():
            sequences, attention_mask, given = self._with_filler_row(sequences, attention_mask)
        merged = None
        if given:
            merged = {key: value.to(sequences.device) for key, value in self.kit.merge_media(given).items()}
        inputs = self.kit.forward_inputs(self.config, sequences, attention_mask, merged)
        return {**self._arguments(sequences, inputs), "attention_mask": attention_mask}

    def packed(
        self,
        sequences: torch.Tensor,
        attention_mask: torch.Tensor,
        media: Sequence[SampleMedia],
        *,
        targets: Targets,
        share_prefix: bool,
        multiple_of: int = 1,
    ) -> tuple[PackedSequence, dict[str, torch.Tensor | None]]:
        """Return the batch as a packed sequence, whose length `multiple_of` divides, and all arguments for it."""
        packed = pack_batch(
            self.kit,
            self.config,
            sequences=sequences,
            attention_mask=attention_mask,
            targets=targets,
            media=media,
            share_prefix=share_prefix,
            fill=self._needs_filler(),
            multiple_of=multiple_of,
        )
        # The layout stands in the mask's place.
        return packed, {**self._arguments(packed.token_ids, packed.inputs), "attention_mask": None}

    def _arguments(self, token_ids: torch.Tensor, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return all arguments but the mask."""
        return self.kit.in_one_tower_run(self.config, {"input_ids": token_ids, **self._in_dtype(inputs)})

    def _needs_filler(self) -> bool:
        """Whether the vision tower must run without images: ranks wait for one another, and gradients must be new.

        To a weight without a gradient in one of several passes, DeepSpeed 0.19.6 gives that of an earlier step
        (ZeRO-3, and ZeRO-2 with `--ds.adam_offload`).
        """
        if not self.kit.takes_images or not dist.is_initialized():
            return False
        return dist.get_world_size() > 1 or torch.is_grad_enabled()

    def _in_dtype(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {key: value.to(self.dtype) if value.is_floating_point() else value for key, value in inputs.items()}

    def _with_filler_row(
        self, sequences: torch.Tensor, attention_mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, list[Media]]:
        """Add a row that holds the smallest legal image, whose output is dropped.

        All ranks must run the vision tower in a step, or ZeRO's collectives wait for one another forever. The row
        takes no part in the loss, so its gradients are exactly zero.
        """
        filler = self.kit.filler_media(self.config)
        assert filler is not None, f"the kit {self.kit.model_type} takes images and has no filler"
        ids, media = filler
        width = max(sequences.shape[1], len(ids))
        padded = sequences.new_zeros(len(sequences) + 1, width)
        mask = attention_mask.new_zeros(len(sequences) + 1, width)
        padded[:-1, : sequences.shape[1]] = sequences
        mask[:-1, : sequences.shape[1]] = attention_mask
        padded[-1, : len(ids)] = sequences.new_tensor(ids)
        mask[-1, : len(ids)] = 1
        return padded, mask, [media]
