"""What other tools act on in a row is honoured or refused by name, through every door; the rest is reported once."""

import json
import re
from functools import partial
from pathlib import Path

import pytest

from lmm_r1.data.files import read_row_file
from lmm_r1.data.messages import ImagePart, TextPart, VideoPart, demonstration
from lmm_r1.data.preferences import read_pairs
from lmm_r1.data.reading import RowReading
from lmm_r1.data.row_parser import parse_row, stored_messages
from lmm_r1.errors import UserError
from lmm_r1.supervised.samples import loss_turns

ASKED = {"role": "user", "content": "2+2?"}


def said(text: str = "4", **keys: object) -> dict:
    return {"role": "assistant", "content": text, **keys}


def parse(record: dict):
    return parse_row(record, location="rows.jsonl line 7", base_dir=Path("/data"), answer_required=False)


def written(folder: Path, *records: dict) -> str:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(file)


@pytest.mark.parametrize("turn", ["role", "from"])
@pytest.mark.parametrize(
    ("first", "second", "every", "last"),
    [
        *(
            ({key: no}, {}, [3], [3])
            for key in ("loss", "weight", "train", "loss_weight")
            for no in (False, 0, "false")
        ),
        *(({key: yes}, {}, [1, 3], [1, 3]) for key in ("loss", "training", "loss_scale") for yes in (True, 1.0, "1")),
        ({"loss": None, "weight": float("nan")}, {"masked": False}, [1, 3], [3]),
        ({}, {"masked": True, "train": 0}, [1], None),
    ],
)
def test_marked_turns_are_in_the_loss_or_not(turn, first, second, every, last, tmp_path):
    turns = [ASKED, said("5", **first), ASKED, said("4", **second)]
    if turn == "from":
        names = {"role": "from", "content": "value"}
        turns = [{names.get(key, key): value for key, value in one.items()} for one in turns]
    column = "messages" if turn == "role" else "conversations"
    [row] = read_row_file(written(tmp_path, {column: turns}), answer_required=False).rows.values()
    row = demonstration(row)
    assert loss_turns(row, every_turn=True) == every
    # Rows that are written and read again keep their marks.
    again = parse({"messages": stored_messages(row.messages)})
    assert again.messages == row.messages
    if last is not None:
        assert loss_turns(again, every_turn=False) == last
    else:
        with pytest.raises(UserError, match="every turn is marked as not in the loss"):
            loss_turns(again, every_turn=False)


def test_marks_that_nothing_can_honour_are_refused(tmp_path):
    with pytest.raises(UserError, match=r'message 2 .* has "weight" 0.5; it must be true or 1'):
        parse({"messages": [ASKED, said(weight=0.5)]})
    with pytest.raises(UserError, match="marked both as in the loss and as not in it"):
        parse({"messages": [ASKED, said(weight=1, train=False)]})
    with pytest.raises(UserError, match=r"message 1 \(user\) is marked as in the loss"):
        loss_turns(parse({"messages": [{**ASKED, "train": True}, said()]}), every_turn=True)
    for side in ("chosen", "rejected"):
        pair = {"prompt": [ASKED], "chosen": [said("4")], "rejected": [said("5")]}
        pair[side] = [{**pair[side][0], "loss": False}]
        with pytest.raises(UserError, match=f'line 1: "{side}" has a mark'):
            read_pairs(written(tmp_path, pair))


