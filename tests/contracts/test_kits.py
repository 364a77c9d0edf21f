"""What every kit must keep to, checked on its tiny checkpoint against Hugging Face's own processor and model."""

import itertools
import json
import pickle
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.conversations import as_written, message, picture, row
from helpers.passes import next_log_probs
from helpers.tables import kits_with
from helpers.tiny_models import check_batch, encode, make_actor, pad, positions_seen
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from lmm_r1.data.messages import ImagePart, Message, images_of
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits import KITS, LmmKit, get_kit, kit_of
from lmm_r1.models.actor import KitActor
from lmm_r1.supervised.samples import encode_sample

IMAGE_KITS = kits_with("images")
SMALL, WIDE, TALL = picture(56, 56), picture(140, 84), picture(84, 112)
TEXTS = {
    "one turn": [message("user", "What is 12 + 34?")],
    "system prompt": [message("system", "Think first."), message("user", "What is 12 + 34?")],
    "several turns": [
        message("user", "What is 12 + 34?"),
        message("assistant", "<think>easy</think><answer>46</answer>"),
        message("user", "And 46 + 1?"),
    ],
}
IMAGES = {
    "one image": [message("user", "Which digit ", SMALL, " is this?")],
    "three images of different sizes": [message("user", SMALL, WIDE, "Add them to", TALL, "please.")],
    "image first": [message("user", WIDE, "Which digit is this?")],
    "image last": [message("user", "Which digit is this?", TALL)],
    "only an image": [message("user", WIDE)],
    "images in several turns": [
        message("system", "Think first."),
        message("user", TALL, "Which digit?"),
        message("assistant", "<think>easy</think><answer>4</answer>"),
        message("user", "And this one?", SMALL),
    ],
}
# Placeholders of a 112 x 84 image (width x height): as it is, with max_pixels 5000, with min_pixels 20000.
# Qwen2-VL, Qwen2.5-VL and GLM-4.1V to 4.6V have one per 28 x 28 pixels: 3 x 4; sqrt(5000 / 9408) = 0.729 gives 2 x 2;
# sqrt(20000 / 9408) = 1.458 gives 5 x 6.
# Qwen3-VL, with experts or without, has one per 32 x 32: 2.6 x 3.5 round to 3 x 4; with 0.729, 1.9 x 2.6 down to 1 x 2;
# with 1.458, 3.8 x 5.1 up to 4 x 6.
# Gemma 3 scales every image to one size: 112 x 112 pixels in patches of 14, of which each 2 x 2 become one placeholder,
# are 4 x 4 whatever the bounds.
# Phi-3.5-vision scales every image to as many crops as its shape allows, with ratio 4 : 3 and 4 crops at most to 2 x 2
# whatever the bounds: here 3 x 3 for each and for the whole, 6 + 3 newlines and a separator, 5 * 9 + 9 + 1.
# Idefics 3 and SmolVLM scale the longer side of every image to one length, of two tiles in the tiny models: 168 x 126 pixels
# are 2 x 2 tiles of 84 and the whole as one more, whatever the bounds, with 6 x 6 patches each, of which 3 x 3 become one: 5 * 4.
# InternVL takes its shape alone for the number of tiles: 4 : 3 is as far from 1 x 1 tiles as from 2 x 2, and it is large
# enough for these; with the whole 5 tiles of 4.
# LLaVA-OneVision has 4 x 4 patches for the whole and 4 x 4 a crop of 56 pixels: as it is, and with 81 x 61 pixels, 2 x 2
# crops, of whose 8 x 8 patches 8 x 6 show the image, with an end to each row, 16 + 48 + 6; with 164 x 123, 3 x 3 crops, of
# whose 12 x 12 patches 12 x 9 do, and one row of padding that cannot be halved, 16 + 120 + 10.
BOUNDED_PLACEHOLDERS = {
    "aria": (16, 16, 16),
    "gemma3": (16, 16, 16),
    "gemma4": (63, 63, 63),
    "glm4v": (12, 4, 30),
    "glm4v_moe": (12, 4, 30),
    "idefics3": (20, 20, 20),
    "internvl": (20, 20, 20),
    "janus": (36, 36, 36),
    "llava_onevision": (70, 70, 146),
    "phi3_v": (55, 55, 55),
    "phi4_multimodal": (477, 494, 477),
    "qwen2_5_vl": (12, 4, 30),
    "qwen2_vl": (12, 4, 30),
    "qwen3_5": (12, 2, 24),
    "qwen3_5_moe": (12, 2, 24),
    "qwen3_vl": (12, 2, 24),
    "qwen3_vl_moe": (12, 2, 24),
    "smolvlm": (20, 20, 20),
}
# Their chat template takes white space off both ends of a text, as the released one does.
TRIMMING = ("gemma3", "gemma4", "janus")
# Their chat template takes a list of parts from the user alone, and a string for all other turns.
PLAIN_TURNS = ("glm4v", "glm4v_moe")
# Their tokenizer puts the start token before a rendered chat, and their processor a default system prompt.
COMPLETED = ("janus",)
# Their processor writes marks and line breaks between the tiles of an image, which the engine writes itself.
TILES = re.compile(
    r"(?:(?:<fake_token_around_image><row_\d_col_\d>(?:<image>)+)+\n)*\n?"
    r"<fake_token_around_image><global-img>(?:<image>)+<fake_token_around_image>"
)
TILED = ("idefics3", "smolvlm")
CASES = [(name, case) for name in KITS for case in TEXTS] + [(name, case) for name in IMAGE_KITS for case in IMAGES]


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A kit with its tiny checkpoint."""

    kit: LmmKit
    folder: Path
    processor: Any
    actor: KitActor

    @property
    def tokenizer(self) -> Any:
        return self.kit.tokenizer_of(self.processor)


@pytest.fixture(scope="module")
def load(tiny_checkpoint: Callable[[str], Path]) -> Callable[[str], Loaded]:
    @cache
    def loaded(name: str) -> Loaded:
        kit, folder = get_kit(name), tiny_checkpoint(name)
        processor = kit.load_processor(str(folder), trust_remote_code=False)
        return Loaded(kit=kit, folder=folder, processor=processor, actor=make_actor(folder))

    return loaded


def conversation(case: str) -> list[Message]:
    return (TEXTS | IMAGES)[case]


def reference(loaded: Loaded, messages: list[Message]) -> dict[str, torch.Tensor]:
    """What Hugging Face's processor makes of the conversation, as its documentation has one call it."""
    images = [part.source for part in images_of(messages)]
    chat = []
    count = itertools.count(1)
    for turn in messages:
        if loaded.kit.model_type == "phi3_v":
            # Its model card writes the images into the text, counted over the conversation.
            parts = [f"<|image_{next(count)}|>\n" if isinstance(p, ImagePart) else p.text for p in turn.parts]
            chat.append({"role": turn.role, "content": "".join(parts)})
            continue
        parts = [
            {"type": "image"} if isinstance(p, ImagePart) else {"type": "text", "text": p.text} for p in turn.parts
        ]
        # A language model's template takes a string.
        as_parts = loaded.kit.takes_images and (turn.role == "user" or loaded.kit.model_type not in PLAIN_TURNS)
        chat.append({"role": turn.role, "content": parts if as_parts else turn.parts[0].text})
    text = loaded.processor.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    if loaded.kit.model_type in COMPLETED:
        return dict(loaded.processor(text=[text], images=images or None, return_tensors="pt"))
    if not images:
        return dict(loaded.tokenizer([text], add_special_tokens=False, return_tensors="pt"))
    # The template has written the start token, if there is one.
    return dict(loaded.processor(text=[text], images=images, add_special_tokens=False, return_tensors="pt"))


