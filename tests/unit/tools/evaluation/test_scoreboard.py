import base64
import io
import json
import re
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

import pytest
from helpers.conversations import message, picture, row
from helpers.run_folders import PageText, judged, judged_rows
from PIL import Image

from lmm_r1.data.messages import ImagePart, SkippedRow, VideoPart
from lmm_r1.records.metrics import read_evaluation
from lmm_r1.records.responses import VerifierVerdict
from lmm_r1.tools.evaluation.board import CheckpointResponses, MeasuredFile, board_record, build_board, print_board
from lmm_r1.tools.evaluation.page import build_page

NASTY = '</p><script>alert("x")</script>'
AT = datetime(2026, 1, 31, 12, 5, tzinfo=timezone.utc)


def board(**changes: object):
    """`base` has 2 of 4 samples right on two rows, `grpo` 3 of 4."""
    base = judged_rows([[True, False], [True, False]])
    better = [
        *judged_rows([[True, True]], checkpoint="grpo"),
        *judged_rows([[False, True]], checkpoint="grpo", index=1, row="rows.jsonl line 2", datasource="words"),
    ]
    base = [*base[:2], *(judged(r.sample == 0, index=1, sample=r.sample, datasource="words") for r in base[2:])]
    values = {
        "files": [
            MeasuredFile(
                name="held_out",
                source="rows.jsonl",
                verifiers=("math",),
                ks=(1, 2),
                sampling={"temperature": 1.0, "n_samples": 2, "max_new_tokens": 16},
                skipped=(SkippedRow(index=2, reason=f"rows.jsonl line 3: no image {NASTY}"),),
            )
        ],
        "checkpoints": [
            CheckpointResponses(name="base", path="m0", files={"held_out": base}, seconds={"held_out": 1.5}),
            CheckpointResponses(name="grpo", path="m1", files={"held_out": better}),
        ],
        "baseline": "base",
        "resamples": 1000,
        "seed": 0,
        "settings": {"dtype": "float32", "seed": 0},
    }
    return build_board(**(values | changes))


def test_the_record_holds_every_score_and_is_read_as_an_evaluation(tmp_path: Path):
    record = board_record(board())
    path = tmp_path / "evaluation.json"
    path.write_text(json.dumps(record))
    read = read_evaluation(path)
    assert [checkpoint.name for checkpoint in read.checkpoints] == ["base", "grpo"]
    scores = read.checkpoints[1].files["held_out"]
    assert (scores.rows, scores.accuracy, scores.format, scores.truncated_rate) == (2, 0.75, 1.0, 0.0)
    assert scores.mean_response_tokens == 10
    assert read.settings["dtype"] == "float32"
    first, second = (json.loads(path.read_text())["checkpoints"][at]["files"]["held_out"] for at in (0, 1))
    assert (first["seconds"], "seconds" in second) == (1.5, False)
    assert second["verifiers"]["math"]["pass_at_k"]["2"]["mean"] == 1.0
    # The second row's answers are a tie, and the wrong one was given first.
    assert second["verifiers"]["math"]["majority_at_k"]["2"]["mean"] == 0.5
    assert [second["datasources"][name]["accuracy"] for name in ("sums", "words")] == [1.0, 0.5]
    # Row means 1 and 1/2: half of their distance.
    assert second["accuracy_standard_error"] == pytest.approx(0.25)


def test_the_terminal_gets_a_table_per_file_with_its_data_sources(capsys):
    print_board(board())
    printed = capsys.readouterr().out
    assert "held_out: 2 rows, 1 left out" in printed
    lines = [" ".join(line.split()) for line in printed.splitlines()]
    assert "grpo ★ 75.0 ± 25.0 100.0 ± 0.0 100.0 10.0 0.0" in lines, "with pass@2, and no vote of two"
    assert lines.index("sums, 1 rows") < lines.index("words, 1 rows")
    assert any(line.startswith("held_out math grpo +25.0 0.0 to +50.0 1 1 0") for line in lines)


