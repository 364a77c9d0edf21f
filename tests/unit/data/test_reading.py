"""What flags lay over every row of a run."""

from dataclasses import replace
from pathlib import Path

import pytest
from helpers.tables import table

from lmm_r1.data.formats import OWN
from lmm_r1.data.messages import ImagePart, Message, Row, TextPart, VideoPart
from lmm_r1.data.reading import SHIPPED_PROMPTS, PromptTemplate, RowReading, shipped_prompt, told_prompt
from lmm_r1.errors import UserError
from remote_rm.responses import format_score

TURNS = table("data/reading", "turns")


def read(reading: RowReading, **columns: object) -> Row:
    record = {"messages": TURNS, "answer": "4", **columns}
    return reading.row(record, row_format=OWN, location="line 3", base_dir=Path("/rows"), answer_required=True)


def template(text: str) -> RowReading:
    return RowReading(prompt_template=PromptTemplate(text, flag="--data.prompt_template"))


def test_a_system_prompt_replaces_the_rows_own_or_stands_in_front():
    reading = RowReading(system_prompt="New.")
    new = Message(role="system", parts=(TextPart("New."),))
    assert [message.role for message in read(reading).messages] == ["system", "user", "assistant", "user"]
    assert read(reading).messages[0] == new
    assert read(reading, messages=TURNS[1:]).messages == read(reading).messages


def test_a_default_prompt_is_for_prompts_without_instructions():
    reading, asked = RowReading(default_prompt="Think."), [{"role": "user", "content": "2+2?"}]
    told = [{"role": "user", "content": "2+2? Answer in <answer> tags."}]
    for turns in (TURNS, told):
        assert read(reading, messages=turns) == read(RowReading(), messages=turns)
    for turns in (asked, [*asked, {"role": "assistant", "content": "<answer>4</answer>"}, *asked]):
        first, *rest = read(reading, messages=turns).messages
        assert first == Message(role="system", parts=(TextPart("Think."),))
        assert tuple(rest) == read(RowReading(), messages=turns).messages
    plain = replace(reading, plain_template="{}")
    assert read(plain, message="2+2?", messages=None).messages == (Message(role="user", parts=(TextPart("2+2?"),)),)


@pytest.mark.parametrize("name", SHIPPED_PROMPTS)
def test_what_a_shipped_prompt_shows_has_the_format_that_is_paid(name):
    text = shipped_prompt(name)
    assert format_score(text[text.index("\n<think>") :]) == 1.0
    rows = [read(RowReading(default_prompt=text), messages=TURNS[1:]), read(RowReading())]
    sentence = f"system prompt of 1 of 2 prompts (--f {name}; none adds none): Think "
    assert told_prompt(name, rows, flag="--f").startswith(sentence)
    assert told_prompt(name, rows[1:], flag="--f") is told_prompt("none", rows, flag="--f") is None


def test_a_prompt_in_own_words_is_told_in_one_line():
    rows = [read(RowReading(system_prompt="Look.\nThink.")), read(RowReading(system_prompt="none"))]
    told, *others = (told_prompt(prompt, rows, flag="--f") for prompt in ("Look.\nThink.", "none", None))
    assert (told, others) == ("system prompt of 1 of 2 prompts (--f; none adds none): Look. Think.", [None, None])


def test_bounds_hold_where_an_image_or_a_video_has_none_of_its_own():
    assert read(RowReading(min_pixels=100, max_pixels=2000)).messages[-1].parts[0] == ImagePart(
        "/rows/a.png", min_pixels=100, max_pixels=900
    )
    video = [{"role": "user", "content": [{"type": "video", "video": "v.mp4"}]}]
    assert read(RowReading(max_pixels=50), messages=video).messages[0].parts == (
        VideoPart("/rows/v.mp4", max_pixels=50),
    )
    with pytest.raises(UserError, match="^line 3: .* put min_pixels 901 above max_pixels 900"):
        read(RowReading(min_pixels=901))


def test_a_template_writes_the_last_turn_of_the_user_with_its_image_where_the_content_is():
    row = read(template("Level {{ level }}: {{ content }} Box the answer.\n"), level=2)
    assert row.messages[:-1] == read(RowReading()).messages[:-1]
    assert row.messages[-1].parts == (
        TextPart("Level 2:"),
        ImagePart("/rows/a.png", max_pixels=900),
        TextPart("x? Box the answer."),
    )


def test_a_template_may_move_the_image_and_keeps_the_lines_of_a_text():
    moved = read(template("{{ content | replace('<image>', '') }}<image>"))
    assert moved.messages[-1].parts == (TextPart("x?"), ImagePart("/rows/a.png", max_pixels=900))
    text = read(template("Q:\n{{ content }}\n\nA:"), messages=[{"role": "user", "content": "1\n+1?"}])
    assert text.messages[0].parts == (TextPart("Q:\n1\n+1?\n\nA:"),)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{{ content }}{{ hint }}", "line 3: --data.prompt_template cannot be filled in: 'hint' is undefined"),
        ("{{ content.upper.__globals__ }}", "line 3: --data.prompt_template cannot be filled in: "),
        ("{{ content + 1 }}", "line 3: --data.prompt_template cannot be filled in"),
        ("{{ content }}{{ content }}", "line 3: the prompt's template must write a text, and one tag"),
        ("{{ content[:0] }}", "line 3: the prompt's template must write a text, and one tag"),
    ],
)
def test_a_template_that_a_row_cannot_fill_is_told_with_the_rows_place(text, sentence):
    with pytest.raises(UserError) as raised:
        read(template(text))
    assert str(raised.value).startswith(sentence)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{% if %}{{ content }}", "--data.prompt_template line 1: Expected an expression"),
        ("Solve it.", "--data.prompt_template omits the prompt; write {{ content }}"),
    ],
)
def test_a_template_that_is_broken_or_leaves_the_prompt_out_is_refused(text, sentence):
    with pytest.raises(UserError) as raised:
        template(text)
    assert str(raised.value).startswith(sentence)
