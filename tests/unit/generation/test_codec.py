"""Text that is handed out token by token."""

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from lmm_r1.generation.codec import TextStream

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
