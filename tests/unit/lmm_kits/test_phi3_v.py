"""The kit of Phi-3.5-vision: crops and their tokens, the layout of image features, tags in texts, Microsoft's names."""

import copy
import json
import re
from typing import Any

import pytest
import torch
from helpers.conversations import message, picture
from helpers.engines import running_engine
from helpers.tables import table
from helpers.tiny_models import encode, make_actor
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, CLIPVisionModel

from lmm_r1.data.messages import Message, TextPart
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits import get_kit
from lmm_r1.lmm_kits.phi3_v.modeling import Phi3VConfig, Phi3VForCausalLM, Phi3VVisionTower, lay_out, merge_patches
from lmm_r1.lmm_kits.phi3_v.processing import CLIP_MEAN, CLIP_STD, Phi3VImageProcessor, Phi3VProcessor, hd_transform

KIT = get_kit("phi3_v")
WIDE = picture(200, 99)
BLACK_AND_WHITE = [[(value - mean) / std for mean, std in zip(CLIP_MEAN, CLIP_STD, strict=True)] for value in (0, 1)]


@pytest.mark.parametrize(
    ("width", "height", "num_crops", "tokens"),
    table("lmm_kits/phi3_v", "an_image_has_as_many_tokens_as_computed_by_hand"),
)
def test_an_image_has_as_many_tokens_as_computed_by_hand(width, height, num_crops, tokens):
    images = Phi3VImageProcessor(num_crops=num_crops)
    assert images.num_image_tokens(width=width, height=height) == tokens
    grid = hd_transform(Image.new("RGB", (width, height)), num_crops=num_crops)
    rows, columns = grid.height / 336, grid.width / 336
    assert (rows * columns + 1) * 144 + (rows + 1) * 12 + 1 == tokens


def test_an_image_too_long_for_its_crops_is_refused_with_its_size(processor):
    # 4 crops are 1344 pixels: scaled to that, 1344 : 1 keeps one pixel of height and 1345 : 1 none.
    assert encode(KIT, processor, [message("user", picture(1344, 1))]).images
    with pytest.raises(UserError, match=r"1x1345.*1345 times the other"):
        encode(KIT, processor, [message("user", picture(1, 1345))])


def test_the_missing_height_is_white_and_the_odd_row_lies_below():
    # 200 : 95 becomes 672 x 319, where 17 rows are missing: 8 above, 9 below.
    pixels = Phi3VImageProcessor()(Image.new("RGB", (200, 95)), return_tensors="pt")["pixel_values"]
    black, white = torch.tensor(BLACK_AND_WHITE)
    for crop in pixels[0, 1:3]:
        for row, expected in ((0, white), (7, white), (8, black), (326, black), (327, white), (335, white)):
            torch.testing.assert_close(crop[:, row, 100], expected)


def test_a_standing_image_is_the_lying_one_turned_over():
    standing = Phi3VImageProcessor()(WIDE.transpose(Image.Transpose.TRANSPOSE), return_tensors="pt")
    lying = Phi3VImageProcessor()(WIDE, return_tensors="pt")
    assert standing["image_sizes"].tolist() == [[672, 336]]
    assert lying["image_sizes"].tolist() == [[336, 672]]
    assert torch.equal(standing["pixel_values"][:, 1:], lying["pixel_values"][:, 1:].mT)


def test_the_whole_comes_first_then_the_crops_in_reading_order_then_zeros():
    image = Image.new("RGB", (672, 336), "black")
    image.paste("white", (336, 0, 672, 336))
    (pixels,) = Phi3VImageProcessor()(image, return_tensors="pt")["pixel_values"]
    black, white = torch.tensor(BLACK_AND_WHITE)
    assert pixels.shape == (5, 3, 336, 336)
    torch.testing.assert_close(pixels[0, :, 100, 100], black)
    torch.testing.assert_close(pixels[0, :, 100, 300], white)
    torch.testing.assert_close(pixels[1], black.view(3, 1, 1).expand(3, 336, 336))
    torch.testing.assert_close(pixels[2], white.view(3, 1, 1).expand(3, 336, 336))
    assert not pixels[3:].any()


# Crops of 4 x 4 patches, of which each patch is one number: those of the whole, 100 to 115, then those of two crops.
CROPS = torch.stack([torch.arange(first, first + 16) for first in (100, 0, 16)])[..., None]
WHOLE = [[100, 101, 104, 105], [102, 103, 106, 107], [-1] * 4, [108, 109, 112, 113], [110, 111, 114, 115], [-1] * 4]


def laid_out(rows: int, columns: int) -> list[list[int]]:
    newline, separator = torch.full((1, 1, 1, 4), -1), torch.full((1, 1, 4), -2)
    return lay_out(CROPS, rows=rows, columns=columns, newline=newline, separator=separator).tolist()


