"""The kit of GLM-4.1V: prompts and ends of turns, tokens of images within videos, the released layouts, ZeRO-3, other shapes."""

import copy
import json
from typing import Any

import pytest
import torch
from helpers.conversations import clip, message, picture
from helpers.tables import table
from helpers.tiny_models import encode
from transformers import Glm4vConfig, Glm4vForConditionalGeneration
from transformers.conversion_mapping import get_model_conversion_mapping

from lmm_r1.data.messages import Message
from lmm_r1.generation.request import PromptCodec
from lmm_r1.lmm_kits import get_kit
from lmm_r1.lmm_kits.checkpoint import encode_turn, without_end

KIT = get_kit("glm4v")
TURNS = [message("user", "1 + 2?"), message("assistant", "3"), message("user", "2 + 2?"), message("assistant", "4")]
# As its config.json has them.
TEXT_CONFIG = table("lmm_kits/glm4v", "text_config")
TOP_CONFIG = table("lmm_kits/glm4v", "top_config")
# The first release has the language model's settings at the top, later ones in a section of their own.
LAYOUTS = {
    "at the top": TOP_CONFIG | TEXT_CONFIG,
    "in a section": TOP_CONFIG | {"text_config": {"model_type": "glm4v_text", **TEXT_CONFIG}},
}
RELEASED_NAMES = {
    "lm_head.weight",
    "model.language_model.embed_tokens.weight",
    "model.language_model.norm.weight",
    *(
        f"model.language_model.layers.0.{name}.weight"
        for name in (
            *("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
            *("mlp.gate_up_proj", "mlp.down_proj", "self_attn.o_proj"),
        )
    ),
    *(f"model.language_model.layers.0.self_attn.{part}_proj.{kind}" for part in "qkv" for kind in ("weight", "bias")),
    *(f"model.visual.patch_embed.proj.{kind}" for kind in ("weight", "bias")),
    "model.visual.embeddings.position_embedding.weight",
    "model.visual.post_conv_layernorm.weight",
    *(
        f"model.visual.blocks.0.{name}.weight"
        for name in ("norm1", "norm2", "attn.qkv", "attn.proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    ),
    "model.visual.post_layernorm.weight",
    *(f"model.visual.downsample.{kind}" for kind in ("weight", "bias")),
    *(f"model.visual.merger.{name}.weight" for name in ("proj", "gate_proj", "up_proj", "down_proj")),
    *(f"model.visual.merger.post_projection_norm.{kind}" for kind in ("weight", "bias")),
}


def written(processor: Any, *messages: Message, add_generation_prompt: bool) -> str:
    return processor.tokenizer.decode(KIT.render(processor, messages, add_generation_prompt=add_generation_prompt))


def test_a_prompt_in_full(processor):
    messages = [
        message("system", "Think first."),
        message("user", picture(56, 56), "Which digit?", clip(2, 56, 56)),
        message("assistant", "<answer>4</answer>"),
        message("user", "Sure?"),
    ]
    assert written(processor, *messages, add_generation_prompt=True) == (
        "[gMASK]<sop><|system|>\nThink first.<|user|>\n<|begin_of_image|><|image|><|end_of_image|>Which digit?"
        "<|begin_of_video|><|video|><|end_of_video|><|assistant|>\n<answer>4</answer><|user|>\nSure?<|assistant|>\n"
    )


def test_each_step_of_a_video_is_an_image_with_its_second_behind_it(processor):
    # Two merged patches a frame, two frames a step; at half a frame a second a step lasts four.
    encoded = encode(KIT, processor, [message("user", clip(5, 112, 56, fps=0.5))])
    text = processor.tokenizer.decode(encoded.token_ids)
    image = f"<|begin_of_image|>{'<|image|>' * 8}<|end_of_image|>"
    assert f"<|begin_of_video|>{image}0{image}4{image}8<|end_of_video|>" in text
    assert encoded.media["video_grid_thw"].tolist() == [[3, 4, 8]]


def test_an_answer_ends_with_the_token_that_opens_the_users_turn_whether_more_follows_or_not(processor):
    first = "[gMASK]<sop><|user|>\n1 + 2?<|assistant|>\n3<|user|>"
    assert written(processor, *TURNS[:2], add_generation_prompt=False) == first
    assert written(processor, *TURNS, add_generation_prompt=False) == (f"{first}\n2 + 2?<|assistant|>\n4<|user|>")


@pytest.mark.parametrize(
    ("own", "template", "end"),
    [
        ("<|endoftext|>", None, "<|user|>"),
        ("<|endoftext|>", "{{ '<|user|>' }}{{ messages[0].content }}<|endoftext|>", "<|endoftext|>"),
        ("<|endoftext|>", "{{ messages[0].content }}", "<|endoftext|>"),
    ],
    ids=["as released", "a template that ends turns with it", "a template without turns"],
)
def test_the_end_token_is_what_stands_behind_an_answer(processor, folder, tmp_path, own, template, end):
    released = copy.deepcopy(processor)
    released.tokenizer.eos_token = own
    if template is not None:
        released.chat_template = released.tokenizer.chat_template = template
    released.save_pretrained(tmp_path)
    assert KIT.load_processor(str(tmp_path), trust_remote_code=False).tokenizer.eos_token == end


def test_an_answer_that_ends_with_its_tag_keeps_it(processor):
    """The release's generation config ends responses at the tag's token, and verifiers look for the tag."""
    own = copy.deepcopy(processor)
    own.tokenizer.add_tokens(["<answer>", "</answer>"])
    codec = PromptCodec(kit=KIT, processor=own, banned_token_ids=())
    ids = own.tokenizer("<answer>4</answer>")["input_ids"]
    assert codec.text(ids, ended=True) == codec.text(ids, ended=False) == "<answer>4</answer>"
    assert codec.text([*ids, own.tokenizer.eos_token_id], ended=True) == "<answer>4</answer>"
    assert codec.text([], ended=True) == ""
    # Where it is several tokens, none of them ends a response.
    assert KIT.spoken_end_ids(processor.tokenizer) == frozenset()
    # The user's turn opens behind it all the same.
    turn = encode_turn(KIT, own, message("user", "Sure?"), images=[])
    assert without_end(turn, ids) == turn


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_releases_settings_are_read_in_either_layout(layout, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LAYOUTS[layout]))
    config = KIT.load_config(str(tmp_path), trust_remote_code=False)
    text = config.text_config
    assert (text.num_key_value_heads, text.intermediate_size, text.vocab_size) == (2, 13696, 151552)
    with torch.device("meta"):
        rotary = Glm4vForConditionalGeneration._from_config(_of_one_layer(config)).model.language_model.rotary_emb
    # Half of a head's 128 dimensions turns: 32 rotations, 8 for time and 12 each for rows and columns.
    assert rotary.inv_freq.shape == (32,)
    assert rotary.mrope_section == [8, 12, 12]
    # The ids of images are those of the class.
    assert KIT.image_ends(config) == (151339, 151340)
    assert (config.image_token_id, config.video_start_token_id, config.video_end_token_id) == (151343, 151341, 151342)
    ids, media = KIT.filler_media(config)
    assert ids == [151339, 151343, 151340]
    # Two frames of 14 x 14 pixels in three colours.
    assert media["pixel_values"].shape == (4, 1176)


def _of_one_layer(config: Glm4vConfig) -> Glm4vConfig:
    config = copy.deepcopy(config)
    config.text_config.num_hidden_layers = config.vision_config.depth = 1
    return config


def test_weights_have_the_released_names_which_nothing_converts(tmp_path):
    config = _of_one_layer(Glm4vConfig(**TOP_CONFIG | {"text_config": TEXT_CONFIG}))
    with torch.device("meta"):
        model = Glm4vForConditionalGeneration(config)
    assert {name for name, _ in model.named_parameters()} == RELEASED_NAMES
    assert get_model_conversion_mapping(model, add_legacy=False) == []
    shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    assert shapes["model.visual.patch_embed.proj.weight"] == (1536, 3, 2, 14, 14)
    assert shapes["model.visual.embeddings.position_embedding.weight"] == (576, 1536)
    assert shapes["model.visual.blocks.0.mlp.up_proj.weight"] == (4096, 1536)
    assert shapes["model.visual.downsample.weight"] == (4096, 1536, 2, 2)
    assert shapes["model.visual.merger.up_proj.weight"] == (13696, 4096)
    assert shapes["model.language_model.layers.0.mlp.gate_up_proj.weight"] == (27392, 4096)
    assert shapes["model.language_model.layers.0.self_attn.k_proj.weight"] == (256, 4096)