def test_a_kit_is_registered_under_its_model_type():
    assert {name: get_kit(name).model_type for name in KITS} == {name: name for name in KITS}
    assert set(BOUNDED_PLACEHOLDERS) == set(IMAGE_KITS)


@pytest.mark.parametrize(("name", "case"), CASES)
def test_ids_and_media_are_the_processors_own(load, name, case):
    loaded, messages = load(name), conversation(case)
    encoded = encode(loaded.kit, loaded.processor, messages)
    expected = reference(loaded, messages)
    assert encoded.token_ids == expected["input_ids"][0].tolist()
    assert (encoded.media is not None) == bool(images_of(messages))
    for key, value in (encoded.media or {}).items():
        assert torch.equal(value, expected[key]), key
    ids_and_masks = {"input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids"}
    assert set(encoded.media or {}) == set(expected) - ids_and_masks


@pytest.mark.parametrize(("name", "case"), CASES)
def test_the_engine_gets_one_placeholder_per_image(load, name, case):
    loaded, messages = load(name), conversation(case)
    encoded = encode(loaded.kit, loaded.processor, messages)
    placeholders = loaded.kit.placeholder_ids(loaded.processor)
    assert sum(token in placeholders for token in encoded.engine_token_ids) == len(images_of(messages))
    if name in TILED:
        expanded, collapsed = (loaded.tokenizer.decode(ids) for ids in (encoded.token_ids, encoded.engine_token_ids))
        assert TILES.sub("<image>", expanded) == collapsed
    else:
        assert [t for t in encoded.engine_token_ids if t not in placeholders] == [
            t for t in encoded.token_ids if t not in placeholders
        ]
    assert loaded.kit.render(loaded.processor, messages, add_generation_prompt=True) == encoded.engine_token_ids
    assert len(encoded.images) == len(images_of(messages))


