"""The environments `crop` and `tool`: what a policy is shown first, what each turn is answered, when an episode is over."""

import json

import pytest
from helpers.conversations import message, row
from helpers.episodes import coordinates_image, image_row, images_in, play, text_of

from lmm_r1.agents.environment import Answered
from lmm_r1.agents.tool_environment import CropEnvironment, ToolEnvironment
from lmm_r1.agents.tools import Tool
from lmm_r1.data.messages import ImagePart, TextPart
from lmm_r1.data.sample import CallOutcome
from lmm_r1.errors import UserError

ROW = image_row(coordinates_image(100, 50))
LEFT = '<think>Left.</think><grounding>{"bbox_2d": [0, 0, 0.5, 1], "source": "original_image"}</grounding>'
SWAPPED = '<grounding>{"bbox_2d": [0.5, 0, 0, 1], "source": "original_image"}</grounding>'


def add(first: int, second: int) -> int:
    """Add two numbers."""
    return first + second


def fail() -> str:
    """Fail."""
    raise RuntimeError("no luck")


def added(first, second):
    return f'<tool_call>{{"name": "add", "arguments": {{"first": {first}, "second": {second}}}}}</tool_call>'


def test_an_observation_is_text_and_the_part_that_was_asked_for():
    (answered,) = play(CropEnvironment(), ROW, LEFT)
    assert text_of(answered) == (
        "This is observation_1:\n<image>\nA part of original_image, cut from 50 x 50 pixels of its full resolution.\n"
        "Continue thinking inside <think> </think>. Then look closer at the original image or an observation with another call, "
        "or answer inside <answer> </answer>."
    )
    (image,) = images_in(answered)
    assert (image.size, image.getpixel((49, 49))) == ((50, 50), (49, 49, 7))
    assert [(part.min_pixels, part.max_pixels) for part in answered.shown if isinstance(part, ImagePart)] == [
        (40_000, 2_000_000)
    ]
    assert answered.role == "user"
    assert answered.counts == {"tool_calls": 1, "malformed_calls": 0, "failed_calls": 0}
    assert answered.rewards == {}


def test_what_became_of_each_call_is_data():
    unknown = added(1, 2).replace("add", "divide")
    environment = ToolEnvironment([add, Tool(fail)])
    (done,), (none,) = (play(environment, ROW, text) for text in (added(1, 2), unknown))
    assert done.calls == (CallOutcome(tool="add", outcome="done"),)
    told = "there is no tool 'divide'; the tools are: add, fail"
    assert none.calls == (CallOutcome(tool="", outcome="malformed", problem=told),)
    (broken,) = play(environment, ROW, '<tool_call>{"name": "fail", "arguments": {}}</tool_call>')
    (call,) = broken.calls
    assert (call.tool, call.outcome) == ("fail", "failed")
    assert "no luck" in call.problem
    (swapped,) = play(CropEnvironment(), ROW, SWAPPED)
    assert [(call.tool, call.outcome) for call in swapped.calls] == [("crop", "malformed")]
    assert play(CropEnvironment(), ROW, "<answer>7</answer>")[0].calls == ()


def test_a_wrong_call_is_told_exactly_and_counted():
    (answered,) = play(CropEnvironment(), ROW, SWAPPED)
    assert text_of(answered) == (
        "This call was not executed: bbox_2d [0.5, 0.0, 0.0, 1.0] has swapped corners: x0 is larger than x1; write the "
        "top-left corner first, then the bottom-right one. No observation was added. Think about what went wrong inside "
        "<think> </think>, then call again, or answer inside <answer> </answer>."
    )
    assert answered.counts == {"tool_calls": 1, "malformed_calls": 1, "failed_calls": 0}


def test_a_failed_call_takes_no_number():
    inner = '<grounding>{"bbox_2d": [0.2, 0.2, 0.4, 0.4], "source": "observation_1"}</grounding>'
    too_early = inner.replace("observation_1", "observation_2")
    first, wrong, early, second, third = play(CropEnvironment(), ROW, LEFT, SWAPPED, too_early, inner, too_early)
    assert text_of(first).startswith("This is observation_1:")
    assert "there is no image 'observation_2'; the images are: original_image, observation_1." in text_of(early)
    assert text_of(second).startswith("This is observation_2:\n<image>\nA part of observation_1,")
    assert images_in(second)[0].getpixel((0, 0)) == (10, 10, 7)
    # x 2 to 4 of observation_2's 10 pixels, which begins at 10.
    assert text_of(third).startswith("This is observation_3:\n<image>\nA part of observation_2,")
    assert images_in(third)[0].getpixel((0, 0)) == (12, 12, 7)


@pytest.mark.parametrize("text", ["<think>I see.</think><answer>4</answer>", "", "It may be cut off in <thi"])
def test_a_turn_without_a_call_ends_the_episode(text):
    for environment in (CropEnvironment(), ToolEnvironment([add])):
        (answered,) = play(environment, ROW, text)
        assert answered.is_over
        assert answered.counts == {"tool_calls": 0, "malformed_calls": 0, "failed_calls": 0}


