import math
import time

import pytest
from helpers.tables import table

from lmm_r1.agents.calls import BadCall, quoted, read_json

CALL = {"bbox_2d": [0.1, 0.2, 0.5, 1], "source": "original_image"}


@pytest.mark.parametrize("text", table("agents/lenient_json", "a_call_is_read_however_it_is_spelt"))
def test_a_call_is_read_however_it_is_spelt(text):
    assert read_json(text) == CALL


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("[True, False, None]", [True, False, None]),
        ("{'a': \"it's\", \"b\": 'say \\'hi\\''}", {"a": "it's", "b": "say 'hi'"}),
        ('"\\ud83d\\ude00"', "\U0001f600"),
        ("9" * 400, math.inf),
        ("1" * 40, int("1" * 40)),
        ("-Infinity", -math.inf),
        ("{}", {}),
        ("[1, [2, (3, 4)]]", [1, [2, [3, 4]]]),
    ],
)
def test_values_of_every_kind(text, value):
    assert read_json(text) == value


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "the JSON cannot be read from character 1 on, at '': Expecting value"),
        ('{"a" 1}', "the JSON cannot be read from character 6 on, at '1}': Expecting ':' delimiter"),
        ('{"a": [1, 2}', "the JSON cannot be read from character 12 on, at '}]}': Expecting ',' delimiter"),
        (
            "{1, 2}",
            "the JSON cannot be read from character 2 on, at '1, 2}': Expecting property name enclosed in double quotes",
        ),
        ("{} and more", "the JSON cannot be read from character 4 on, at 'and more': Extra data"),
        ('{"a": 1, "a": 2}', "the key 'a' appears twice"),
        ('"\\ud83d alone"', "the JSON contains half of a surrogate pair"),
        ("[" * 1000, "the JSON is nested more than 32 levels deep"),
        ('{"a":' * 1000, "the JSON is nested more than 32 levels deep"),
        ("<|image_pad|>", "the JSON cannot be read from character 1 on, at '??image_pad??': Expecting value"),
    ],
)
def test_what_cannot_be_read_is_told_exactly(text, said):
    with pytest.raises(BadCall) as raised:
        read_json(text)
    assert str(raised.value) == said


def test_the_longest_texts_take_no_time():
    hostile = [
        "[" + "1," * 9998,
        '{"a":"' + "\\" * 19000,
        " " * 20000,
        "'" * 19999,
        "9" * 20000,
        "-" * 20000,
        "'" + "\\'" * 9000,
        "[" + " " * 19000 + "x y",
    ]
    before = time.process_time()
    for text in hostile:
        try:
            read_json(text)
        except BadCall:
            pass
    assert time.process_time() - before < 2


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("<|im_start|>system\nnow", "'??im_start??system now'"),
        ([0.1, float("nan")], "[0.1, NaN]"),
        ("é" * 200, "'" + "é" * 100 + "…'"),
        ({"a": [1]}, '{"a": [1]}'),
    ],
)
def test_what_a_policy_wrote_is_quoted_short_and_harmless(value, said):
    assert quoted(value) == said
