"""Phi-4-multimodal's towers (names of their weights, which are dead, attention) and its release's chat template."""

from __future__ import annotations

from transformers import Phi4MultimodalConfig, Phi4MultimodalForCausalLM
from transformers.models.phi4_multimodal.modeling_phi4_multimodal import (
    Phi4MultimodalAudioAttention,
    Phi4MultimodalVisionAttention,
)

IMAGE_EMBED = "model.embed_tokens_extend.image_embed."
AUDIO_EMBED = "model.embed_tokens_extend.audio_embed."
VISION_TOWER = f"{IMAGE_EMBED}img_processor."
# The release's tokenizer names <|endoftext|> its end token, yet every turn of its chat ends with this one.
TURN_END = "<|end|>"
# No default system turn, no line breaks between turns, nothing between two images that stand side by side.
_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|' + message.role + '|>' -}}
{%- if message.content is string -%}
{{- message.content -}}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}
{{- 'IMAGE_TOKEN' -}}
{%- elif part.type == 'audio' -%}
{{- 'AUDIO_TOKEN' -}}
{%- elif part.type == 'text' -%}
{{- part.text -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- if message.role == 'system' and message.tools -%}
{{- '<|tool|>' + message.tools + '<|/tool|>' -}}
{%- endif -%}
{{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


def attend_bidirectionally(model: Phi4MultimodalForCausalLM) -> None:
    """Stop the encoders' attention from being causal.

    Transformers (5.15) marks it causal, which SDPA and flash-attn go by wherever they get no mask: an image whose
    patches are all real was seen causally, unless another crop of the batch had padding.
    """
    for module in model.modules():
        if isinstance(module, (Phi4MultimodalVisionAttention, Phi4MultimodalAudioAttention)):
            module.is_causal = False


def vision_depth(config: Phi4MultimodalConfig) -> int:
    """Return how many layers of the vision tower the image features have been through."""
    layers, taken = config.vision_config.num_hidden_layers, config.vision_config.feature_layer
    return taken if taken >= 0 else layers + 1 + taken


def dead_prefixes(config: Phi4MultimodalConfig) -> tuple[str, ...]:
    """Return the prefixes of the parameters that no loss of ours reaches."""
    behind = range(vision_depth(config), config.vision_config.num_hidden_layers)
    layers = (f"{VISION_TOWER}encoder.layers.{index}." for index in behind)
    return (AUDIO_EMBED, f"{VISION_TOWER}head.", f"{VISION_TOWER}post_layernorm.", *layers)


def chat_template(*, image_token: str, audio_token: str) -> str:
    """Return the template for a tokenizer with these media tokens."""
    return _TEMPLATE.replace("IMAGE_TOKEN", image_token).replace("AUDIO_TOKEN", audio_token)
