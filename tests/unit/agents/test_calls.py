import time

import pytest
from helpers.tables import table

from lmm_r1.agents.calls import GROUNDING, TOOL_BLOCK, TOOL_CALL, BadCall, Call, written_calls

FORMATS = (GROUNDING, TOOL_CALL, TOOL_BLOCK)
CROP = Call(name="crop", arguments={"bbox_2d": [0, 0, 1, 1], "source": "original_image"})
ZOOM = Call(name="zoom", arguments={"keypoint": [3, 4], "source": "observation_1"})


def read(text):
    (written,) = written_calls(text, FORMATS)
    return written.read()


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ('<think>There.</think><grounding>{"bbox_2d": [0, 0, 1, 1], "source": "original_image"}</grounding>', CROP),
        # Thoughts may speak of the tag, and what stands behind a call belongs to nothing.
        (
            'I use <grounding> now: <grounding>{"bbox_2d": [0,0,1,1], "source": "original_image"}</grounding></grounding>',
            CROP,
        ),
        (
            '<tool_call>\n{"name": "zoom", "arguments": {"keypoint": [3, 4], "source": "observation_1"}}\n</tool_call>',
            ZOOM,
        ),
        (
            '<tool_call>{"name": "zoom", "parameters": {"keypoint": [3, 4], "source": "observation_1"}}</tool_call>',
            ZOOM,
        ),
        (
            """<tool_call>{"name": "zoom", "arguments": "{'keypoint': [3, 4], 'source': 'observation_1'}"}</tool_call>""",
            ZOOM,
        ),
        ("<tool>\nname: zoom\nkeypoint: [3, 4]\nsource: observation_1\n</tool>", ZOOM),
        ('<tool>{"name": "zoom", "keypoint": [3, 4], "source": "observation_1"}</tool>', ZOOM),
        ('<tool>{"name": "zoom", "args": {"keypoint": [3, 4], "source": "observation_1"}}</tool>', ZOOM),
        ("<tool>name: find\ntext: what is 3: 4?</tool>", Call(name="find", arguments={"text": "what is 3: 4?"})),
        ('<tool_call>{"name": "now"}</tool_call>', Call(name="now", arguments={})),
        # As the chat template of Qwen3.5 asks for calls.
        (
            "<tool_call>\n<function=zoom>\n<parameter=keypoint>\n[3, 4]\n</parameter>\n<parameter=source>\nobservation_1\n"
            "</parameter>\n</function>\n</tool_call>",
            ZOOM,
        ),
        (
            "<tool_call><function=find><parameter=text>\none\ntwo\n</parameter></function></tool_call>",
            Call(name="find", arguments={"text": "one\ntwo"}),
        ),
        ("<tool_call>\n<function=now>\n</function>\n</tool_call>", Call(name="now", arguments={})),
    ],
)
def test_each_format_is_read(text, call):
    assert read(text) == call


@pytest.mark.parametrize(("text", "said"), table("agents/calls", "what_is_wrong_with_a_call_is_told_exactly"))
def test_what_is_wrong_with_a_call_is_told_exactly(text, said):
    with pytest.raises(BadCall) as raised:
        read(text)
    assert str(raised.value) == said


@pytest.mark.parametrize(
    "text",
    [
        "",
        "The answer is 4.",
        "<think>I could use <grounding> here.</think><answer>4</answer>",
        "</grounding><answer>4</answer>",
        "<grounding >{}</ grounding>",
    ],
)
def test_a_turn_without_a_call(text):
    assert written_calls(text, FORMATS) == []


def test_several_calls_keep_their_order():
    first, second = '<tool_call>{"name": "a"}</tool_call>', "<tool>name: b</tool>"
    assert [one.read().name for one in written_calls(f"{first} then {second}{first}", FORMATS)] == ["a", "b", "a"]


def test_a_million_characters_take_seconds_at_most():
    size = 2**20
    hostile = [
        "<grounding>" * (size // 11),
        "</grounding>" * (size // 12),
        "<grounding></grounding>" * (size // 23),
        "<" * size,
        "<grounding>" + "[" * size + "</grounding>",
        "<tool>" + "a: 1\n" * (size // 5) + "</tool>",
        "</answer><grounding>" * (size // 20),
    ]
    before = time.process_time()
    for text in hostile:
        for call in written_calls(text, FORMATS)[:1]:
            with pytest.raises(BadCall):
                call.read()
    assert time.process_time() - before < 10