def test_the_protocol_is_explained_in_a_system_turn():
    shown = CropEnvironment(min_pixels=100, max_pixels=1000).shown_row(ROW)
    system, user = shown.messages
    assert system.role == "system"
    (explained,) = system.parts
    assert isinstance(explained, TextPart)
    assert '<grounding>{"bbox_2d": [0.25, 0.5, 0.75, 1.0], "source": "original_image"}</grounding>' in explained.text
    assert "as fractions of the image's width and height, from 0.0 to 1.0" in explained.text
    image, question = user.parts
    assert isinstance(image, ImagePart)
    assert (image.min_pixels, image.max_pixels) == (100, 1000)
    assert question == ROW.messages[0].parts[1]
    # The example is a call that the environment carries out.
    (answered,) = play(CropEnvironment(), ROW, explained.text)
    assert images_in(answered)[0].size == (50, 25)


def test_a_function_is_offered_called_and_answered():
    environment = ToolEnvironment([add])
    (explained,) = environment.shown_row(row(message("user", "2 + 3?"))).messages[0].parts
    assert isinstance(explained, TextPart)
    assert (
        '<tools>\n{"type": "function", "function": {"name": "add", "description": "Add two numbers.", "parameters": '
        '{"type": "object", "properties": {"first": {"type": "integer"}, "second": {"type": "integer"}}, '
        '"required": ["first", "second"]}}}\n</tools>'
    ) in explained.text
    right, wrong = play(environment, ROW, added(2, 3), added(2, "null"))
    assert text_of(right) == "<tool_response>\n5\n</tool_response>"
    assert text_of(wrong) == (
        "<tool_response>\nError: second is wrong: should be a valid integer; it is null. The call was not executed.\n"
        "</tool_response>"
    )


def test_a_tool_that_fails_is_counted_and_the_episode_goes_on():
    failed, right = play(ToolEnvironment([add, fail]), ROW, '<tool_call>{"name": "fail"}</tool_call>', added(2, 3))
    assert "Error: the tool failed: it raised RuntimeError: no luck. The call was not executed." in text_of(failed)
    assert failed.counts == {"tool_calls": 1, "malformed_calls": 0, "failed_calls": 1}
    assert text_of(right) == "<tool_response>\n5\n</tool_response>"


def test_of_several_calls_the_first_is_carried_out_and_the_policy_told():
    (answered,) = play(ToolEnvironment([add]), ROW, added(1, 1) + added(2, 2) + added(3, 3))
    assert text_of(answered) == (
        "<tool_response>\n2\n</tool_response>\nOnly the first of your calls was executed; 2 more were ignored. Write one "
        "call per turn."
    )
    assert answered.counts["tool_calls"] == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"min_pixels": 0}, "crop: min_pixels 0 must lie between 1 and max_pixels 2000000"),
        ({"max_pixels": 100}, "crop: min_pixels 40000 must lie between 1 and max_pixels 100"),
        ({"side_multiple": 0}, "crop: side_multiple 0 must be at least 1"),
        ({"tools": [add, add]}, "two tools are named add"),
    ],
)
def test_settings_that_cannot_be_are_refused(options, said):
    with pytest.raises(UserError, match=said):
        CropEnvironment(**options)


@pytest.mark.parametrize("name", ["words.json", "constants.py"])
def test_a_checkpoints_own_words_are_read_from_a_file_and_are_shown_instead(name, tmp_path):
    file = tmp_path / name
    observation = "Turn {action_turn}, view {observation_turn}:\n<image>.\nGo on."
    if name.endswith(".json"):
        file.write_text(json.dumps({"system": "Look.", "observation": observation, "error": "Again."}))
    else:
        qwen = observation.replace("<image>", "<|vision_start|><|image_pad|><|vision_end|>")
        file.write_text(
            f'TOOL_CROP_SYSTEM_PROMPT = """Look."""\nOTHER = {{"a": 1}}\nimport nothing_that_is_there\n'
            f"TOOL_CALL_CROP_MULTI_TRUN_PROMPT = {qwen!r}\nERROR_INFO_MULTI_TURN_PROMPT = 'Again.'\n"
        )
    environment = CropEnvironment(prompts=str(file), edges="clamp")
    shown = environment.shown_row(ROW)
    assert (shown.messages[0].role, text_of(Answered(shown=shown.messages[0].parts))) == ("system", "Look.")
    refused, seen = play(environment, ROW, SWAPPED, LEFT)
    assert text_of(refused).endswith("then the bottom-right one.\nAgain.")
    # The second turn has the first observation; Mini-o3 counts turns from 0.
    assert text_of(seen) == f"Turn {2 if name.endswith('.json') else 1}, view 1:\n<image>.\nGo on."
    assert images_in(seen)[0].size == (50, 50)
