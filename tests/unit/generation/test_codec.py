"""Text that is handed out token by token; prompts that several threads encode."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers.character_kit import CharacterKit
from PIL import Image
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from lmm_r1.data.messages import Row
from lmm_r1.generation.codec import PromptCodec, TextStream, with_image_ids
from lmm_r1.lmm_kits import EncodedPrompt


@pytest.fixture(scope="module")
def tokenizer():
    """One token per byte, as byte-level tokenizers have for rare characters."""
    from tokenizers.pre_tokenizers import ByteLevel

    alphabet = sorted(ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={char: place for place, char in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


@pytest.mark.parametrize("text", ["", "2 + 2", "né 数 🙂!", "🙂🙂", "a\ufffdb"])
@pytest.mark.parametrize("at_once", [1, 2, 3, 100])
def test_the_pieces_make_up_the_text_and_none_ends_within_a_character(text, at_once, tokenizer):
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    stream = TextStream(tokenizer)
    pieces = [stream.add(ids[start : start + at_once]) for start in range(0, len(ids), at_once)]
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)
    assert "".join([*pieces, stream.rest()]) == text


def test_an_unfinished_character_is_given_at_the_end(tokenizer):
    ids = tokenizer("a🙂", add_special_tokens=False)["input_ids"][:-1]
    stream = TextStream(tokenizer)
    assert "".join(stream.add([token]) for token in ids) == "a"
    assert stream.rest() == tokenizer.decode(ids)[1:]


@pytest.mark.parametrize(
    ("prompt", "prefill", "begun"),
    [
        ("user: 2+2?\nassistant: ", "", ""),
        ("user: 2+2?\nassistant: <think>\n", "", "<think>\n"),
        ("user: write <think>\nassistant: ", "", ""),
        ("user: 2+2?\nassistant: <think>", "<think>", "<think>"),
    ],
)
def test_a_thought_that_the_chat_template_opens_stands_in_front_of_the_response(prompt, prefill, begun, tokenizer):
    codec = PromptCodec.__new__(PromptCodec)
    codec.tokenizer = tokenizer
    row = Row(messages=(), answer="4", datasource="", location="rows.jsonl:1", prefill=prefill)
    assert codec.begun_with(row, tokenizer(prompt, add_special_tokens=False)["input_ids"]) == begun


def test_threads_that_encode_at_a_time_have_processors_of_their_own():
    processor = {"set by whoever encodes": 0}
    codec = PromptCodec(kit=CharacterKit(), processor=processor, banned_token_ids=())
    together = threading.Barrier(3, timeout=10)

    def two_looks(_: int) -> tuple[dict[str, int], dict[str, int]]:
        together.wait()
        return codec.processor, codec.processor

    with ThreadPoolExecutor(max_workers=3) as pool:
        looks = list(pool.map(two_looks, range(3)))
    assert codec.processor is processor
    assert len({id(one) for one, _ in looks} | {id(processor)}) == 4
    assert all(one is other and one == processor for one, other in looks)


def prompt_of(*images: Image.Image) -> EncodedPrompt:
    return with_image_ids(EncodedPrompt(token_ids=[2], engine_token_ids=[2], images=list(images), media=None))


def test_images_are_named_by_what_they_show():
    black, white = Image.new("RGB", (4, 2)), Image.new("RGB", (4, 2), "white")
    # The same bytes in another shape, and in another mode.
    tall, grey = Image.new("RGB", (2, 4)), Image.new("L", (4, 6))
    assert black.tobytes() == tall.tobytes() == grey.tobytes()
    names = prompt_of(black, white, tall, grey).image_ids
    assert len(set(names)) == 4
    assert prompt_of(white, black.copy()).image_ids == (names[1], names[0])
    drawn = black.copy()
    drawn.putpixel((3, 1), (0, 0, 1))
    assert prompt_of(drawn).image_ids[0] not in names


def test_the_engine_is_told_the_names_of_images_where_they_have_some():
    codec = PromptCodec(kit=CharacterKit(), processor=None, banned_token_ids=())
    named = prompt_of(Image.new("RGB", (4, 2)), Image.new("RGB", (2, 4)))
    assert codec.engine_prompt(named)["multi_modal_uuids"] == {"image": list(named.image_ids)}
    assert "multi_modal_uuids" not in codec.engine_prompt(EncodedPrompt.of_text([2, 3]))
