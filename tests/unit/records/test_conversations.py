"""Turns of episodes in a run folder: what is written is what is read, and what is malformed is named."""

from dataclasses import asdict

import pytest
from helpers.conversations import picture
from helpers.run_folders import rollout, write_lines
from PIL import Image

from lmm_r1.data.messages import ImagePart
from lmm_r1.data.sample import CallOutcome, Cut, CutImage, Said
from lmm_r1.errors import UserError
from lmm_r1.records.rollouts import RecordedPart, keep_turns, read_rollouts, turn_record

CUT = Cut(picture=1, name="observation_1", box=(2, 0, 6, 5), size=(8, 6), keypoint=(4.5, 2.0))
RECORD = {"picture": 1, "name": "observation_1", "box": [2, 0, 6, 5], "size": [8, 6], "keypoint": [4.5, 2.0]}


def kept(folder, *said):
    return keep_turns(said, folder=folder, location="row 1")


def test_turns_are_written_with_pictures_boxes_calls_and_rewards_and_read_again(tmp_path):
    bad = CallOutcome(tool="", outcome="malformed", problem="there is no tool 'x'")
    turns = kept(
        tmp_path,
        Said("assistant", "<think>a</think>", calls=(bad,), rewards=(("step", -0.5),)),
        Said("user", "one <image> two <image>", (CutImage(picture(8, 6), cut=CUT), ImagePart(picture(4, 4)))),
    )
    records = [turn_record(turn) for turn in turns]
    first, second = (part["image"] for part in records[1]["content"] if part["type"] == "image")
    assert records == [
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "<think>a</think>"}],
            "calls": [{"tool": "", "outcome": "malformed", "problem": "there is no tool 'x'"}],
            "rewards": {"step": -0.5},
        },
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "one "},
                {"type": "image", "image": first, "cut": asdict(CUT)},
                {"type": "text", "text": " two "},
                {"type": "image", "image": second},
            ],
        },
    ]
    assert Image.open(tmp_path / first).tobytes() == picture(8, 6).tobytes()
    write_lines(tmp_path / "rollouts.jsonl", [rollout(step=1, said=records, end="over"), rollout(step=1)])
    played, single = read_rollouts(tmp_path / "rollouts.jsonl").read([0, 1])
    assert (played.said, played.end) == (turns, "over")
    assert (single.said, single.end) == ((), None)


def test_marks_that_are_not_of_the_pictures_stay_text(tmp_path):
    image = ImagePart(picture(4, 4))
    shown, lost = kept(tmp_path, Said("user", "write <image>: <image>", (image,)), Said("user", "see <image>"))
    assert [part.kind for part in shown.parts] == ["text", "image"]
    assert shown.parts[0].value == "write <image>: <image>"
    assert lost.parts == (RecordedPart(kind="text", value="see <image>"),)


def turn(**fields):
    return [{"role": "user", "content": "?", **fields}]


def image(**fields):
    return turn(content=[{"type": "image", "image": "a.png", "cut": {**RECORD, **fields}}])


@pytest.mark.parametrize(
    ("said", "complaint"),
    [
        ("hello", "said: Input should be a valid tuple, found 'hello'"),
        ([["user"]], "said.0: Input should be a dictionary"),
        ([*turn(), {"content": "?"}], "said.1.role: Field required"),
        (turn(calls="none"), "said.0.calls: Input should be a valid tuple, found 'none'"),
        (turn(calls=[{"tool": "crop", "outcome": "lost"}]), "said.0.calls.0.outcome: Input should be 'done'"),
        (turn(rewards={"step": "1"}), "said.0.rewards.step: Value error, must be a number, found '1'"),
        (image(box=[2, 0, 6]), "said.0.parts.0.cut.box.3: Field required"),
    ],
)
def test_malformed_turns_are_named_with_file_line_and_turn(tmp_path, said, complaint):
    path = tmp_path / "rollouts.jsonl"
    write_lines(path, [rollout(step=1), rollout(step=2, said=said)])
    with pytest.raises(UserError) as caught:
        read_rollouts(path)
    assert str(caught.value).startswith(f"{path}, line 2")
    assert complaint in str(caught.value)
