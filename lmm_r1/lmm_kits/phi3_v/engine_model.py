"""vLLM's Phi-3.5-vision, which can load weights repeatedly and takes the tower's width and the placeholder from the config."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.quantization import QuantizationConfig
from vllm.model_executor.models import phi3v
from vllm.model_executor.models.clip import CLIPVisionModel
from vllm.model_executor.models.interfaces import SupportsMultiModal
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, init_vllm_registered_model, maybe_prefix
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalKwargsItems
from vllm.multimodal.parse import MultiModalDataItems
from vllm.multimodal.processing.processor import (
    BaseMultiModalProcessor,
    MultiModalPromptUpdates,
    PlaceholderFeaturesInfo,
    PromptReplacement,
)

from lmm_r1.lmm_kits.phi3_v.modeling import Phi3VConfig, merge_patches


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


class Phi3VImageEmbedding(phi3v.Phi3HDImageEmbedding):
    """vLLM's image embedding with a tower of the config's size; vLLM always builds ViT-L/14-336."""

    def __init__(self, config: Phi3VConfig, *, quant_config: QuantizationConfig | None, prefix: str) -> None:
        nn.Module.__init__(self)
        clip = config.clip_config
        self.image_dim_out = clip.hidden_size
        self.type_feature = "patch"
        assert config.embd_layer is not None, "its __post_init__ fills it in"
        self.hd_transform_order = config.embd_layer["hd_transform_order"]
        self.img_processor = CLIPVisionModel(
            clip,
            quant_config=quant_config,
            num_hidden_layers_override=config.clip_layers,
            require_post_norm=False,
            prefix=f"{prefix}.img_processor",
        )
        width = 4 * clip.hidden_size
        self.glb_GN = nn.Parameter(torch.empty(1, 1, width))
        self.sub_GN = nn.Parameter(torch.empty(1, 1, 1, width))
        self.img_projection = nn.Sequential(
            nn.Linear(width, config.hidden_size), nn.GELU(), nn.Linear(config.hidden_size, config.hidden_size)
        )

    def reshape_hd_patches_2x2merge(self, image_features: torch.Tensor, h_crop: int, w_crop: int) -> torch.Tensor:
        """Return the crops of images of one grid as pictures of merged patches; vLLM's own method takes only the width 1024."""
        images = image_features.split(h_crop * w_crop)
        return torch.stack([merge_patches(crops, rows=h_crop, columns=w_crop) for crops in images])


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
            self.vision_embed_tokens = Phi3VImageEmbedding(
                config, quant_config=vllm_config.quant_config, prefix=maybe_prefix(prefix, "model.vision_embed_tokens")
            )
        with self._mark_language_model(vllm_config):
            self.language_model = init_vllm_registered_model(
                vllm_config=vllm_config, prefix="", architectures=["LlamaForCausalLM"]
            )
        self.make_empty_intermediate_tensors = self.language_model.make_empty_intermediate_tensors

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load a checkpoint and return the names of the parameters that it filled."""
        return AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)
