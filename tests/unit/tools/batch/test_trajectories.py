"""Episodes in the lines of a job, and the rows that are selected from them."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.conversations import load_rows, message, picture, row
from PIL import Image

from lmm_r1.data.messages import ImagePart, TextPart, images_of
from lmm_r1.data.sample import Completion, EpisodeResult, Said
from lmm_r1.generation.engine import Outcome
from lmm_r1.tools.batch import RowLog, run_job, select, with_earned
from remote_rm.verifier import Score


def png(width: int, height: int) -> bytes:
    buffer = io.BytesIO()
    picture(width, height).save(buffer, "PNG")
    return buffer.getvalue()


CROP = ImagePart(png(30, 20), min_pixels=100, max_pixels=2000)
SAID = (
    Said("assistant", "look: <image>?"),
    Said("user", "This is it:\n<image>\nGo on.", (CROP,)),
    Said("assistant", "<answer>2</answer>"),
)


def played(*, end: str = "over", said: tuple[Said, ...] = SAID, **rewards: float) -> EpisodeResult:
    return EpisodeResult(end=end, images=1, rewards=rewards, counts={"tool_calls": 1}, said=said)


def completion(one: EpisodeResult, *, finish_reason: str = "stop") -> Completion:
    return Completion(text=one.said[-1].text, num_tokens=9, finish_reason=finish_reason, played=one)


def lines(folder: Path, *completions: Completion) -> list[dict]:
    """The lines of a job over one row, whose own image is a file."""
    picture(60, 40).save(folder / "a.png")
    own = row(message("user", ImagePart(str(folder / "a.png")), "?"), answer="2")
    shown = (message("system", "Look closely."), *own.messages)
    completions = tuple(replace(one, played=replace(one.played, shown=shown)) for one in completions)
    log = RowLog(folder / "out" / "rows.jsonl")
    log.open({}, overwrite=False, flag="--output")
    outcome = Outcome(index=0, row=own, completions=completions, seconds=0.5)
    run_job([outcome], order=[0], log=log, scorer=None, on_progress=lambda totals: None)
    assert log.skipped() == []
    return list(log.records())


def test_a_line_holds_the_whole_conversation_with_its_pictures_beside_it(tmp_path):
    [line] = lines(tmp_path, completion(played(found=0.5)))
    [response] = line["responses"]
    assert [one["role"] for one in line["prompt"]] == ["user"]
    told = ("end", "turns", "shown_images", "counts", "reward", "scores", "text", "tokens")
    assert [response[name] for name in told] == [
        "over", 2, 1, {"tool_calls": 1}, 0.5, {"found": 0.5}, "<answer>2</answer>", 9,
    ]  # fmt: skip
    roles = [one["role"] for one in response["messages"]]
    assert roles == ["system", "user", "assistant", "user", "assistant"]
    crop = response["messages"][3]["content"][1]
    assert (crop["min_pixels"], crop["max_pixels"]) == (100, 2000)
    assert crop["image"].startswith("rows.images/")
    with Image.open(tmp_path / "out" / crop["image"]) as image:
        assert (image.size, image.tobytes()) == ((30, 20), picture(30, 20).tobytes())


def test_selected_episodes_are_rows_of_many_turns_wherever_they_are_written(tmp_path):
    done = lines(tmp_path, completion(played(found=1.0)))
    [chosen] = select(done, kind="best_of_n", min_reward=0.0, max_per_prompt=1, min_margin=0.0)
    (tmp_path / "out" / "sft.jsonl").write_text(json.dumps(chosen) + "\n")
    [read] = load_rows(str(tmp_path / "out" / "sft.jsonl"))
    assert [one.role for one in read.messages] == ["system", "user", "assistant", "user", "assistant"]
    # A turn of the model is text, whatever it says.
    assert read.messages[2].parts == (TextPart("look: <image>?"),)
    before, crop, behind = read.messages[3].parts
    assert (before, behind) == (TextPart("This is it:\n"), TextPart("\nGo on."))
    assert (crop.min_pixels, Path(crop.source).parent) == (100, tmp_path / "out" / "rows.images")
    assert [Path(part.source).is_file() for part in images_of(read.messages)] == [True, True]


def test_rejection_takes_different_episodes_that_are_whole(tmp_path):
    other = (Said("assistant", "at once"), *SAID[1:])
    done = lines(
        tmp_path,
        completion(played(found=1.0, end="turns")),
        completion(played(found=1.0), finish_reason="length"),
        completion(played(found=1.0)),
        completion(played(found=1.0)),
        # The last turn is the same, the first is not.
        completion(played(found=1.0, said=other)),
    )
    rows = list(select(done, kind="rejection_sampling", min_reward=1.0, max_per_prompt=9, min_margin=0.0))
    firsts = [one["messages"][2]["content"] for one in rows]
    assert firsts == [[{"type": "text", "text": "look: <image>?"}], "at once"]


def test_an_environment_that_shows_the_mark_itself_leaves_its_row_out(tmp_path):
    own = row(message("user", "?"), answer="2")
    log = RowLog(tmp_path / "rows.jsonl")
    log.open({}, overwrite=False, flag="--output")
    said = (SAID[0], Said("user", "An <image> like <image>", (CROP,)), SAID[2])
    outcome = Outcome(index=0, row=own, completions=(completion(played(said=said)),))
    run_job([outcome], order=[0], log=log, scorer=None, on_progress=lambda totals: None)
    [skipped] = log.skipped()
    assert "shows the word <image> as text" in skipped.reason


@pytest.mark.parametrize(
    ("score", "rewards", "wanted"),
    [
        (None, {}, None),
        (None, {"found": 0.5, "fast": 0.25}, (0.75, {"found": 0.5, "fast": 0.25})),
        (1.5, {"found": 0.5}, (2.0, {"accuracy": 1.0, "found": 0.5})),
        (1.5, {}, (1.5, {"accuracy": 1.0})),
    ],
)
def test_what_the_environment_gives_is_added_to_the_verifiers_reward(score, rewards, wanted):
    given = None if score is None else Score(reward=score, score=1.0, parts={"accuracy": 1.0})
    found = with_earned(given, played(**rewards))
    assert (None if found is None else (found.reward, found.parts)) == wanted
