import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
from helpers.character_kit import CharacterKit
from helpers.conversations import clip, message, picture, row
from helpers.tiny_models import altered
from PIL import Image
from transformers import GenerationConfig

from lmm_r1.config.shared import RowsConfig
from lmm_r1.data.messages import ImagePart, Message, Row, TextPart, VideoPart
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits import Checkpoint, checkpoint, get_kit
from lmm_r1.lmm_kits.checkpoint import (
    check_images_taken,
    check_pixel_bounds,
    encode_row,
    quantization_of,
    settle_ends,
    stored_bytes,
)
from lmm_r1.models.loading import LoadSettings, load_model


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was asked of the kit that every checkpoint has here, in order."""
    calls: list[str] = []

    def answer(name: str) -> object:
        def method(self: object, path: str, *, trust_remote_code: bool, chat_template: str | None = None) -> str:
            calls.append(f"{name} {path} {trust_remote_code}")
            return name

        return method

    names = ("load_config", "load_processor")
    kit = altered(
        get_kit("llm"),
        **{name: answer(name) for name in names},
        tokenizer_of=lambda self, processor: f"tokenizer of {processor}",
        banned_token_ids=lambda self, config, tokenizer: (config, tokenizer),
    )
    monkeypatch.setattr(checkpoint, "kit_of", lambda path, *, trust_remote_code: kit)
    return calls


def test_parts_are_loaded_when_asked_for_and_once(asked):
    model = Checkpoint("some/model", trust_remote_code=True)
    assert model.kit.model_type == "llm"
    assert asked == []
    assert model.tokenizer == "tokenizer of load_processor"
    assert asked == ["load_processor some/model True"]
    assert model.processor == "load_processor"
    assert model.config == "load_config"
    assert model.banned_token_ids == ("load_config", "tokenizer of load_processor")
    assert asked == ["load_processor some/model True", "load_config some/model True"]


def test_code_of_a_checkpoint_is_not_run_unless_asked_for(asked):
    assert Checkpoint("m").processor
    assert asked == ["load_processor m False"]


def test_a_folder_without_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(UserError, match="no config.json"):
        _ = Checkpoint(str(tmp_path)).processor


class RecordingKit(CharacterKit):
    """Keeps what it is given to encode."""

    def encode(self, processor, messages, **given):
        self.given = given
        return super().encode(processor, [message("user", "a")], **given)


def encode(kit, *parts):
    return encode_row(row(message("user", *parts)), kit=kit, processor=None, add_generation_prompt=True)


def test_images_and_videos_reach_the_kit_decoded_and_in_the_order_of_the_row():
    kit = RecordingKit()
    encode(kit, clip(2, 8, 6, fps=4.0), picture(5, 4), "a", clip(3, 6, 4), picture(7, 4))
    assert [image.size for image in kit.given["images"]] == [(5, 4), (7, 4)]
    assert [(video.frames.shape, video.fps) for video in kit.given["videos"]] == [
        ((2, 6, 8, 3), 4.0),
        ((3, 4, 6, 3), 2.0),
    ]
    assert kit.given["add_generation_prompt"] is True


def test_what_the_kit_refuses_is_told_with_the_rows_place():
    with pytest.raises(UserError, match="^rows.jsonl, line 1: an image is too small"):
        encode(CharacterKit(), Image.new("RGB", (1, 1)))


TEXT_KIT = SimpleNamespace(takes_images=False, takes_videos=False)
IMAGE_KIT = SimpleNamespace(takes_images=True, takes_videos=False)
VIDEO_KIT = SimpleNamespace(takes_images=True, takes_videos=True)


def row_of(*roles, part=None, number=1):
    messages = tuple(Message(role=role, parts=(part or TextPart("x"),)) for role in roles)
    return Row(messages=messages, answer="1", datasource="default", location=f"rows.jsonl line {number}")


def test_a_row_with_an_image_is_refused_for_a_language_model_only():
    rows = [row_of("user"), row_of("user", part=ImagePart("/a.png"), number=2)]
    check_images_taken(rows, kit=IMAGE_KIT, model="--checkpoints a=b")
    check_images_taken(rows[:1], kit=TEXT_KIT, model="--checkpoints a=b")
    with pytest.raises(UserError, match="^rows.jsonl line 2: .* --checkpoints a=b is a plain language model; give"):
        check_images_taken(rows, kit=TEXT_KIT, model="--checkpoints a=b")


def test_a_row_with_a_video_is_refused_where_the_kit_takes_none():
    rows = [
        row_of("user"),
        row_of("user", part=ImagePart("/a.png"), number=2),
        row_of("user", part=VideoPart("/a.mp4"), number=3),
    ]
    check_images_taken(rows, kit=VIDEO_KIT, model="--checkpoints a=b")
    check_images_taken(rows[:2], kit=IMAGE_KIT, model="--checkpoints a=b")
    with pytest.raises(UserError, match="^rows.jsonl line 3: the row has a video, but --checkpoints a=b takes none"):
        check_images_taken(rows, kit=IMAGE_KIT, model="--checkpoints a=b")
    with pytest.raises(UserError, match="^rows.jsonl line 3: the row has a video"):
        check_images_taken(rows[2:], kit=TEXT_KIT, model="--checkpoints a=b")


def test_a_prompt_ends_with_what_a_response_begins_with_and_a_conversation_does_not():
    kit, begun = CharacterKit(), replace(row(message("user", "1+1?")), prefill="<t>")
    plain = encode_row(replace(begun, prefill=""), kit=kit, processor=None, add_generation_prompt=True)
    encoded = encode_row(begun, kit=kit, processor=None, add_generation_prompt=True)
    assert encoded.token_ids == [*plain.token_ids, *b"<t>"]
    assert encoded.engine_token_ids == [*plain.engine_token_ids, *b"<t>"]
    whole = encode_row(begun, kit=kit, processor=None, add_generation_prompt=False)
    assert b"<t>" not in bytes(whole.token_ids)


def bounded(limits: tuple[int, int] | None, takes_images: bool = True, **bounds: int) -> None:
    kit = SimpleNamespace(model_type="some_vl", takes_images=takes_images, pixel_limits=lambda processor: limits)
    model = SimpleNamespace(kit=kit, processor=None)
    check_pixel_bounds(RowsConfig(**bounds), model, model="--model m", prefix="--data.")


def test_bounds_on_images_must_be_such_as_the_model_can_keep_to():
    bounded(None)
    bounded(None, takes_images=False, max_pixels=500)
    bounded((100, 900), min_pixels=100, max_pixels=900)
    with pytest.raises(UserError, match="^--data.max_pixels 500: --model m is a some_vl, which leaves no choice"):
        bounded(None, max_pixels=500)
    for bounds in ({"min_pixels": 99}, {"min_pixels": 901}, {"max_pixels": 99}, {"max_pixels": 901}):
        ((name, value),) = bounds.items()
        with pytest.raises(UserError, match=f"^--data.{name} {value} is not within 100 and 900"):
            bounded((100, 900), **bounds)


@pytest.mark.parametrize("name", ["llm", "qwen2_5_vl"])
def test_a_chat_template_takes_the_place_of_the_checkpoints_own_and_is_saved(name, tiny_checkpoint, tmp_path):
    template = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    own = Checkpoint(str(tiny_checkpoint(name)), chat_template=template)
    chat = [{"role": "user", "content": "hi"}]
    assert own.processor.apply_chat_template(chat, tokenize=False) == "<hi>"
    assert own.tokenizer.apply_chat_template(chat, tokenize=False) == "<hi>"
    own.processor.save_pretrained(tmp_path)
    assert "m.content" in (tmp_path / "chat_template.jinja").read_text()


QWEN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}END\n{% endfor %}"


@pytest.mark.parametrize(
    ("template", "listed", "ends"),
    [
        (None, "<|im_end|>", "<|im_end|>"),
        (None, None, "<|im_end|>"),
        (None, ["<|endoftext|>", "<|im_end|>"], ["<|endoftext|>", "<|im_end|>"]),
        (None, "<|endoftext|>", ["<|endoftext|>", "<|im_end|>"]),
        (QWEN.replace("END", "<|endoftext|>"), "<|im_end|>", ["<|im_end|>", "<|endoftext|>"]),
        # What ends turns is no token of its own.
        (QWEN.replace("END", " over"), "<|im_end|>", "<|im_end|>"),
    ],
)
def test_a_saved_model_ends_where_training_has_ended_responses(template, listed, ends, tiny_checkpoint):
    own = Checkpoint(str(tiny_checkpoint("llm")), chat_template=template)
    given, expected = (ids if ids is None else own.tokenizer.convert_tokens_to_ids(ids) for ids in (listed, ends))
    model = SimpleNamespace(generation_config=GenerationConfig(eos_token_id=given))
    settle_ends(model, kit=own.kit, processor=own.processor)
    assert model.generation_config.eos_token_id == expected


@pytest.mark.parametrize("name", ["llm", "qwen2_5_vl", "gemma3"])
@pytest.mark.parametrize("method", ["awq", "gptq", "bitsandbytes", "fp8", "compressed-tensors"])
def test_quantized_weights_are_refused_and_have_the_size_of_their_files(method, name, tiny_checkpoint, tmp_path):
    base, quantized = tiny_checkpoint(name), tmp_path / "model"
    shutil.copytree(base, quantized)
    config = json.loads((base / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, "bits": 4, "group_size": 128}
    (quantized / "config.json").write_text(json.dumps(config))
    own = Checkpoint(str(quantized))
    assert (quantization_of(own.config), quantization_of(Checkpoint(str(base)).config)) == (method, None)
    assert stored_bytes(str(quantized)) == (base / "model.safetensors").stat().st_size
    refused = rf"model: its weights are quantized \({method}\), which only vLLM loads; give the model"
    with pytest.raises(UserError, match=refused):
        own.load_model(dtype="auto", attn_implementation="sdpa")
    for empty in (True, False):
        with pytest.raises(UserError, match=refused):
            load_model(str(quantized), LoadSettings(attn_implementation="sdpa"), empty=empty)
