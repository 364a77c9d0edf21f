"""vLLM's model of Phi-4-multimodal in transformers' format, which vLLM itself no longer has; images and text only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager

import torch
from torch import nn
from transformers import Phi4MultimodalConfig
from vllm.config import VllmConfig
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.idefics2_vision_model import Idefics2VisionTransformer
from vllm.model_executor.models.interfaces import MultiModalEmbeddings, SupportsMultiModal
from vllm.model_executor.models.llama import LlamaModel
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, maybe_prefix
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.sequence import IntermediateTensors

from lmm_r1.lmm_kits.phi4_multimodal.crops import crop_grid, position_ids, token_mask
from lmm_r1.lmm_kits.phi4_multimodal.engine_processing import Phi4DummyInputs, Phi4ProcessingInfo, Phi4Processor
from lmm_r1.lmm_kits.phi4_multimodal.towers import AUDIO_EMBED, IMAGE_EMBED, vision_depth


class Phi4ImageEmbed(nn.Module):
    """Vision tower, halving, separators and projection, under the names of the checkpoint."""

    def __init__(self, config: Phi4MultimodalConfig, *, prefix: str) -> None:
        super().__init__()
        vision = config.vision_config
        self.config = vision
        self.img_processor = Idefics2VisionTransformer(
            vision,
            num_hidden_layers_override=vision_depth(config),
            require_post_norm=False,
            apply_encoder_attention_mask=True,
            prefix=f"{prefix}.img_processor",
        )
        self.img_projection_up = nn.Linear(vision.hidden_size, config.hidden_size)
        self.img_projection_down = nn.Linear(config.hidden_size, config.hidden_size)
        self.global_img_feature_extensor = nn.Parameter(torch.zeros(1, 1, vision.hidden_size))
        self.sub_img_feature_extensor = nn.Parameter(torch.zeros(1, 1, 1, vision.hidden_size))

    def forward(
        self, crops: list[torch.Tensor], masks: list[torch.Tensor], sizes: Iterable[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return an embedding per placeholder, (placeholders, D), for each image.

        Args:
            crops: pixels of each image, (1 + rows * columns, 3, H, W).
            masks: patches that show image, (1 + rows * columns, S, S).
        """
        patch_mask = torch.cat(masks).bool()
        features = self._halved(
            self.img_processor(
                torch.cat(crops),
                patch_attention_mask=patch_mask,
                position_ids=position_ids(
                    patch_mask,
                    side=self.config.image_size // self.config.patch_size,
                    dtype=self.img_projection_up.weight.dtype,
                ),
            )
        )
        images = features.split([len(mask) for mask in masks])
        arranged = [self._arranged(*image) for image in zip(images, masks, sizes, strict=True)]
        return [self.img_projection_down(nn.functional.gelu(self.img_projection_up(image))) for image in arranged]

    def _halved(self, features: torch.Tensor) -> torch.Tensor:
        """Return the mean of every two by two patches, (crops, s, s, D) from (crops, S * S, D)."""
        side = int(features.shape[1] ** 0.5)
        grid = features.unflatten(1, (side, side)).permute(0, 3, 1, 2)
        if side % 2:
            grid = nn.functional.pad(grid, (0, 1, 0, 1), mode="reflect")
        return nn.functional.avg_pool2d(grid, kernel_size=2).permute(0, 2, 3, 1)

    def _arranged(self, features: torch.Tensor, masks: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
        """Return the grid of crops without its padding, a separator, and the whole picture; every row with its end."""
        rows, columns = crop_grid(size, crop_size=self.config.crop_size)
        mask = token_mask(masks, grid=(rows, columns))
        side, width = features.shape[1], features.shape[-1]
        crops = features[1:].reshape(rows, columns, side, side, width).transpose(1, 2)
        crops = crops.reshape(rows * side, columns * side, width)[: int(mask[:, 0].sum()), : int(mask[0].sum())]
        return torch.cat(
            [self._with_row_ends(crops), self.global_img_feature_extensor[0], self._with_row_ends(features[0])]
        )

    def _with_row_ends(self, grid: torch.Tensor) -> torch.Tensor:
        """Return (rows * (columns + 1), D) from (rows, columns, D)."""
        ends = self.sub_img_feature_extensor[0].expand(len(grid), -1, -1)
        return torch.cat([grid, ends], dim=1).flatten(0, 1)


@MULTIMODAL_REGISTRY.register_processor(Phi4Processor, info=Phi4ProcessingInfo, dummy_inputs=Phi4DummyInputs)
class Phi4MultimodalEngineModel(nn.Module, SupportsMultiModal):
    """A Llama-like language model with its query, key, value and gate, up matrices fused, and `Phi4ImageEmbed`."""

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
            self.image_embed = Phi4ImageEmbed(config, prefix=maybe_prefix(prefix, "image_embed"))
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
        """Return the embeddings of each image's placeholders."""
        if "image_sizes" not in kwargs:
            return []
        crops, masks, sizes = (
            list(kwargs[key]) for key in ("image_pixel_values", "image_attention_mask", "image_sizes")
        )
        return self.image_embed(crops, masks, sizes)

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
        """Load all weights or some of them; those of the audio tower are passed over, an adapter's are refused."""
        return AutoWeightsLoader(self).load_weights(_without_adapters(weights), mapper=self.hf_to_vllm_mapper)


def _without_adapters(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, weight in weights:
        if ".lora_" in name or ".base_layer." in name:
            raise ValueError(f"{name}: an adapter must be merged into the weights before vLLM loads them")
        yield name, weight
