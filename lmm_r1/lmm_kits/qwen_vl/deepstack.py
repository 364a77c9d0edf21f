"""What the kits of Qwen3-VL, dense and with experts, share: a deepstack tower, and steps of videos behind their times as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import PretrainedConfig, Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor
from transformers.models.qwen3_vl.modeling_qwen3_vl import BaseModelOutputWithDeepstackFeatures

from lmm_r1.data.messages import VideoPart
from lmm_r1.data.videos import Video
from lmm_r1.lmm_kits.features import GridPoint, Parts
from lmm_r1.lmm_kits.kit import TinyModelSpec
from lmm_r1.lmm_kits.qwen_vl import QwenVlKit
from lmm_r1.lmm_kits.qwen_vl.frames import bounded_steps

# Of the tiny model. The features of the first two layers go behind the first two layers of the language model, but for
# its last one: behind that they would reach no response.
VISION_LAYERS = 3
POSITIONS = 16 * 16
HALF = [0.5, 0.5, 0.5]
# One merged patch of 32 x 32 pixels is enough; the released checkpoint asks for 64 of them in an image.
IMAGE_PIXELS = {"shortest_edge": 32 * 32, "longest_edge": 32 * 32 * 1280}
VIDEO_PIXELS = {"shortest_edge": 64 * 64, "longest_edge": 32 * 32 * 4096}


def _levels(output: BaseModelOutputWithDeepstackFeatures) -> Parts:
    return (output.pooler_output, *output.deepstack_features)


def _of_levels(parts: Parts) -> BaseModelOutputWithDeepstackFeatures:
    return BaseModelOutputWithDeepstackFeatures(pooler_output=parts[0], deepstack_features=list(parts[1:]))


class DeepstackKit(QwenVlKit):
    """What the tower's inner layers see is added behind the language model's first layers."""

    processor_class = Qwen3VLProcessor
    writes_thousandths = True
    vision_prefixes = (*QwenVlKit.vision_prefixes, "model.visual.pos_embed.")
    projector_prefixes = (*QwenVlKit.projector_prefixes, "model.visual.deepstack_merger_list.")
    feature_points = (GridPoint(owner="model.visual", projects=True, take=_levels, give=_of_levels),)
    engine_language_model: ClassVar[str]
    """vLLM's class of the language model alone."""

    def bounded_video(self, processor: Qwen3VLProcessor, video: Video, part: VideoPart) -> Video:
        return bounded_steps(processor, video, part)

    def engine_arguments(self, config: PretrainedConfig, *, max_images: int, max_videos: int) -> dict[str, Any]:
        """Return vLLM's limits, and a name for the language model alone.

        vLLM 0.29's CPU platform looks that name up and fails where there is none (platforms/cpu.py asks for `use_mla`).
        """
        limits = super().engine_arguments(config, max_images=max_images, max_videos=max_videos)
        return {**limits, "hf_overrides": {"text_config": {"architectures": [self.engine_language_model]}}}

    def cut_inputs(self, language_model: torch.nn.Module, inputs: Mapping[str, Any], tokens: slice) -> dict[str, Any]:
        """Return the inputs for some tokens, with what the first layers add to those of images (V, H)."""
        cut = super().cut_inputs(language_model, inputs, tokens)
        visual = inputs["visual_pos_masks"]  # (1, T)
        if visual is None:
            return cut
        before, inside = int(visual[:, : tokens.start].sum()), int(visual[:, tokens].sum())
        added = [embeds[before : before + inside] for embeds in inputs["deepstack_visual_embeds"]]
        return {**cut, "visual_pos_masks": visual[:, tokens], "deepstack_visual_embeds": added}

    def tiny_layers(self, spec: TinyModelSpec) -> dict[str, Any]:
        """Return what the tiny language model's config has beside the family's."""
        return {}

    def build_tiny(self, spec: TinyModelSpec, tokenizer_corpus: Iterable[str], folder: str | Path) -> None:
        from lmm_r1.lmm_kits.qwen_vl.tiny_model import ROPE, TURNS, write_tiny
        from lmm_r1.lmm_kits.tiny_model import HEAD_DIM

        write_tiny(
            self,
            spec,
            tokenizer_corpus,
            folder,
            vision_config={
                "depth": VISION_LAYERS,
                "intermediate_size": 2 * spec.hidden_size,
                "out_hidden_size": spec.hidden_size,
                "num_position_embeddings": POSITIONS,
                "deepstack_visual_indexes": list(range(min(VISION_LAYERS - 1, spec.layers - 1))),
            },
            # Time, height and width take turns along the rotations instead of having a section each.
            text_config={
                "head_dim": HEAD_DIM,
                "rope_parameters": {**ROPE, "mrope_section": [6, 5, 5], "mrope_interleaved": True},
                **self.tiny_layers(spec),
            },
            # No default system turn, unlike in the releases before.
            chat_template=TURNS,
            image_processor=Qwen2VLImageProcessor(
                patch_size=16, size=dict(IMAGE_PIXELS), image_mean=HALF, image_std=HALF
            ),
            video_processor=Qwen3VLVideoProcessor(size=dict(VIDEO_PIXELS)),
        )