@pytest.mark.parametrize("name", IMAGE_KITS)
def test_pixel_bounds_of_an_image_change_its_patches_as_computed_by_hand(load, name):
    loaded = load(name)
    counts = []
    for bounds in ({}, {"max_pixels": 5000}, {"min_pixels": 20000}):
        part = ImagePart(picture(112, 84), **bounds)
        encoded = encode(loaded.kit, loaded.processor, [message("user", part, "Which digit?")])
        placeholders = loaded.kit.placeholder_ids(loaded.processor)
        counts.append(sum(token in placeholders for token in encoded.token_ids))
        (image,) = encoded.images
        expected = reference(loaded, [message("user", image, "Which digit?")])
        assert encoded.token_ids == expected["input_ids"][0].tolist(), "the engine would cut the image differently"
    assert tuple(counts) == BOUNDED_PLACEHOLDERS[name]


@pytest.mark.parametrize("name", IMAGE_KITS)
def test_a_media_token_typed_in_a_text_is_text_and_refused_where_templates_marks_are_told_by_their_spelling(
    load, name
):
    loaded = load(name)
    config = loaded.kit.load_config(str(loaded.folder), trust_remote_code=False)
    banned = loaded.kit.banned_token_ids(config, loaded.tokenizer)
    tokens = loaded.tokenizer.convert_ids_to_tokens([token for token in banned if token < len(loaded.tokenizer)])
    assert set(loaded.kit.placeholder_ids(loaded.processor)) <= set(banned)
    for pictures in ((), (SMALL,)):
        harmless = encode(loaded.kit, loaded.processor, [message("user", *pictures, "What is it?")])
        for token in tokens:
            typed = [message("user", *pictures, f"What is {token}?")]
            encoded = encode(loaded.kit, loaded.processor, typed)
            assert [one for one in encoded.token_ids if one in banned] == [
                one for one in harmless.token_ids if one in banned
            ]
            assert f"What is {token}?" in loaded.tokenizer.decode(encoded.engine_token_ids)
            with pytest.raises(UserError, match="media token"):
                loaded.kit.chat_text(loaded.processor, typed, add_generation_prompt=True)


@pytest.mark.parametrize("name", [name for name in KITS if name not in IMAGE_KITS])
def test_a_kit_without_an_image_tower_refuses_images(load, name):
    with pytest.raises(UserError, match="cannot take the 1 image"):
        encode(load(name).kit, load(name).processor, [message("user", SMALL, "Which digit?")])
    assert load(name).kit.filler_media(load(name).actor.model_config) is None


@pytest.mark.parametrize("name", KITS)
def test_kit_and_prompt_survive_pickling(load, name):
    loaded = load(name)
    case = "one image" if loaded.kit.takes_images else "one turn"
    assert pickle.loads(pickle.dumps(loaded.kit)) == loaded.kit
    encoded = encode(loaded.kit, loaded.processor, conversation(case))
    copy = pickle.loads(pickle.dumps(encoded))
    assert (copy.token_ids, copy.engine_token_ids) == (encoded.token_ids, encoded.engine_token_ids)
    assert copy.images == encoded.images
    for key, value in (encoded.media or {}).items():
        assert torch.equal(copy.media[key], value)


