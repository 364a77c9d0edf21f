"""The environments `crop` and `tool`: what a policy is shown first, what each turn is answered, when an episode is over."""

import asyncio
import json
import threading
import time

import pytest
from helpers.conversations import message, row
from helpers.episodes import answers_of, coordinates_image, image_row, images_in, play, text_of

from lmm_r1.agents.environment import Answered
from lmm_r1.agents.tool_environment import CropEnvironment, ToolEnvironment, zoom_tool
from lmm_r1.agents.tools import Tool
from lmm_r1.data.messages import ImagePart, Row, TextPart
from lmm_r1.data.sample import CallOutcome, CutImage
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
        "Go on thinking inside <think> </think>. Then look closer at the original image or an observation by another call, "
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


def test_the_part_that_is_shown_knows_its_box():
    (answered,) = play(CropEnvironment(), ROW, LEFT)
    (part,) = [part for part in answered.shown if isinstance(part, CutImage)]
    assert (part.cut.picture, part.cut.box, part.cut.size) == (0, (0, 0, 50, 50), (100, 50))


def test_a_wrong_call_is_told_exactly_and_counted():
    (answered,) = play(CropEnvironment(), ROW, SWAPPED)
    assert text_of(answered) == (
        "This call was not carried out: bbox_2d [0.5, 0.0, 0.0, 1.0] has swapped corners: x0 is larger than x1; write the "
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


@pytest.mark.parametrize(("coordinates", "size"), [("thousandths", (50, 25)), ("absolute", (12, 7))])
def test_other_coordinates_are_explained_with_an_example_that_works(coordinates, size):
    environment = CropEnvironment(coordinates=coordinates, max_pixels=1_000_000, min_pixels=500_000)
    (explained,) = environment.shown_row(ROW).messages[0].parts
    assert isinstance(explained, TextPart)
    (answered,) = play(environment, ROW, explained.text)
    # 500,000 pixels at least: 28 * 36 = 1,008 x 504 are shown of 100 x 50.
    assert images_in(answered)[0].size == size


def test_a_system_turn_that_is_there_is_kept():
    asked = row(message("system", "Be brief."), message("user", coordinates_image(10, 10), "What is it?"))
    system, _ = CropEnvironment().shown_row(asked).messages
    (explained,) = system.parts
    assert isinstance(explained, TextPart)
    assert explained.text.startswith("Be brief.\n\nDetails that are too small")


def test_several_images_are_explained_by_their_names():
    asked = image_row(coordinates_image(10, 10), coordinates_image(20, 10))
    (explained,) = CropEnvironment().shown_row(asked).messages[0].parts
    assert isinstance(explained, TextPart)
    assert "original_image_1, original_image_2, or observation_1" in explained.text
    (answered,) = play(CropEnvironment(), asked, explained.text)
    assert images_in(answered)[0].size == (6, 5)
    (refused,) = play(CropEnvironment(), asked, LEFT)
    assert "there is no image 'original_image'; the images are: original_image_1, original_image_2." in text_of(
        refused
    )


def test_a_row_without_images_is_shown_as_it_is():
    asked = row(message("user", "1 + 1?"))
    assert CropEnvironment().shown_row(asked) is asked
    (answered,) = play(CropEnvironment(), asked, LEFT)
    assert "there is no image 'original_image'; the images are: none." in text_of(answered)


def test_a_prompt_without_turns_cannot_be_told_of_tools():
    plain = Row(messages=ROW.messages, answer="", datasource="", location="rows.jsonl, line 3", plain=True)
    with pytest.raises(UserError, match="rows.jsonl, line 3: the environment tool explains itself in a system turn"):
        ToolEnvironment([add]).shown_row(plain)


def test_zoom_goes_with_crop():
    environment = CropEnvironment(tools=[zoom_tool(side=20)], prefill="<think>")
    (explained,) = environment.shown_row(ROW).messages[0].parts
    assert isinstance(explained, TextPart)
    assert '{"type": "function", "function": {"name": "zoom", "description": "Show the surroundings' in explained.text
    assert '"name": "crop"' not in explained.text
    zoom = '<tool_call>{"name": "zoom", "arguments": {"keypoint": [0.5, 0.5]}}</tool_call>'
    near, part = play(environment, ROW, zoom, LEFT.replace("original_image", "observation_1"))
    assert images_in(near)[0].getpixel((0, 0)) == (40, 15, 7)
    assert images_in(part)[0].size == (10, 20)
    assert near.prefill == "<think>"


def test_a_tool_that_is_not_there_is_told():
    (answered,) = play(CropEnvironment(), ROW, '<tool_call>{"name": "zoom", "arguments": {}}</tool_call>')
    assert "there is no tool 'zoom'; the tools are: crop." in text_of(answered)
    assert answered.counts["malformed_calls"] == 1


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
        "<tool_response>\nError: second is wrong: should be a valid integer; it is null. The call was not carried out.\n"
        "</tool_response>"
    )