VIDEO = ("video_start", "video_end", "nframes", "min_frames", "total_pixels", "resized_height", "resized_width")
TURNS = ("reasoning_details", "thinking_blocks", "tool_calls", "images", "train_detail")
THOUGHTS = ("thinking", "reasoning", "reasoning_content")
COLUMNS = ("tools", "functions", "audios", "chat_template_kwargs", "enable_thinking")
DOORS = {
    "messages": ({"messages": [ASKED, said()]}, read_row_file),
    "sharegpt": (
        {"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]},
        read_row_file,
    ),
    "verl": ({"prompt": [ASKED], "reward_model": {"ground_truth": "4"}}, read_row_file),
    "pair": ({"prompt": [ASKED], "chosen": [said("4")], "rejected": [said("5")]}, read_pairs),
}


@pytest.mark.parametrize("door", DOORS)
def test_keys_that_others_act_on_are_refused_by_name_through_every_door(door, tmp_path):
    record, read = DOORS[door]
    read = partial(read, answer_required=False) if read is read_row_file else read

    def refusal(changed: dict) -> str:
        with pytest.raises(UserError) as raised:
            read(written(tmp_path, changed))
        return str(raised.value)

    read(written(tmp_path, {**record, "chat_template_kwargs": {"enable_thinking": None}, "tools": [], "audios": None}))
    for key in COLUMNS:
        given = {"x": 1} if key != "enable_thinking" else False
        assert f'rows.jsonl line 1: the field "{key}" is not read' in refusal({**record, key: given})
    column = next(name for name in ("conversations", "chosen", "messages", "prompt") if name in record)
    last = record[column][-1]
    for key in TURNS:
        assert f'has "{key}", which is not read' in refusal(
            {**record, column: [*record[column][:-1], {**last, key: "4"}]}
        )
    for key in THOUGHTS:
        turns = [*record[column][:-1], {**last, key: "so 4"}]
        if last.get("role", last.get("from")) == "user":
            assert f'has "{key}", which must be the text of an assistant\'s thought' in refusal(
                {**record, column: turns}
            )
            continue
        [row] = read(written(tmp_path, {**record, column: turns})).rows.values()
        said = row.chosen[-1] if door == "pair" else demonstration(row).messages[-1]
        assert said.parts == (TextPart("<think>so 4</think>4"),)
        turns[-1]["content" if "content" in last else "value"] = "<think>or 5</think>4"
        assert f'has two thoughts, in "{key}" and elsewhere' in refusal({**record, column: turns})


@pytest.mark.parametrize("response", ["answer", "response"])
def test_a_thought_in_a_column_of_its_own_opens_the_response(response, tmp_path):
    for key, thought in (("thinking", "<think>so 4</think>"), ("reasoning_content", "so 4")):
        file = written(tmp_path, {"prompt": "2+2?", response: "4", key: thought})
        [row] = read_row_file(file, answer_required=False).rows.values()
        assert (row.response.parts, row.answer) == ((TextPart("<think>so 4</think>\n\n4"),), "4")


@pytest.mark.parametrize("column", [False, True])
@pytest.mark.parametrize("key", VIDEO)
def test_a_clip_or_a_size_of_a_part_is_refused_by_name(key, column):
    kind = "image" if key.startswith("resized") else "video"
    part, entry = {"type": kind, kind: "v"}, {kind: "v", key: 28}
    record = {"messages": [{"role": "user", "content": [part | entry]}]}
    if column:
        record = {"messages": [{"role": "user", "content": f"<{kind}>?"}], f"{kind}s": [entry]}
    with pytest.raises(UserError, match=f'^rows.jsonl line 7: .* has "{key}", which is not read'):
        parse(record)


def test_an_entry_of_a_media_column_may_be_a_part_with_its_settings():
    content = [{"type": "image", "max_pixels": 784}, {"type": "text", "text": "?"}, {"type": "video"}]
    row = parse(
        {
            "messages": [{"role": "user", "content": content}],
            "images": [{"image": "a.png", "min_pixels": 28, "max_pixels": 999}],
            "videos": [{"type": "video", "video": "v.mp4", "fps": 1, "max_frames": 8}],
        }
    )
    assert row.messages[0].parts == (
        ImagePart("/data/a.png", min_pixels=28, max_pixels=784),
        TextPart("?"),
        VideoPart("/data/v.mp4", fps=1.0, max_frames=8),
    )


def test_an_empty_system_turn_or_history_is_kept_and_an_empty_question_or_answer_is_not(tmp_path):
    empty = [{"role": "system", "content": ""}, ASKED, said(""), {"role": "tool", "content": []}, said()]
    row = parse({"messages": empty})
    assert [turn.parts for turn in row.messages] == [(TextPart(text),) for text in ("", "2+2?", "", "", "4")]
    assert loss_turns(row, every_turn=True) == [4]
    for turns in ([ASKED, said("")], [{"role": "user", "content": " "}, said()], empty[:1]):
        with pytest.raises(UserError, match="is empty"):
            parse({"messages": turns})


SHOWN = "Which? A. cat B. dog"


@pytest.mark.parametrize(
    ("record", "missing"),
    [
        ({"problem": "Which?", "choices": ["cat", "dog"]}, '"choices"'),
        ({"problem": "Which?", "options": "['cat', 'dog']"}, '"options"'),
        ({"problem": "Which?", "choices": {"text": ["cat", "dog"], "label": ["A", "B"]}}, '"choices"'),
        ({"problem": "Which?", "A": "cat", "B": "dog"}, '"A, B"'),
        ({"problem": "Which?", "option_a": "cat", "option_b": "dog"}, '"option_a, option_b"'),
        ({"problem": SHOWN, "choices": ["Cat", "dog"], "A": None}, None),
        ({"problem": SHOWN, "options": {"A": "cat", "B": "dog"}}, None),
        ({"problem": "Which?", "choices": []}, None),
    ],
)
def test_options_that_the_prompt_does_not_show_are_found(record, missing, tmp_path):
    hidden: dict[str, str] = {}
    read_row_file(written(tmp_path, {**record, "answer": "1", "id": 7}), reading=RowReading(hidden_options=hidden))
    assert [re.sub(".* of ", "", what) for what in hidden.values()] == ([missing] if missing else [])