def test_two_crops_side_by_side_are_laid_out_as_drawn_by_hand():
    assert laid_out(1, 2) == [
        *([0, 1, 4, 5], [2, 3, 6, 7], [16, 17, 20, 21], [18, 19, 22, 23], [-1] * 4),
        *([8, 9, 12, 13], [10, 11, 14, 15], [24, 25, 28, 29], [26, 27, 30, 31], [-1] * 4),
        [-2] * 4,
        *WHOLE,
    ]


def test_two_crops_one_above_the_other_are_laid_out_as_drawn_by_hand():
    assert laid_out(2, 1) == [
        *([0, 1, 4, 5], [2, 3, 6, 7], [-1] * 4),
        *([8, 9, 12, 13], [10, 11, 14, 15], [-1] * 4),
        *([16, 17, 20, 21], [18, 19, 22, 23], [-1] * 4),
        *([24, 25, 28, 29], [26, 27, 30, 31], [-1] * 4),
        [-2] * 4,
        *WHOLE,
    ]


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (2, 1), (1, 3), (3, 2)])
def test_patches_are_merged_as_vllm_merges_them(rows, columns):
    from vllm.model_executor.models.phi3v import Phi3HDImageEmbedding

    crops = torch.randn(rows * columns, 576, 1024)
    (theirs,) = Phi3HDImageEmbedding.reshape_hd_patches_2x2merge(None, crops, rows, columns)
    assert torch.equal(merge_patches(crops, rows=rows, columns=columns), theirs)


def test_the_release_reads_the_23rd_of_24_layers():
    config = Phi3VConfig()
    assert (config.clip_layers, config.clip_config.hidden_size, config.image_token_id) == (23, 1024, 32044)
    assert config.clip_config.hidden_act == "quick_gelu"
    assert Phi3VConfig(img_processor={"layer_idx": -1}).clip_layers == 24
    assert Phi3VConfig.from_dict(config.to_dict()).to_dict() == config.to_dict()
    with pytest.raises(ValueError, match="glb_sub"):
        Phi3VConfig(embd_layer={"hd_transform_order": "glb_sub"})


def test_microsofts_long_rope_is_read():
    factors = [1.0] * 48
    config = Phi3VConfig(rope_scaling={"type": "su", "short_factor": factors, "long_factor": factors})
    assert config.rope_parameters["rope_type"] == "longrope"


def test_the_tower_gives_the_last_hidden_state_but_one_without_the_class_token():
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 1, "num_hidden_layers": 4}
    overrides = {**sizes, "patch_size": 112}
    config = Phi3VConfig(img_processor={"image_dim_out": 32, "clip_overrides": overrides})
    clip = CLIPVisionModel(config.clip_config).eval()
    tower = Phi3VVisionTower(config.clip_config, layers=config.clip_layers).eval()
    tower.load_state_dict(clip.state_dict())
    pixels = torch.randn(2, 3, 336, 336)
    with torch.no_grad():
        states = clip(pixels, output_hidden_states=True).hidden_states
        torch.testing.assert_close(tower(pixels), states[-2][:, 1:])
        assert not torch.equal(states[-1], states[-2])


def loss_of(model: torch.nn.Module, prompt: Any) -> torch.Tensor:
    ids = torch.tensor([prompt.token_ids])
    return model(input_ids=ids, labels=ids, **prompt.media).loss


def test_all_but_the_named_parameters_get_a_gradient(folder, processor):
    model = make_actor(folder).model
    # Two crops beside one another, so that each separator is used; the ids hold no more than a few of the embedding.
    loss_of(model, encode(KIT, processor, [message("user", WIDE, "Which digit?")])).backward()
    without = {name for name, weight in model.named_parameters() if weight.grad is None}
    assert without == {name for name, _ in model.named_parameters() if name.startswith(KIT.untrained_prefixes)}
    assert without
    assert all(weight.grad.any() for name, weight in model.named_parameters() if name not in without)


def test_gradient_checkpointing_and_eager_attention_change_nothing(folder, processor):
    prompt = encode(KIT, processor, [message("user", WIDE, "Which digit?")])
    gradients = []
    for attention, checkpointing in (("sdpa", False), ("sdpa", True), ("eager", False)):
        model = make_actor(folder, attention=attention).model
        tower = model.model.vision_embed_tokens.img_processor["vision_model"]
        assert tower.config._attn_implementation == attention
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            assert all(layer.gradient_checkpointing for layer in tower.encoder.layers)
            model.train()
        loss_of(model, prompt).backward()
        gradients.append({name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None})
    for others in gradients[1:]:
        torch.testing.assert_close(others, gradients[0], atol=1e-5, rtol=1e-4)