@pytest.mark.parametrize("name", KITS)
def test_banned_are_the_media_tokens_and_the_ids_beyond_the_tokenizer(load, name):
    loaded = load(name)
    config = loaded.kit.load_config(str(loaded.folder), trust_remote_code=False)
    known = len(loaded.tokenizer)
    config.get_text_config().vocab_size = known + 5
    # Aria writes an image between the tokens that language models use for infilling.
    # Idefics 3 marks the tiles of an image with their places.
    words = (
        "vision image video audio <|img|> fim_prefix fim_suffix <img> </img> IMG_CONTEXT <global-img> <row_".split()
    )
    media = {
        token
        for token, added in loaded.tokenizer.added_tokens_decoder.items()
        if any(word in added.content for word in words)
    }
    banned = loaded.kit.banned_token_ids(config, loaded.tokenizer)
    assert set(banned) == media | set(range(known, known + 5))
    assert len(set(banned)) == len(banned)
    assert bool(media) == loaded.kit.takes_images
    assert loaded.tokenizer.eos_token_id not in banned


def mixed_rows(loaded: Loaded) -> list[tuple[list[int], dict | None]]:
    """Prompts with and without images, each followed by a response of its own length."""
    cases = ["system prompt", "one turn", "several turns"]
    if loaded.kit.takes_images:
        cases = ["one image", "one turn", "images in several turns", "three images of different sizes"]
    generator = torch.Generator().manual_seed(1)
    rows = []
    for index, case in enumerate(cases):
        encoded = encode(loaded.kit, loaded.processor, conversation(case))
        response = torch.randint(0, 250, (3 + 2 * index,), generator=generator).tolist()
        rows.append(([*encoded.token_ids, *response], encoded.media))
    return rows


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", KITS)
def test_a_padded_mixed_batch_gives_each_row_its_own_log_probs(load, name, side):
    loaded = load(name)
    rows = mixed_rows(loaded)
    check_batch(loaded.actor, rows, side=side)


