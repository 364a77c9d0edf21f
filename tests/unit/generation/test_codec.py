"""Text that is handed out token by token."""

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from lmm_r1.data.messages import Row
from lmm_r1.generation.codec import PromptCodec, TextStream

pytestmark = pytest.mark.unit


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