def test_more_than_two_samples_vote():
    answers = judged_rows([[True, True, False, True]])
    files = [replace(board().files[0], ks=(1, 2, 4))]
    shown = [CheckpointResponses(name="base", path="m", files={"held_out": answers})]
    heads = re.findall('data-head="(majority@.)"', build_page(board(files=files, checkpoints=shown)))
    assert heads == ["majority@4"]
    assert "Most of k" not in build_page(board())


def test_the_page_stands_alone_and_shows_what_was_found():
    page = build_page(board(), written_at=AT)
    for external in ("http://", "https://", "<script", "<link", "src=", "url("):
        assert external not in page
    assert "2026-01-31 12:05 UTC" in page
    assert '<th scope="row">grpo <span class="badge">best</span></th>' in page
    assert "75.0 ± 25.0" in page
    assert "0.0 to +50.0" in page
    assert page.count("1 of 2 right") == 3


def test_hostile_text_is_shown_and_never_obeyed():
    files = {
        "held_out": [
            judged(
                response=f"<answer>{NASTY}</answer>",
                label=NASTY,
                question=NASTY,
                row=NASTY,
                datasource=source,
                checkpoint=NASTY,
                index=index,
                verdicts={"math": VerifierVerdict(score=0.0, parts={"ungradable": 1.0}, timed_out=True)},
            )
            for index, source in enumerate((NASTY, "other"))
        ]
    }
    hostile = CheckpointResponses(name=NASTY, path=NASTY, files=files)
    file = MeasuredFile(name="held_out", source=NASTY, verifiers=("math",), ks=(1,))
    page = build_page(board(files=[file], checkpoints=[hostile], baseline=NASTY, settings={"dtype": NASTY}))
    assert "<script" not in page
    # The title, the heading, and per row its place, label, question and answer among them.
    assert page.count("&lt;script&gt;") > 10
    assert "not judged in time by math; this counts as wrong." in page
    assert "math cannot read the label of 2 rows, so every answer there counts as wrong." in page


def test_long_responses_lose_their_middle_and_keep_their_answer():
    text = f"<think>{'so ' * 5000}</think><answer>42</answer>"
    shown = [CheckpointResponses(name="base", path="m", files={"held_out": [judged(response=text, sample=0)] * 2})]
    page = build_page(board(checkpoints=shown))
    assert len(page) < 40_000
    assert re.search(r"\[[\d,]+ characters left out\]", page)
    assert '&lt;answer&gt;</span>42<span class="tag">&lt;/answer&gt;' in page


def pictured(**changes: object):
    """A board of one row that shows two images and a video."""
    shown = message("user", picture(8, 6), "How many?", ImagePart("https://example.org/a.png"), ImagePart("/gone.png"))
    rows = {0: replace(row(shown, message("user", VideoPart("/clip.mp4"))), location="rows.jsonl line 1")}
    file = MeasuredFile(
        name="held_out", source="rows.jsonl", verifiers=("math",), ks=(1,), **{"rows": rows, **changes}
    )
    answered = [judged(images=3, question="How many?")]
    return board(files=[file], checkpoints=[CheckpointResponses(name="base", path="m", files={"held_out": answered})])


def test_a_row_shows_its_images_and_says_why_one_is_missing():
    page = build_page(pictured())
    (shown,) = re.findall(r'<img src="data:image/png;base64,([^"]+)" alt="Image 1 of the row"', page)
    assert Image.open(io.BytesIO(base64.b64decode(shown))).tobytes() == picture(8, 6).tobytes()
    text = PageText(page).text
    # The page asks no other place for anything.
    assert "https://example.org/a.png" in text
    assert "https://example.org/a.png" not in PageText(page).addresses
    assert "/gone.png" in text
    assert "Video: /clip.mp4" in text
    assert "Its 3 images are not available: the file of the row has moved or changed." in build_page(pictured(rows={}))