@pytest.mark.parametrize(("name", "case"), CASES)
def test_positions_are_those_that_the_model_works_out_itself(load, name, case):
    loaded = load(name)
    expected = reference(loaded, conversation(case))
    encoded = encode(loaded.kit, loaded.processor, conversation(case))
    model = loaded.actor.model
    sequences, mask = pad([encoded.token_ids], side="right")
    theirs, their_logits = positions_seen(model, **expected)
    inputs = loaded.kit.forward_inputs(model.config, sequences, mask, encoded.media)
    ours, our_logits = positions_seen(model, input_ids=sequences, attention_mask=mask, **inputs)
    assert torch.equal(ours, theirs.expand_as(ours))
    torch.testing.assert_close(our_logits, their_logits, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", IMAGE_KITS)
def test_the_filler_row_changes_no_log_prob_and_gives_the_vision_tower_a_gradient_of_zero(load, name, monkeypatch):
    loaded = load(name)
    texts = [encode(loaded.kit, loaded.processor, messages).token_ids for messages in TEXTS.values()]
    sequences, mask = pad(texts, side="right")

    def run() -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
        loaded.actor.zero_grad()
        log_probs = next_log_probs(loaded.actor, sequences, attention_mask=mask) * mask[:, 1:]
        log_probs.sum().backward()
        weights = loaded.actor.model.named_parameters()
        # Without the weights that a kit freezes itself, as no loss of ours reaches them.
        return log_probs.detach(), {key: weight.grad for key, weight in weights if weight.requires_grad}

    alone, gradients = run()
    gradients = {key: None if grad is None else grad.clone() for key, grad in gradients.items()}
    # As on two ranks, where the other one may hold images.
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    filled, filled_gradients = run()

    torch.testing.assert_close(filled, alone, atol=1e-5, rtol=0)
    towers = (*loaded.kit.vision_prefixes, *loaded.kit.projector_prefixes)
    for key, gradient in filled_gradients.items():
        if key.startswith(towers):
            assert gradients[key] is None, key
            assert gradient is not None, key
            assert torch.count_nonzero(gradient) == 0, key
        else:
            torch.testing.assert_close(gradient, gradients[key], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", KITS)
def test_a_checkpoint_without_one_of_its_weights_is_refused(load, name, tmp_path):
    folder = load(name).folder
    shutil.copytree(folder, tmp_path / "copy")
    file = tmp_path / "copy/model.safetensors"
    weights = load_file(file)
    ends = ("q_proj.weight", "qkv_proj.weight", "query_key_value.weight")
    lost = next(stored for stored in weights if stored.endswith(ends) and "audio" not in stored)
    save_file(
        {stored: weight for stored, weight in weights.items() if stored != lost}, file, metadata={"format": "pt"}
    )
    with pytest.raises(UserError, match=r"\d weights are not in this checkpoint, .* among them; copy the original"):
        make_actor(tmp_path / "copy")


@pytest.mark.parametrize("name", KITS)
def test_a_checkpoint_without_its_processor_is_a_user_error(load, name, tmp_path):
    for file in ("config.json", "model.safetensors"):
        shutil.copy(load(name).folder / file, tmp_path)
    with pytest.raises(UserError, match=str(tmp_path)):
        get_kit(name).load_processor(str(tmp_path), trust_remote_code=False)


def loss_text(loaded: Loaded, messages: list[Message], *, every_turn: bool) -> str:
    sample = encode_sample(
        row(*messages), kit=loaded.kit, processor=loaded.processor, max_len=4096, every_turn=every_turn
    )
    pairs = zip(sample.token_ids, sample.loss_mask, strict=True)
    return loaded.tokenizer.decode([token for token, counts in pairs if counts])


@pytest.mark.parametrize("picture_in", [False, True])
@pytest.mark.parametrize("name", KITS)
def test_supervised_training_learns_the_assistants_words_and_the_end_token_alone(load, name, picture_in):
    loaded = load(name)
    media = [WIDE] if picture_in and loaded.kit.takes_images else []
    messages = [
        message("system", "Think first."),
        message("user", *media, "What is 12 + 34?"),
        message("assistant", "<think>easy</think><answer>46</answer>"),
        message("user", "And 46 + 1?", *media),
        message("assistant", "<answer>47</answer>\n"),
    ]
    end = loaded.tokenizer.eos_token
    first = as_written(name, "<think>easy</think><answer>46</answer>") + end
    last = as_written(name, f"<answer>47</answer>{'' if name in TRIMMING else chr(10)}") + end
    assert loss_text(loaded, messages, every_turn=False) == last
    assert loss_text(loaded, messages, every_turn=True) == first + last


def write_config(folder: Path, config: dict[str, Any]) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_an_unknown_model_type_is_refused_with_the_known_ones(tmp_path):
    with pytest.raises(UserError) as refused:
        kit_of(write_config(tmp_path, {"model_type": "nonsense"}))
    assert "'nonsense'" in str(refused.value)
    assert all(name in str(refused.value) for name in KITS)
    with pytest.raises(UserError, match=", ".join(sorted(KITS))):
        get_kit("nonsense")


@pytest.mark.parametrize(
    "model_type",
    sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) & set(MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES) - set(KITS)),
)
def test_a_multimodal_model_that_also_passes_for_a_language_model_is_refused(model_type, tmp_path):
    config = CONFIG_MAPPING[model_type]()
    config.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=f"no kit for model_type '{model_type}'"):
        kit_of(str(tmp_path))


@pytest.mark.parametrize("section", ["vision_config", "visual", "img_processor", "audio_processor", "image_size"])
def test_remote_code_with_a_media_section_is_refused_even_when_trusted(section, tmp_path):
    config = {"model_type": "mine", "auto_map": {"AutoModelForCausalLM": "modeling.Mine"}}
    assert kit_of(write_config(tmp_path, config), trust_remote_code=True).model_type == "llm"
    with pytest.raises(UserError, match="no kit for model_type 'mine'"):
        kit_of(write_config(tmp_path, config), trust_remote_code=False)
    with pytest.raises(UserError, match=section):
        kit_of(write_config(tmp_path, config | {section: {}}), trust_remote_code=True)


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "mistral", "phi3", "gemma3_text"])
def test_a_plain_language_model_gets_the_shared_kit(model_type, tmp_path):
    CONFIG_MAPPING[model_type]().save_pretrained(tmp_path)
    assert kit_of(str(tmp_path)).model_type == "llm"


def test_a_folder_that_is_no_checkpoint_is_a_user_error(tmp_path):
    with pytest.raises(UserError, match="no config.json"):
        kit_of(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="config.json: not valid JSON"):
        kit_of(str(tmp_path))
    for path in ("no/such-model", str(tmp_path / "no" / "such" / "folder")):
        with pytest.raises(UserError, match="no such folder"):
            kit_of(path)
