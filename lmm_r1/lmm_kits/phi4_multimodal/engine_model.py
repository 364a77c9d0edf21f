"""vLLM's model of Phi-4-multimodal in transformers' format, which vLLM itself no longer has; images and text only."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from transformers import BatchFeature, Phi4MultimodalProcessor
from transformers.models.phi4_multimodal.modeling_phi4_multimodal import Phi4MultimodalImageEmbedding
from vllm.config import VllmConfig
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.interfaces import MultiModalEmbeddings, SupportsMultiModal
from vllm.model_executor.models.llama import LlamaModel
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, maybe_prefix
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems
from vllm.multimodal.parse import MultiModalDataItems
from vllm.multimodal.processing import BaseDummyInputsBuilder, BaseMultiModalProcessor, BaseProcessingInfo
from vllm.multimodal.processing.processor import PromptReplacement, PromptUpdate
from vllm.sequence import IntermediateTensors

from lmm_r1.lmm_kits.phi4_multimodal import (
    AUDIO_EMBED,
    IMAGE_EMBED,
    MEDIA_KEYS,
    attend_bidirectionally,
    crop_grid,
    num_placeholders,
)


class Phi4ProcessingInfo(BaseProcessingInfo):
    """Images only: an audio prompt is refused."""

    def get_hf_processor(self, **kwargs: object) -> Phi4MultimodalProcessor:
        return self.ctx.get_hf_processor(Phi4MultimodalProcessor, **kwargs)

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"image": None}


class Phi4DummyInputs(BaseDummyInputsBuilder[Phi4ProcessingInfo]):
    """The largest input, for which vLLM keeps memory free."""

    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        return self.info.get_hf_processor().image_token * mm_counts.get("image", 0)

    def get_dummy_mm_data(
        self, seq_len: int, mm_counts: Mapping[str, int], mm_options: Mapping[str, Any]
    ) -> dict[str, object]:
        # One column of crops: every row of tokens ends with a separator, and this has the most rows.
        image_processor = self.info.get_hf_processor().image_processor
        side = image_processor.size["height"]
        images = self._get_dummy_images(
            width=side,
            height=side * image_processor.dynamic_hd,
            num_images=mm_counts.get("image", 0),
            overrides=mm_options.get("image"),
        )
        return {"image": images}


class Phi4Processor(BaseMultiModalProcessor[Phi4ProcessingInfo]):
    """Expands every placeholder as the processor does."""

    def _get_hf_processor_text(self, mm_counts: Mapping[str, int]) -> str:
        return self.dummy_inputs.get_dummy_text(mm_counts)

    def _get_mm_fields_config(
        self, hf_inputs: BatchFeature, hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, MultiModalFieldConfig]:
        return {key: MultiModalFieldConfig.batched("image") for key in MEDIA_KEYS}

    def _get_prompt_updates(
        self,
        mm_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, object],
        out_mm_kwargs: MultiModalKwargsItems,
    ) -> Sequence[PromptUpdate]:
        config = self.info.get_hf_config().vision_config

        def replacement(index: int) -> list[int]:
            item = out_mm_kwargs["image"][index]
            size: torch.Tensor = item["image_sizes"].data
            masks: torch.Tensor = item["image_attention_mask"].data
            return [config.image_token_id] * num_placeholders(masks, grid=crop_grid(size, crop_size=config.crop_size))

        return [PromptReplacement(modality="image", target=[config.image_token_id], replacement=replacement)]


@MULTIMODAL_REGISTRY.register_processor(Phi4Processor, info=Phi4ProcessingInfo, dummy_inputs=Phi4DummyInputs)
class Phi4MultimodalEngineModel(nn.Module, SupportsMultiModal):
    """A Llama-like language model with its query, key, value and gate, up matrices fused, and transformers' vision tower."""

    packed_modules_mapping = {"qkv_proj": ["qkv_proj"], "gate_up_proj": ["gate_up_proj"]}
    hf_to_vllm_mapper = WeightsMapper(orig_to_new_prefix={AUDIO_EMBED: None, IMAGE_EMBED: "image_embed."})
    # Methods of vLLM's, declared because of `nn.Module`, by which any attribute may be a tensor.
    _mark_tower_model: Callable[[VllmConfig, str], AbstractContextManager[None]]
    _mark_language_model: Callable[[VllmConfig], AbstractContextManager[None]]

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.config = config
        with self._mark_tower_model(vllm_config, "image"):
            self.image_embed = Phi4MultimodalImageEmbedding(config)
            attend_bidirectionally(self.image_embed)
        with self._mark_language_model(vllm_config):
            self.model = LlamaModel(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"))
        self.lm_head = ParallelLMHead(
            config.vocab_size,
            config.hidden_size,
            quant_config=vllm_config.quant_config,
            prefix=maybe_prefix(prefix, "lm_head"),
        )
        if config.tie_word_embeddings:
            self.lm_head = self.lm_head.tie_weights(self.model.embed_tokens)
        self.logits_processor = LogitsProcessor(config.vocab_size)

    def embed_multimodal(self, **kwargs: Iterable[torch.Tensor]) -> MultiModalEmbeddings:
        """Return the embeddings of each image's placeholders, as transformers' module computes them."""
        if "image_sizes" not in kwargs:
            return []
        vision, weights = self.config.vision_config, self.image_embed.img_projection_up.weight
        media = [dict(zip(MEDIA_KEYS, image, strict=True)) for image in zip(*map(kwargs.get, MEDIA_KEYS), strict=True)]
        embeds = []
        for image in media:
            grid = crop_grid(image["image_sizes"], crop_size=vision.crop_size)
            tokens = num_placeholders(image["image_attention_mask"], grid=grid)
            ids = torch.full((1, tokens), vision.image_token_id, device=weights.device)
            places = weights.new_zeros(1, tokens, self.config.hidden_size)
            # The processor adds empty crops to make all images of a prompt alike.
            image = {key: part[: 1 + math.prod(grid)] for key, part in image.items()}
            embeds.append(self.image_embed(ids, places, **{key: part[None] for key, part in image.items()})[0])
        return embeds

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: object,
    ) -> torch.Tensor:
        return self.model(input_ids, positions, intermediate_tensors, inputs_embeds=inputs_embeds)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        return self.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load all weights or some of them; those of the audio tower are skipped, an adapter's are refused."""
        return AutoWeightsLoader(self).load_weights(_without_adapters(weights), mapper=self.hf_to_vllm_mapper)


def _without_adapters(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, weight in weights:
        if ".lora_" in name or ".base_layer." in name:
            raise ValueError(f"{name}: an adapter must be merged into the weights before vLLM loads them")
        yield name, weight
