"""vLLM's Gemma 4 for the kit's prompts, which already have the markers of images; it computes images on CPUs as well."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from vllm.model_executor.models import gemma4_mm
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalKwargsItems
from vllm.multimodal.parse import MultiModalDataItems
from vllm.multimodal.processing import PromptReplacement, PromptUpdate
from vllm.platforms import current_platform


class MarkedImages(gemma4_mm.Gemma4MultiModalProcessor):
    """Repeats the one placeholder that the kit writes per image, and keeps all other ids.

    vLLM's own processor writes the markers around images itself. It also computes the number of tokens from a setting of
    the model's config, which may differ from the image processor's; the patches say how many there are.
    """

    def _get_prompt_updates(
        self,
        mm_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, object],
        out_mm_kwargs: MultiModalKwargsItems,
    ) -> Sequence[PromptUpdate]:
        token, given = self.info.get_hf_processor().image_token_id, out_mm_kwargs.get_data()
        per_token = self.info.get_hf_config().vision_config.pooling_kernel_size**2

        def placeholders(image: int) -> list[int]:
            patches = (given["pixel_position_ids"][image] != -1).all(dim=-1).sum()
            return [token] * (int(patches) // per_token)

        return [PromptReplacement(modality="image", target=[token], replacement=placeholders)]


@MULTIMODAL_REGISTRY.register_processor(
    MarkedImages, info=gemma4_mm.Gemma4ProcessingInfo, dummy_inputs=gemma4_mm.Gemma4DummyInputsBuilder
)
class Gemma4EngineModel(gemma4_mm.Gemma4ForConditionalGeneration):
    """vLLM's model; on CPUs, its own image path fails because it asks for an accelerator's free memory."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load weights; layers that take their keys from an earlier one need no norm of keys.

        Transformers does not save these norms, and vLLM refuses a checkpoint without them.
        """
        unused = {
            name
            for name, _ in self.named_parameters()
            if name.startswith("language_model.")
            and name.endswith(".k_norm.weight")
            and self.get_submodule(name.removesuffix(".k_norm.weight")).is_kv_shared_layer
        }
        return super().load_weights(weights) | unused

    def _process_image_input(self, image_input: gemma4_mm.Gemma4ImageInputs) -> list[torch.Tensor]:
        if not current_platform.is_cpu():
            return super()._process_image_input(image_input)
        images = zip(image_input["pixel_values"], image_input["pixel_position_ids"], strict=True)
        embeds = []  # (T, H) of each image
        for pixels, places in images:  # (P, C) and (P, 2)
            features = self.vision_tower(pixel_values=pixels[None], pixel_position_ids=places[None]).last_hidden_state
            embeds.append(self.embed_vision(inputs_embeds=features.to(self.model_dtype)[None])[0])
        return embeds
