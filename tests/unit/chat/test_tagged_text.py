import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmm_r1.chat.tagged_text import Span, TagReader

pytestmark = pytest.mark.unit

TAGGED = "a<think>1<2 <b></think>\n<answer>3</answer>z"
SPANS = [
    Span("text", "a"),
    Span("tag", "<think>"),
    Span("thinking", "1<2 <b>"),
    Span("tag", "</think>"),
    Span("text", "\n"),
    Span("tag", "<answer>"),
    Span("answer", "3"),
    Span("tag", "</answer>"),
    Span("text", "z"),
]


def spans_of(pieces: list[str], *, kind: str = "text") -> list[Span]:
    """What a reader makes of the pieces, neighbours of one kind joined."""
    reader = TagReader(kind=kind)
    spans = [span for piece in pieces for span in reader.feed(piece)] + reader.rest()
    grouped = itertools.groupby(spans, key=lambda span: (span.kind, span.text if span.kind == "tag" else None))
    return [Span(kind, "".join(span.text for span in group)) for (kind, _), group in grouped]


def test_the_spans_do_not_depend_on_where_the_stream_is_cut():
    for first, second in itertools.combinations(range(1, len(TAGGED)), 2):
        assert spans_of([TAGGED[:first], TAGGED[first:second], TAGGED[second:]]) == SPANS, (first, second)


def test_single_characters_give_the_same_spans():
    assert spans_of(list(TAGGED)) == SPANS


@pytest.mark.parametrize(
    ("text", "spans"),
    [
        ("<think>1 and", [Span("tag", "<think>"), Span("thinking", "1 and")]),
        (
            "<think>1<answer>2",
            [Span("tag", "<think>"), Span("thinking", "1"), Span("tag", "<answer>"), Span("answer", "2")],
        ),
        ("1</think>2", [Span("text", "1"), Span("tag", "</think>"), Span("text", "2")]),
        ("no tags, <thi and <Think>", [Span("text", "no tags, <thi and <Think>")]),
        ("a<<think>b", [Span("text", "a<"), Span("tag", "<think>"), Span("thinking", "b")]),
        ("ends with <answe", [Span("text", "ends with <answe")]),
        ("", []),
    ],
)
def test_unclosed_stray_and_broken_tags(text, spans):
    assert spans_of(list(text)) == spans_of([text]) == spans


def test_a_thought_that_the_prompt_opened_needs_no_tag():
    assert spans_of(["1</thi", "nk>2"], kind="thinking") == [
        Span("thinking", "1"),
        Span("tag", "</think>"),
        Span("text", "2"),
    ]


def test_text_is_held_back_only_while_it_may_become_a_tag():
    reader = TagReader()
    assert reader.feed("a <") == [Span("text", "a ")]
    assert reader.feed("thi") == []
    assert reader.feed("s") == [Span("text", "<this")]


@given(st.lists(st.sampled_from(["<", ">", "/", "think", "answer", "<think>", "</answer>", "x", "\n"])))
def test_the_spans_together_are_the_text(pieces):
    assert "".join(span.text for span in spans_of(pieces)) == "".join(pieces)
    assert spans_of(pieces) == spans_of(list("".join(pieces)))
