"""The chat template of Phi-4-multimodal, as the release has it, with images and audio in place of their tokens."""

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


def chat_template(*, image_token: str, audio_token: str) -> str:
    """Return the template for a tokenizer with these media tokens."""
    return _TEMPLATE.replace("IMAGE_TOKEN", image_token).replace("AUDIO_TOKEN", audio_token)
