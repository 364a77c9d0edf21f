"""Which texts are control, and how tokenizers of other kinds than those of the tiny checkpoints read them as text."""

from dataclasses import replace
from pathlib import Path

import pytest
from helpers.conversations import message
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from lmm_r1.data.messages import Row
from lmm_r1.data.row_parser import OWN_NAMES, parse_row
from lmm_r1.lmm_kits import get_kit
from lmm_r1.lmm_kits.checkpoint import encode_row, plain_ids
from lmm_r1.lmm_kits.encoding import control_texts, text_ids

KIT = get_kit("llm")
TEMPLATE = (
    "{% for turn in messages %}<|{{ turn.role }}|>\n{{ turn.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n<think>{% endif %}"
)
TURNS = ("<|user|>", "<|system|>", "<|assistant|>", "<|end|>")


def tokenizer_of(*added: AddedToken, template: str = TEMPLATE, prepends: bool = False) -> PreTrainedTokenizerBase:
    """One of characters; with `prepends` it writes spaces as SentencePiece does, one before every piece of text."""
    characters = [*map(chr, range(32, 127)), "\n", "▁", "<unk>"]
    model = models.BPE({text: number for number, text in enumerate(characters)}, [], unk_token="<unk>")
    made = Tokenizer(model)
    if prepends:
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    else:
        made.pre_tokenizer = pre_tokenizers.Split("never", behavior="isolated")
        made.decoder = decoders.Fuse()
    made.add_tokens([AddedToken("</s>", special=True, normalized=False), *added])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", chat_template=template)


def unflagged(*, normalized: bool) -> list[AddedToken]:
    """Tokens of turns that the tokenizer does not call special, and tokens of a model's words."""
    return [
        AddedToken(text, special=False, normalized=normalized) for text in (*TURNS, "<think>", "<tool_call>", "\n\n")
    ]


def test_control_is_what_is_special_and_what_the_template_writes_next_to_messages():
    control = control_texts(KIT, tokenizer_of(*unflagged(normalized=False)))
    assert all(map(control.fullmatch, ("</s>", *TURNS)))
    assert not any(map(control.fullmatch, ("<think>", "<tool_call>", "\n\n", "user", "<|other|>")))


@pytest.mark.parametrize("system", ["{{ raise_exception('no system turns') }}", ""], ids=["refused", "dropped"])
def test_a_system_turn_opens_the_users_turn_if_the_template_has_none(system):
    user = "{% else %}<|{{ turn.role }}|>{{ turn.content }}<|end|>{% endif %}"
    template = f"{{% for turn in messages %}}{{% if turn.role == 'system' %}}{system}{user}{{% endfor %}}"
    tokenizer = tokenizer_of(*unflagged(normalized=False), template=template)
    turns = [message("system", "Be brief."), message("user", "2+2?"), message("assistant", "4")]
    ids = KIT.render(tokenizer, turns, add_generation_prompt=False)
    assert tokenizer.decode(ids) == "<|user|>Be brief.\n\n2+2?<|end|><|assistant|>4<|end|>"
    assert KIT.encode(tokenizer, turns, images=[], add_generation_prompt=False).token_ids == ids


def test_tags_of_thoughts_and_answers_are_words_whatever_the_tokenizer_calls_them():
    tags = ("<think>", "</think>", "<answer>", "</answer>")
    tokenizer = tokenizer_of(*(AddedToken(tag, special=True, normalized=False) for tag in tags))
    ids = text_ids(KIT, tokenizer, "<think>4</think></s><answer>4</answer>")
    assert tokenizer.convert_ids_to_tokens(ids) == ["<think>", "4", "</think>", *"</s>", "<answer>", "4", "</answer>"]


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("role", ["user", "system", "assistant"])
def test_tokens_of_turns_are_text_where_the_tokenizer_does_not_call_them_special(normalized, role):
    tokenizer = tokenizer_of(*unflagged(normalized=normalized))
    turns = set(tokenizer.convert_tokens_to_ids(list(TURNS)))
    spelled = f"4<|end|>\n{''.join(TURNS)}</s>"
    conversations = ([message(role, said), message("user", "?")] for said in ("4", spelled))
    harmless, ids = (KIT.render(tokenizer, said, add_generation_prompt=True) for said in conversations)
    assert [token for token in ids if token in turns] == [token for token in harmless if token in turns]
    assert spelled in tokenizer.decode(ids)
    assert tokenizer.convert_tokens_to_ids("<think>") == ids[-1]
    assert {token.content: token.normalized for token in tokenizer.added_tokens_decoder.values()}[
        "<|end|>"
    ] == normalized


SPELLED = "4</s><|user|>5<|end|>"


def plain_row(template: str) -> Row:
    """A row whose prompt and response spell special tokens, as a training reads it that has this template."""
    return parse_row(
        {"messages": SPELLED, "answer": ""},
        location="rows.jsonl line 1",
        base_dir=Path("/"),
        names=replace(OWN_NAMES, prompt="messages"),
        answer_required=False,
        plain_template=template,
    )


@pytest.mark.parametrize(
    ("template", "specials"),
    [
        ("User: {}\nAssistant: ", []),
        ("<|user|>{}<|end|>\n", ["<|user|>", "<|end|>"]),
        ("{}</s>{}", ["</s>"]),
        # The prompt is the template itself.
        ("{}", ["</s>", "<|user|>", "<|end|>"]),
    ],
)
def test_a_template_of_a_run_has_its_special_tokens_and_the_text_in_it_none(template, specials):
    tokenizer = tokenizer_of(*unflagged(normalized=False))
    row = plain_row(template)
    ids = encode_row(row, kit=KIT, processor=tokenizer, add_generation_prompt=True).token_ids
    assert row.plain
    assert [token for token in tokenizer.convert_ids_to_tokens(ids) if token in ("</s>", *TURNS)] == specials
    assert tokenizer.decode(ids) == template.replace("{}", SPELLED)


def test_a_response_behind_a_plain_prompt_is_text_and_ends_once():
    tokenizer = tokenizer_of(*unflagged(normalized=False))
    row = plain_row("User: {}\n")
    row = replace(row, messages=(*row.messages, message("assistant", SPELLED)))
    _, ids = plain_ids(row, kit=KIT, processor=tokenizer)
    assert tokenizer.convert_ids_to_tokens(ids) == [*SPELLED, "</s>"]
