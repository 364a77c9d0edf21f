"""The common part of policy and value models: a kit's model that computes samples, packed or padded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from lmm_r1 import cpu
from lmm_r1.host.models import HostedModel
from lmm_r1.lmm_kits import LmmKit
from lmm_r1.lmm_kits.checkpoint import settle_ends
from lmm_r1.models.image_features import FeatureCounts
from lmm_r1.models.loading import LoadedModel, check_buffers, enable_checkpointing
from lmm_r1.models.packed.packing import BatchInputs, ModelSample
from lmm_r1.models.packed.sequence_parallel import SequenceShare, bare, check_not_shared, group_size, share_of

if TYPE_CHECKING:
    from lmm_r1.host.models import DeepSpeedEngine


class KitModule(HostedModel):
    """The mix-in that holds a kit's model; OpenRLHF's Actor is the other part of a policy."""

    kit: LmmKit
    model: PreTrainedModel | DeepSpeedEngine
    """The kit's model, or DeepSpeed's engine around it."""
    __call__: Callable[..., Any]

    def _note(self, loaded: LoadedModel) -> None:
        self.kit = loaded.kit
        self.packing_samples = loaded.packs_samples
        self.share_prefix = loaded.share_prefix
        self.trains_vision = loaded.trains_vision
        self.checkpointed_layers = loaded.checkpointed_layers
        self.plain_buffers = loaded.plain_buffers
        self.features = loaded.features
        # DeepSpeed's engine may show its own config under `.config`.
        self.model_config = loaded.model.config
        # Counted since a caller last set it to 0, including padding and repeated prompts.
        self.computed_tokens = 0

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, bool] | None = None) -> None:
        """Compute activations again in the backward pass, except those of a frozen vision tower."""
        enable_checkpointing(
            self.model,
            kit=self.kit,
            trains_vision=self.trains_vision,
            layers=self.checkpointed_layers,
            settings=gradient_checkpointing_kwargs,
        )

    @contextmanager
    def keeping_buffers(self) -> Iterator[None]:
        loaded = self.model
        yield
        check_buffers(loaded, self.plain_buffers, when="prepared by DeepSpeed")

    def vision_weights(self) -> list[torch.nn.Parameter]:
        # The kit's names are those of the model within the policy or value model.
        prefixes = (*self.kit.vision_prefixes, *self.kit.projector_prefixes)
        return [weight for name, weight in self.model.named_parameters() if prefixes and name.startswith(prefixes)]

    def settle_ends(self, processor: Any) -> None:
        settle_ends(bare(self.model), kit=self.kit, processor=processor)

    def forget_features(self) -> None:
        """Use kept features only if the weights, which may have been loaded anew, are still the same."""
        if self.features is not None:
            self.features.forget()

    @contextmanager
    def computing_images(self) -> Iterator[None]:
        """Run all images of the passes within through the vision tower."""
        with nullcontext() if self.features is None else self.features.paused():
            yield

    def take_feature_counts(self) -> FeatureCounts:
        """Return how often image features were needed and computed since the last call."""
        return FeatureCounts() if self.features is None else self.features.take_counts()

    @property
    def _inputs(self) -> BatchInputs:
        dtype = next(self.model.parameters()).dtype
        return BatchInputs(kit=self.kit, config=self.model_config, dtype=dtype, device=cpu.device())

    def _padded_inputs(
        self, samples: Sequence[ModelSample], *, group: dist.ProcessGroup | None
    ) -> dict[str, torch.Tensor]:
        """Return the model's arguments for samples padded on the right, which may have one more row.

        Raises UserError if ranks share the sequences of this model.
        """
        check_not_shared(self.model, group=group)
        inputs = self._inputs.padded(samples)
        self.computed_tokens += inputs["input_ids"].numel()
        return inputs

    def _packed_inputs(
        self, samples: Sequence[ModelSample], *, wanted: torch.Tensor, group: dist.ProcessGroup | None
    ) -> tuple[SequenceShare, dict[str, torch.Tensor | None]]:
        """Return this process's share of samples as a packed sequence, and the model's arguments for all of it."""
        sequence, inputs = self._inputs.packed(
            samples, wanted=wanted, share_prefix=self.share_prefix, multiple_of=group_size(group)
        )
        self.computed_tokens += sequence.token_ids.numel()
        return share_of(sequence, group=group), inputs