def test_generation_with_a_cache_reads_the_image_once_and_agrees_with_none(folder, processor):
    model = make_actor(folder).model
    prompt = encode(KIT, processor, [message("user", WIDE, "Which digit?")])
    ids = torch.tensor([prompt.token_ids])
    settings = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, **prompt.media}
    cached, uncached = (model.generate(ids, use_cache=cache, **settings)[0].tolist() for cache in (True, False))
    assert cached == uncached
    assert len(cached) == len(prompt.token_ids) + 4


def test_placeholders_that_do_not_fit_the_image_are_refused(folder, processor):
    model = make_actor(folder).model
    prompt = encode(KIT, processor, [message("user", WIDE, "Which digit?")])
    # Crops of 9 tokens: (1 * 2 + 1) * 9 + 2 * 3 + 1 = 34.
    ids = list(prompt.token_ids)
    ids[ids.index(processor.image_token_id)] = 5
    with pytest.raises(ValueError, match="33 image placeholders in the ids for 34 tokens"):
        model(input_ids=torch.tensor([ids]), **prompt.media)


def test_images_are_numbered_through_the_conversation_each_on_a_line_of_its_own(processor):
    text = processor.apply_chat_template(
        [
            {"role": "system", "content": "Think."},
            {"role": "user", "content": [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "Add."}]},
            {"role": "assistant", "content": "4"},
            {"role": "user", "content": [{"type": "text", "text": "And "}, {"type": "image"}]},
        ],
        add_generation_prompt=True,
    )
    assert text == (
        "<|system|>\nThink.<|end|>\n<|user|>\n<|image_1|>\n<|image_2|>\nAdd.<|end|>\n<|assistant|>\n4<|end|>\n"
        "<|user|>\nAnd <|image_3|>\n<|end|>\n<|assistant|>\n"
    )


@pytest.mark.parametrize(
    "messages",
    [
        [message("user", "What is <|image_1|>?")],
        [message("user", WIDE, "What is <|image_27|>?")],
        [Message(role="user", parts=(TextPart("What is <|ima"), TextPart("ge_1|>?")))],
    ],
    ids=["for no image", "beside an image", "in two pieces"],
)
def test_a_typed_image_tag_is_text_and_refused_where_tags_stand_for_images(processor, messages):
    encoded = encode(KIT, processor, messages)
    assert encoded.engine_token_ids.count(processor.image_token_id) == len(encoded.images)
    assert re.search(r"What is <\|image_\d+\|>\?", processor.tokenizer.decode(encoded.engine_token_ids))
    with pytest.raises(UserError, match=r"media token <\|image_|1 placeholders for the 0 images"):
        KIT.chat_text(processor, messages, add_generation_prompt=True)


@pytest.mark.parametrize("text", ["<|image_2|> <|image_1|>", "<|image_1|> <|image_1|>", "<|image_1|>"])
def test_tags_that_do_not_count_the_images_are_refused(processor, text):
    with pytest.raises(ValueError, match="image"):
        processor(text=text, images=[WIDE, WIDE])


def test_every_piece_of_text_begins_with_the_start_token_where_the_tokenizer_writes_one(processor):
    tokenizer = copy.deepcopy(processor.tokenizer)
    start = tokenizer.convert_tokens_to_ids("<s>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", start)])
    begun = Phi3VProcessor(processor.image_processor, tokenizer)
    encoded = encode(KIT, begun, [message("user", WIDE, "Which digit?")])
    before, after = (processor.tokenizer(text)["input_ids"] for text in ("<|user|>\n", "\nWhich digit?<|end|>\n"))
    last = processor.tokenizer("<|assistant|>\n")["input_ids"]
    image = [processor.image_token_id]
    assert encoded.token_ids == [start, *before, *image * 34, start, *after, *last]
    assert encoded.engine_token_ids == [start, *before, *image, start, *after, *last]


def test_the_end_token_is_the_one_that_ends_turns(folder, processor, tmp_path):
    assert (processor.tokenizer.eos_token, processor.tokenizer.pad_token) == ("<|end|>", "<|endoftext|>")
    released = copy.deepcopy(processor)
    released.tokenizer.eos_token = "<|endoftext|>"
    released.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    loaded = KIT.load_processor(str(tmp_path), trust_remote_code=False)
    assert loaded.tokenizer.eos_token == "<|end|>"


