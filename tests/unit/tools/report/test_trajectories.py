"""Episodes in the page's data: turns with pictures and boxes, what was counted, why they ended."""

from helpers.run_folders import PageText, cropped, write_lines, write_stage

from lmm_r1.records.run_folder import read_run
from lmm_r1.tools.report import build_report


def page_of(folder, *lines):
    write_stage(folder, name="crop", steps=1, seconds=1.0, hour=9)
    write_lines(folder / "rollouts.jsonl", lines)
    write_lines(folder / "metrics.jsonl", [{"step": 1, "turns": 3.0, "tool_calls": 2.0, "over_turn": 0.0}])
    return PageText(build_report(read_run(folder)))


def test_every_turn_is_there_with_its_picture_beside_the_box_it_was_cut_by(tmp_path):
    page = page_of(tmp_path, cropped(tmp_path))
    (record,) = page.data["rollouts"]
    assert [turn["role"] for turn in record["said"]] == ["assistant", "user", "assistant", "user", "assistant"]
    scene, question = page.data["prompts"][0][1]["parts"]
    _, part, rest = record["said"][3]["parts"]
    assert (scene, question, rest) == ({"image": 0}, {"text": "Which?"}, {"text": "\nGo on."})
    assert part["image"] == 1
    assert part["cut"] == {
        "picture": 0,
        "name": "original_image",
        "box": [100, 60, 180, 120],
        "size": [400, 300],
        "keypoint": None,
    }
    assert record["said"][0]["calls"][0]["outcome"] == "malformed"
    assert record["said"][2]["rewards"] == {"looked": 0.25}


def test_counts_stand_apart_from_the_parts_of_the_reward_and_the_end_is_in_words(tmp_path):
    page = page_of(tmp_path, cropped(tmp_path, end="tokens", masked=True))
    (record,) = page.data["rollouts"]
    rewards = [name for name in record["scores"] if name not in record["counted"]]
    assert rewards == ["accuracy", "looked"]
    assert (record["ended"], record["masked"]) == ("out of tokens", True)
    assert record["why_ended"] == "it would have continued beyond the tokens of --data.max_len"
    assert "Turns and pictures shown" in page.text
    assert "Tool calls" in page.text


def test_a_picture_that_is_gone_says_so_and_keeps_its_box(tmp_path):
    line = cropped(tmp_path)
    (tmp_path / "images" / "part.png").unlink()
    (tmp_path / "images" / "scene.png").write_bytes(b"half a")
    page = page_of(tmp_path, line)
    part = page.data["rollouts"][0]["said"][3]["parts"][1]
    assert part["missing"] == "images/part.png: file not found"
    assert part["cut"]["box"] == [100, 60, 180, 120]
    assert "could not be shown: 2" in page.text


def test_what_a_model_or_a_tool_wrote_in_a_turn_cannot_become_markup(tmp_path):
    nasty = "</script><script>alert(1)</script>"
    call = {"tool": nasty, "outcome": "failed", "problem": nasty}
    said = [
        {"role": nasty, "content": nasty, "calls": [call], "rewards": {nasty: 1.0}},
        {"role": "user", "content": [{"type": "image", "image": nasty}]},
    ]
    page = page_of(tmp_path, cropped(tmp_path, said=said, end=nasty, counts={nasty: 1}))
    assert page.html.count("</script>") == 3
    (record,) = page.data["rollouts"]
    assert record["said"][0]["calls"] == [call]
    assert record["said"][1]["parts"][0]["missing"].endswith("file not found")
