"""The kit of LLaVA-OneVision: prompts in full, crops and what is cut off them, the opened turn, names, other shapes."""

from helpers.conversations import message, picture
from helpers.tiny_models import encode, make_actor
from safetensors import safe_open
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from lmm_r1.lmm_kits import get_kit

KIT = get_kit("llava_onevision")


CHAT = [
    message("system", "Think first."),
    message("user", "Which ", picture(56, 56), "digit?"),
    message("assistant", "<answer>4</answer>"),
    message("user", picture(112, 56), picture(224, 224)),
]


def test_a_prompt_in_full(processor):
    # Each a crop of 4 x 4 patches, and a grid of 4 x 4, of 4 x 8 and of 16 x 16 of them, scaled down to 12 x 12, with an
    # end to each row.
    first, wide, large = ("<image>" * count for count in (16 + 16 + 4, 16 + 32 + 4, 16 + 144 + 12))
    written = (
        "<|im_start|>system \nThink first.<|im_end|><|im_start|>user {0}\nWhich \ndigit?<|im_end|>"
        "<|im_start|>assistant\n<answer>4</answer><|im_end|><|im_start|>user {1}{2}<|im_end|><|im_start|>assistant\n"
    )
    encoded = encode(KIT, processor, CHAT)
    assert processor.tokenizer.decode(encoded.token_ids) == written.format(first, wide, large)
    assert processor.tokenizer.decode(encoded.engine_token_ids) == written.format(*["<image>"] * 3)
    assert encoded.media["pixel_values"].shape == (3, 1 + 16, 3, 56, 56)
    assert encoded.media["image_sizes"].tolist() == [[56, 56], [56, 112], [224, 224]]


def test_what_is_saved_has_the_names_of_the_released_checkpoints(folder, tmp_path):
    actor = make_actor(folder)
    actor.model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as weights:
        names = set(weights.keys())
    with safe_open(folder / "model.safetensors", framework="pt") as weights:
        assert names == set(weights.keys())
    assert {
        "image_newline",
        "language_model.lm_head.weight",
        "language_model.model.embed_tokens.weight",
        "language_model.model.layers.0.self_attn.q_proj.bias",
        "multi_modal_projector.linear_1.weight",
        "vision_tower.vision_model.embeddings.patch_embedding.weight",
        "vision_tower.vision_model.encoder.layers.0.self_attn.out_proj.weight",
    } <= names
    # Transformers' table of them: each begins with what it renames.
    known = [pattern for one in get_checkpoint_conversion_mapping(KIT.model_type) for pattern in one.source_patterns]
    assert all(any(name.startswith(pattern.lstrip("^")) for pattern in known) for name in names), known
