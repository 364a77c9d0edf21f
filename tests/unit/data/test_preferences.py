"""Rows with judged responses: what is refused, with file, line and a sentence, and what is laid over all rows of a run."""

import io
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from lmm_r1.data.files import read_row_file
from lmm_r1.data.formats.row_format import ColumnNames
from lmm_r1.data.images import load_image
from lmm_r1.data.messages import ImagePart, Message, PreferenceRow, StoredBytes, TextPart
from lmm_r1.data.preferences import read_pairs
from lmm_r1.data.reading import AS_THEY_ARE, PromptTemplate, RowReading
from lmm_r1.errors import UserError
from lmm_r1.tools.batch import select

ASKED = {"role": "user", "content": "1 + 1?"}
PAIR = {"prompt": "1 + 1?", "chosen": "2", "rejected": "3"}
VERDICT = {"prompt": "1 + 1?", "completion": "2", "label": True}


def said(text, role="assistant"):
    return {"role": role, "content": text}


def with_image(text, role="user"):
    return {"role": role, "content": [{"type": "image", "image": "red.png"}, {"type": "text", "text": text}]}


def written(folder: Path, *records: object) -> str:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(file)


def loaded(path: str, reading: RowReading = AS_THEY_ARE) -> list:
    return list(read_pairs(path, reading=reading).rows.values())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    Image.new("RGB", (8, 4), "red").save(tmp_path / "red.png")
    return tmp_path


BAD = [
    # Both the same, as text, with other blanks, and as turns.
    ({**PAIR, "rejected": " 2\n"}, "chosen and rejected are equal"),
    ({"chosen": [ASKED, said("2")], "rejected": [ASKED, said("2")]}, "chosen and rejected are equal"),
    # An empty side.
    ({**PAIR, "chosen": ""}, 'the field "chosen" is empty'),
    ({**PAIR, "rejected": [said(" ")]}, '"rejected" (assistant) is empty'),
    # An image on one side only: of the prompt, and of the response.
    (
        {"chosen": [with_image("Which?"), said("red")], "rejected": [said("Which?", "user"), said("blue")]},
        "are answers to different prompts",
    ),
    (
        {**PAIR, "chosen": [with_image("2", "assistant")], "rejected": "3"},
        "the response chosen has 1 images and the other one none",
    ),
    # Other prompts.
    (
        {"chosen": [ASKED, said("2")], "rejected": [said("2 + 2?", "user"), said("3")]},
        '"chosen" and "rejected" are answers to different prompts',
    ),
    ({**PAIR, "rejected": [said("2 + 2?", "user"), said("3")]}, '"rejected" begins with a prompt'),
    # No prompt at all.
    ({"chosen": "2", "rejected": "3"}, "no field prompt or question"),
    ({**PAIR, "prompt": [ASKED, said("It is")]}, 'the prompt "prompt" ends with a turn of the role assistant'),
    # Turns.
    ({**PAIR, "chosen": [said("2"), said("So?", "user")]}, "must begin and end with a turn of the assistant"),
    ({**PAIR, "chosen": True}, '"chosen" must be a text or a list of messages, not bool'),
    # Scores.
    ({**PAIR, "margin": "much"}, "\"margin\" is 'much'; it must be a finite number"),
    ({**PAIR, "margin": -1}, '"margin" is -1, so the rejected response would be better'),
    ({**PAIR, "chosen_reward": 0, "rejected_reward": 0.5}, '"chosen_reward" minus "rejected_reward" is -0.5'),
    # Media.
    ({**PAIR, "prompt": "<image>?", "images": ["gone.png"]}, "no image file"),
    ({**PAIR, "prompt": "<image>?", "images": ["red.png"] * 2}, '2 images in the field "images" but 1 "<image>" places'),
]  # fmt: skip


@pytest.mark.parametrize(("record", "sentence"), BAD)
def test_a_bad_row_is_told_with_its_file_its_line_and_a_sentence(record, sentence, folder):
    file = written(folder, record)
    with pytest.raises(UserError) as raised:
        read_pairs(file)
    assert str(raised.value).startswith(f"{file} line 1: ")
    assert sentence in str(raised.value)
    # Left out, it is told, and the others are there.
    both = written(folder, PAIR, {**dict.fromkeys(PAIR), **record})
    read = read_pairs(both, bad_rows="skip")
    assert list(read.rows) == [0]
    assert [(row.index, row.reason.startswith(f"{file} line 2: ")) for row in read.skipped] == [(1, True)]


def only(row: object) -> PreferenceRow:
    (found,) = row
    return found


def words(messages: tuple[Message, ...]) -> list[tuple[str, str]]:
    return [(one.role, "".join(part.text for part in one.parts if isinstance(part, TextPart))) for one in messages]


def test_a_prompt_is_shared_with_its_images_and_both_sides_go_on_from_it(folder):
    record = {
        "prompt": [with_image("Which colour?")],
        "chosen": [said("<look>"), {"role": "tool", "content": "red"}, said("It is red.")],
        "rejected": [said("Blue.")],
        "margin": 3,
    }
    row = only(loaded(written(folder, record)))
    assert row.messages[0].parts == (ImagePart(str(folder / "red.png")), TextPart("Which colour?"))
    assert words(row.chosen) == [("assistant", "<look>"), ("tool", "red"), ("assistant", "It is red.")]
    assert words(row.rejected) == [("assistant", "Blue.")]
    assert (row.margin, row.plain, row.location) == (3.0, False, f"{folder}/rows.jsonl line 1")


