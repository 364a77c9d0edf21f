from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import safe_open

from lmm_r1.lmm_kits.tiny_model import TinyTokens, train_character_bpe, train_tokenizer

CORPUS = ("What is 12 + 34?", "The answer is 46.", "What is the answer?")


def trained():
    tokens = TinyTokens(
        special=("<|pad|>", "<|end|>"), end="<|end|>", padding="<|pad|>", chat_template="{{ messages }}"
    )
    return train_tokenizer(tokens, CORPUS, vocab_size=280)


@pytest.mark.parametrize("text", ["What is 46 + 1?", "naïve 数学 \U0001f600\t\n  x", " leading and trailing "])
def test_any_text_comes_back_as_it_was(text):
    tokenizer = trained()
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


def test_a_character_bpe_learns_the_most_frequent_pair_first_and_keeps_words_lines_and_digits_apart():
    # "ab" stands there three times, "a" after a space twice, "12" twice.
    pieces, merges = train_character_bpe(["ab ab\nab 12 12"], vocab_size=1000)
    assert merges[0] == ("a", "b")
    assert ("▁", "ab") in merges
    assert pieces[-len(merges) :] == ["".join(merge) for merge in merges]
    assert all(" " not in piece and "\n" not in piece for piece in pieces)
    assert "12" not in pieces
    assert {"▁", "!", "~", "Z"} <= set(pieces)


@pytest.mark.parametrize("arch", ["gemma3", "phi3_v", "phi4_multimodal"])
def test_where_a_patch_lies_is_as_visible_as_what_it_shows(arch: str, tiny_checkpoint: Callable[[str], Path]):
    # A fresh embedding has 0.09 to 0.18, and no language model behind it learnt which token to read.
    with safe_open(tiny_checkpoint(arch) / "model.safetensors", framework="pt") as file:
        (places,) = (name for name in file.keys() if name.endswith("embeddings.position_embedding.weight"))
        assert file.get_tensor(places).std().item() == pytest.approx(0.5, rel=0.05)