def test_a_tool_that_fails_is_counted_and_the_episode_goes_on():
    failed, right = play(ToolEnvironment([add, fail]), ROW, '<tool_call>{"name": "fail"}</tool_call>', added(2, 3))
    assert "Error: the tool failed: it broke off (RuntimeError: no luck). The call was not carried out." in text_of(
        failed
    )
    assert failed.counts == {"tool_calls": 1, "malformed_calls": 0, "failed_calls": 1}
    assert text_of(right) == "<tool_response>\n5\n</tool_response>"


def test_images_of_tools_are_named_and_can_be_used():
    environment = ToolEnvironment()
    crop = (
        '<tool_call>{"name": "crop", "arguments": {"bbox_2d": [0, 0, 0.5, 1], "source": "original_image"}}</tool_call>'
    )
    first, second = play(environment, ROW, crop, crop.replace("original_image", "observation_1"))
    assert text_of(first) == (
        "<tool_response>\nA part of original_image, cut from 50 x 50 pixels of its full resolution.\nobservation_1:\n"
        "<image>\n</tool_response>"
    )
    assert images_in(second)[0].size == (25, 50)
    (part,) = (part for part in first.shown if isinstance(part, ImagePart))
    assert (part.min_pixels, part.max_pixels) == (40_000, 2_000_000)


def test_of_several_calls_the_first_is_carried_out_and_the_policy_told():
    (answered,) = play(ToolEnvironment([add]), ROW, added(1, 1) + added(2, 2) + added(3, 3))
    assert text_of(answered) == (
        "<tool_response>\n2\n</tool_response>\nOnly the first of your calls counted; 2 more were not carried out. Write one "
        "call in a turn."
    )
    assert answered.counts["tool_calls"] == 1


def test_a_subclass_may_take_several_calls_of_a_turn():
    class Many(ToolEnvironment):
        name = "many"
        stops = ()
        calls_per_turn = 2

    (answered,) = play(Many([add]), ROW, added(1, 1) + added(2, "x") + added(3, 3))
    assert text_of(answered).startswith("<tool_response>\n2\n</tool_response><tool_response>\nError: second is wrong")
    assert "Only the first 2 of your calls counted; 1 more was not carried out." in text_of(answered)
    assert answered.counts == {"tool_calls": 2, "malformed_calls": 1, "failed_calls": 0}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"min_pixels": 0}, "crop: min_pixels 0 must lie between 1 and max_pixels 2000000"),
        ({"max_pixels": 100}, "crop: min_pixels 40000 must lie between 1 and max_pixels 100"),
        ({"side_multiple": 0}, "crop: side_multiple 0 must be at least 1"),
        ({"tools": [add, add]}, "two tools are called add"),
    ],
)
def test_settings_that_cannot_be_are_refused(options, said):
    with pytest.raises(UserError, match=said):
        CropEnvironment(**options)


def test_a_tool_that_hangs_costs_its_own_episode_the_deadline():
    go_on = threading.Event()

    def wait(hang: bool) -> str:
        """Wait, maybe."""
        return str(go_on.wait(60)) if hang else "done"

    environment = ToolEnvironment([Tool(wait, deadline_s=0.3)])
    hang, done = (
        f'<tool_call>{{"name": "wait", "arguments": {{"hang": {word}}}}}</tool_call>' for word in ("true", "false")
    )
    finished: list[tuple[str, float]] = []

    async def one(texts: list[str]) -> list[Answered]:
        answers = await answers_of(environment, ROW, texts)
        finished.append((texts[0], time.monotonic() - started))
        return answers

    async def all_of_them() -> list[list[Answered]]:
        return await asyncio.gather(one([hang, done]), *(one([done] * 5) for _ in range(8)))

    started = time.monotonic()
    (hung, after), *others = asyncio.run(all_of_them())
    go_on.set()
    assert "Error: the tool failed: it has not answered within 0.3 seconds." in text_of(hung)
    assert hung.counts == {"tool_calls": 1, "malformed_calls": 0, "failed_calls": 1}
    assert text_of(after) == "<tool_response>\ndone\n</tool_response>"
    assert all(
        text_of(answered) == "<tool_response>\ndone\n</tool_response>" for answers in others for answered in answers
    )
    # Nobody waited for it.
    assert [first for first, _ in finished] == [done] * 8 + [hang]
    assert finished[-1][1] >= 0.3


def test_what_follows_from_the_counts_of_calls():
    environment = ToolEnvironment([fail])
    assert environment.call_tags == ("tool_call",)
    counts = {"tool_calls": 4.0, "malformed_calls": 2.0, "failed_calls": 1.0}
    assert environment.derived(counts) == {"used_tool": 1.0, "tool_execution": 0.25}
    assert environment.derived(counts | {"failed_calls": 2.0}) == {"used_tool": 0.0, "tool_execution": 0.0}
    assert environment.derived(dict.fromkeys(counts, 0.0)) == {"used_tool": 0.0, "tool_execution": 0.0}


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


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "prompts .*: No such file"),
        ("[", "neither JSON nor Python"),
        ('{"system": "a", "error": "b"}', "it has no text observation"),
        ('{"system": "a", "observation": "no place", "error": "b"}', "observation must have one <image>"),
    ],
)
def test_words_that_cannot_be_shown_are_refused(content, said, tmp_path):
    file = tmp_path / "words.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(UserError, match=said):
        CropEnvironment(prompts=str(file))
