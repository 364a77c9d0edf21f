"""vLLM's Phi-3.5-vision, which can load weights repeatedly and takes the tower's width and the placeholder from the config."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.models import phi3v
from vllm.model_executor.models.interfaces import SupportsMultiModal
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, init_vllm_registered_model
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalKwargsItems
from vllm.multimodal.parse import MultiModalDataItems
from vllm.multimodal.processing.processor import (
    BaseMultiModalProcessor,
    MultiModalPromptUpdates,
    PlaceholderFeaturesInfo,
    PromptReplacement,
)

from lmm_r1.lmm_kits.phi3_v.modeling import Phi3VImageEmbedding


class Phi3VMultiModalProcessor(phi3v.Phi3VMultiModalProcessor):
    """Expands the placeholders of prompts that are given as ids; prompts with `<|image_1|>` are left to vLLM."""

    def _get_prompt_updates(
        self,
        mm_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, Any],
        out_mm_kwargs: MultiModalKwargsItems,
    ) -> Sequence[PromptReplacement]:
        (update,) = super()._get_prompt_updates(mm_items, hf_processor_mm_kwargs, out_mm_kwargs)
        placeholder = self.info.get_hf_config().image_token_id
        return [
            PromptReplacement(
                modality=update.modality,
                target=update.target,
                replacement=lambda index: [placeholder] * len(update.replacement(index)),
            )
        ]

    def _apply_prompt_updates(
        self, token_ids: list[int], mm_prompt_updates: MultiModalPromptUpdates
    ) -> tuple[list[int], Mapping[str, list[PlaceholderFeaturesInfo]]]:
        placeholder = self.info.get_hf_config().image_token_id
        if placeholder not in token_ids:
            return super()._apply_prompt_updates(token_ids, mm_prompt_updates)
        # vLLM would decode the ids and encode the text again, which changes the ids of some texts.
        by_placeholder = {
            modality: [[update.with_target([placeholder]) for update in updates] for updates in items]
            for modality, items in mm_prompt_updates.items()
        }
        return BaseMultiModalProcessor._apply_prompt_updates(self, token_ids, by_placeholder)


@MULTIMODAL_REGISTRY.register_processor(
    Phi3VMultiModalProcessor, info=phi3v.Phi3VProcessingInfo, dummy_inputs=phi3v.Phi3VDummyInputsBuilder
)
class Phi3VForCausalLM(phi3v.Phi3VForCausalLM):
    """vLLM's class with the language model's embedding for the prompt as well.

    Its own second copy has no weights in a checkpoint: it is tied to the first after loading, and then refuses the next.
    """

    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={
            "model.vision_embed_tokens.wte.": "language_model.model.embed_tokens.",
            "model.vision_embed_tokens.": "vision_embed_tokens.",
            "lm_head.": "language_model.lm_head.",
            "model.": "language_model.model.",
        }
    )
    embed_input_ids = SupportsMultiModal.embed_input_ids

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        nn.Module.__init__(self)
        config = vllm_config.model_config.hf_config
        self.config = config
        self.multimodal_config = vllm_config.model_config.multimodal_config
        self.image_token_id = config.image_token_id
        with self._mark_tower_model(vllm_config, "image"):
            self.vision_embed_tokens = Phi3VImageEmbedding(config)
        with self._mark_language_model(vllm_config):
            self.language_model = init_vllm_registered_model(
                vllm_config=vllm_config, prefix="", architectures=["LlamaForCausalLM"]
            )
        self.make_empty_intermediate_tensors = self.language_model.make_empty_intermediate_tensors

    def _process_image_input(self, image_input: phi3v.Phi3VImagePixelInputs) -> list[torch.Tensor]:
        """Return the embeddings of each image's placeholders; vLLM's own class takes only the tower's released size."""
        images = zip(image_input["pixel_values"], image_input["image_sizes"], strict=True)
        return [self.vision_embed_tokens(crops[None], size[None]) for crops, size in images]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load a checkpoint and return the names of the parameters that it filled."""
        return AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)