def test_a_checkpoint_as_microsoft_writes_it_loads(folder, processor, tmp_path):
    """Settings with remote code, the template in the tokenizer's config, the embedding stored twice."""
    processor.tokenizer.save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps(
            {
                "auto_map": {
                    "AutoImageProcessor": "image_processing_phi3_v.Phi3VImageProcessor",
                    "AutoProcessor": "processing_phi3_v.Phi3VProcessor",
                },
                "num_crops": 16,
                "image_mean": CLIP_MEAN,
                "image_std": CLIP_STD,
                "image_processor_type": "Phi3VImageProcessor",
                "num_img_tokens": 9,
                "processor_class": "Phi3VProcessor",
                "transformers_version": "4.38.1",
            }
        )
    )
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "configuration_phi3_v.Phi3VConfig"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    weights["model.vision_embed_tokens.wte.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = KIT.load_processor(str(tmp_path), trust_remote_code=False)
    assert loaded.image_processor.num_crops == 16
    assert loaded.chat_template == processor.chat_template
    ids = torch.arange(20)[None]
    with torch.no_grad():
        theirs, ours = (make_actor(path).model(ids).logits for path in (tmp_path, folder))
    assert torch.equal(theirs, ours)


@pytest.mark.parametrize("missing", ["lm_head.weight", "model.vision_embed_tokens.sub_GN"])
def test_a_checkpoint_without_one_of_its_weights_is_refused(folder, tmp_path, missing):
    weights = load_file(folder / "model.safetensors")
    del weights[missing]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(UserError, match=f"1 weights are not in this checkpoint, {missing}"):
        make_actor(tmp_path)


def microsofts_names(config: Phi3VConfig) -> set[str]:
    """The names in the release's weight files, as public loaders of them list them."""
    norms = [f"{name}.{part}" for name in ("layer_norm1", "layer_norm2") for part in ("weight", "bias")]
    linear = [f"self_attn.{name}_proj" for name in ("q", "k", "v", "out")] + ["mlp.fc1", "mlp.fc2"]
    in_layer = norms + [f"{name}.{part}" for name in linear for part in ("weight", "bias")]
    tower = {f"encoder.layers.{layer}.{name}" for layer in range(24) for name in in_layer}
    tower |= {f"{name}.{part}" for name in ("pre_layrnorm", "post_layernorm") for part in ("weight", "bias")}
    tower |= {"class_embedding", "patch_embedding.weight", "position_embedding.weight"}
    tower = {f"embeddings.{name}" if "embedding" in name else name for name in tower}
    images = {f"img_projection.{index}.{part}" for index in (0, 2) for part in ("weight", "bias")} | {
        "glb_GN",
        "sub_GN",
    }
    in_layer = ("input_layernorm", "post_attention_layernorm", "mlp.down_proj", "mlp.gate_up_proj")
    in_layer = (*in_layer, "self_attn.o_proj", "self_attn.qkv_proj")
    text = {f"layers.{layer}.{name}.weight" for layer in range(config.num_hidden_layers) for name in in_layer}
    text |= {"embed_tokens.weight", "norm.weight"}
    text |= {f"vision_embed_tokens.{name}" for name in images}
    text |= {f"vision_embed_tokens.img_processor.vision_model.{name}" for name in tower}
    return {"lm_head.weight"} | {f"model.{name}" for name in text}


def test_a_saved_folder_has_microsofts_names_and_loads_with_the_auto_classes(folder, processor, tmp_path):
    actor = make_actor(folder)
    actor.model.save_pretrained(tmp_path)
    KIT.save_processor(processor, tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert set(file.keys()) == microsofts_names(actor.model.config)
        assert file.get_slice("model.vision_embed_tokens.sub_GN").get_shape() == [1, 1, 1, 4 * 32]
    assert set(dict(actor.model.named_parameters())) == microsofts_names(actor.model.config)

    assert isinstance(AutoConfig.from_pretrained(tmp_path), Phi3VConfig)
    again = AutoProcessor.from_pretrained(tmp_path)
    assert again.chat_template == processor.chat_template
    prompt = encode(KIT, again, [message("user", WIDE, "Which digit?")])
    assert prompt.token_ids == encode(KIT, processor, [message("user", WIDE, "Which digit?")]).token_ids
    ids = torch.tensor([prompt.token_ids])
    with torch.no_grad():
        logits = actor.model(ids, **prompt.media).logits
        for auto in (AutoModelForCausalLM, AutoModelForImageTextToText):
            model = auto.from_pretrained(tmp_path).eval()
            assert isinstance(model, Phi3VForCausalLM)
            assert torch.equal(model(ids, **prompt.media).logits, logits)


@pytest.mark.slow
def test_the_engine_takes_prompts_with_tags_in_their_text_as_well(folder, processor):
    messages = [message("user", WIDE, "Add it to", picture(56, 112), "please.")]
    prompt = encode(KIT, processor, messages)
    text = "<|user|>\n<|image_1|>\nAdd it to<|image_2|>\nplease.<|end|>\n<|assistant|>\n"
    with running_engine(KIT, folder, max_images=2) as llm:
        requests = [
            {"prompt_token_ids": prompt.engine_token_ids, "multi_modal_data": {"image": prompt.images}},
            {"prompt": text, "multi_modal_data": {"image": prompt.images}},
        ]
        for output in llm.generate(requests, use_tqdm=False):
            assert list(output.prompt_token_ids) == prompt.token_ids