def noise(seed: int) -> bytes:
    """A PNG file of more bytes than are kept in memory."""
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 255, (32, 32, 3), dtype=np.uint8)).save(
        buffer, format="PNG"
    )
    return buffer.getvalue()


def turns_of(image: bytes, answer: str) -> list[dict]:
    asked = [
        {"type": "image", "text": None, "image": {"bytes": image}},
        {"type": "text", "text": "Which?", "image": None},
    ]
    return [said(asked, "user"), said([{"type": "text", "text": answer, "image": None}])]


def test_prompts_with_the_same_image_twice_in_a_row_file_are_one_and_with_another_image_not(folder):
    records = [{"chosen": turns_of(noise(1), "red"), "rejected": turns_of(noise(other), "blue")} for other in (1, 2)]
    pq.write_table(pa.Table.from_pylist(records), folder / "rows.parquet")
    read = read_pairs(str(folder / "rows.parquet"), bad_rows="skip")
    (row,) = read.rows.values()
    image = row.messages[0].parts[0]
    assert isinstance(image.source, StoredBytes)
    assert load_image(image, location="").size == (32, 32)
    assert [skipped.reason for skipped in read.skipped] == [
        f'{folder}/rows.parquet row 2: "chosen" and "rejected" are answers to different prompts; both must answer the same'
    ]


def test_plain_text_stays_as_it_is_where_no_chat_template_writes_it(folder):
    reading = RowReading(plain_template="Q: {}\nA:")
    row = only(loaded(written(folder, PAIR), reading=reading))
    assert (words(row.messages), row.plain) == ([("user", "Q: 1 + 1?\nA:")], True)
    with pytest.raises(UserError, match="line 1: --data.system_prompt requires prompts that use the chat template"):
        loaded(written(folder, PAIR), reading=RowReading(plain_template="{}", system_prompt="Think."))


def test_what_is_laid_over_a_run_lies_over_judged_rows(folder):
    template = PromptTemplate("{{ content }} Answer {{ how }}.", flag="--data.prompt_template")
    reading = RowReading(system_prompt="Think.", prompt_template=template, max_pixels=64)
    record = {"prompt": "<image>Which?", "images": ["red.png"], "chosen": "red", "rejected": "blue", "how": "briefly"}
    row = only(loaded(written(folder, record), reading=reading))
    assert words(row.messages) == [("system", "Think."), ("user", "Which? Answer briefly.")]
    assert row.messages[1].parts[0] == ImagePart(str(folder / "red.png"), max_pixels=64)


def test_images_within_responses_are_bounded_and_known_to_be_there(folder):
    record = {
        "prompt": "Look.",
        "chosen": [said("<look>"), with_image("Part."), said("Red.")],
        "rejected": [said("<look>"), with_image("Part."), said("Blue.")],
    }
    row = only(loaded(written(folder, record), reading=RowReading(max_pixels=64)))
    image = ImagePart(str(folder / "red.png"), max_pixels=64)
    assert [side[1].parts[0] for side in (row.chosen, row.rejected)] == [image, image]
    (folder / "red.png").unlink()
    with pytest.raises(UserError, match="rows.jsonl line 1: no image file"):
        loaded(written(folder, record))


def test_columns_that_the_user_named_go_before_others(folder):
    record = {"q": "1 + 1?", "good": "2", "bad": "3", "chosen": "x", "rejected": "y", "prompt": "z"}
    names = ColumnNames(prompt="q", chosen="good", rejected="bad")
    row = only(loaded(written(folder, record), reading=RowReading(names=names)))
    assert [words(part) for part in (row.messages, row.chosen, row.rejected)] == [
        [("user", "1 + 1?")],
        [("assistant", "2")],
        [("assistant", "3")],
    ]


@pytest.mark.parametrize("record", [VERDICT, {"conversations": [ASKED, said("2")], "kto_tag": False}])
def test_sft_does_not_learn_responses_that_may_be_undesirable(record, folder):
    with pytest.raises(UserError, match="it also holds undesirable responses"):
        read_row_file(written(folder, record))


def test_a_label_that_is_the_answer_tells_no_verdict(folder):
    file = written(folder, {"prompt": "1 + 1?", "completion": "It is 2.", "label": 2})
    assert read_row_file(file, reading=RowReading(names=ColumnNames(answer="label"))).rows[0].answer == "2"


def scored(*pairs):
    responses = [{"text": text, "tokens": 3, "finish_reason": "stop", "reward": reward} for text, reward in pairs]
    return {"index": 0, "prompt": [ASKED], "answer": "2", "datasource": "sums", "responses": responses}


def test_pairs_of_batch_inference_load_as_they_are(folder):
    records = [
        scored(("2", 1.0), ("", 0.0), ("3", 0.25), ("2 ", 0.5)),
        # Nothing but an empty response, or the same one, is worse.
        scored(("2", 1.0), (" ", 0.0)),
        scored(("2", 1.0), ("2\n", 0.0)),
    ]
    (pair,) = select(records, kind="dpo_pairs", min_reward=1.0, max_per_prompt=1, min_margin=0.0)
    row = only(loaded(written(folder, pair)))
    assert (words(row.messages), words(row.chosen), words(row.rejected)) == (
        [("user", "1 + 1?")],
        [("assistant", "2")],
        [("assistant", "3")],
    )
    assert (row.margin, row.chosen_score, row.rejected_score, row.datasource) == (0.75, 1.0, 0.25, "sums")
