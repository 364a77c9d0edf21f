"""One figure everywhere, however it was reckoned, and responses in parts of which nothing is lost."""

import pytest
from helpers.run_folders import PageText, judged_rows, scores, write_stage
from helpers.tables import table

from lmm_r1.evaluation.board import CheckpointResponses, MeasuredFile, board_record, build_board
from lmm_r1.evaluation.page import build_page, text_parts
from lmm_r1.evaluation.page_parts import percent, percent_text, points, points_text
from lmm_r1.evaluation.terminal import share
from lmm_r1.files.json_files import write_json_object
from lmm_r1.records.run_folder import read_run
from lmm_r1.report import build_report


@pytest.mark.parametrize(
    ("value", "text"), table("evaluation/figures", "a_share_is_rounded_to_the_nearest_tenth_of_a_percent")
)
def test_a_share_is_rounded_to_the_nearest_tenth_of_a_percent(value, text):
    assert percent_text(value) == share(value) == text
    assert percent(value) == f"{text}\N{NO-BREAK SPACE}%"
    signed = text if value < 0 or text == "0.0" else f"+{text}"
    assert points_text(value) == points(value) == signed


def test_a_difference_has_one_figure_however_it_was_reckoned():
    """Of 400 answers, as the demo has them: each difference of 85 answers is 21.25 points."""
    found = {points_text((low + 85) / 400 - low / 400) for low in range(315)}
    assert found == {"+21.2"}
    assert len({100 * ((low + 85) / 400 - low / 400) for low in range(315)}) > 1, "floats alone differ"


def test_the_report_and_the_page_of_the_evaluation_show_the_same_figures(tmp_path):
    """21 and 38 of 80 rows right: 26.25 and 47.5 %, a difference of 21.25 points."""
    checkpoints = [
        CheckpointResponses(
            name=name,
            path=name,
            files={"text": judged_rows([[at < right] for at in range(80)], checkpoint=name, file="text")},
        )
        for name, right in (("cold_start", 21), ("fre", 38))
    ]
    file = MeasuredFile(name="text", source="rows.jsonl", verifiers=("math",), ks=(1,))
    board = build_board(
        files=[file], checkpoints=checkpoints, baseline="cold_start", resamples=10, seed=0, settings={}
    )
    for hour, name in ((9, "cold_start"), (10, "fre")):
        write_stage(tmp_path / name, name=name, steps=1, seconds=1.0, hour=hour)
    record = board_record(board)
    for checkpoint in record["checkpoints"]:
        checkpoint["files"]["text"] = scores(
            accuracy=checkpoint["files"]["text"]["accuracy"], form=1.0, tokens=9.0, rows=80
        )
    write_json_object(tmp_path / "evaluation.json", record)
    report, page = PageText(build_report(read_run(tmp_path))).text, PageText(build_page(board)).text
    for text in (report, page):
        assert "26.2" in text
        assert "47.5" in text
        assert "+21.2" in text
        assert "21.3" not in text


@pytest.mark.parametrize(
    ("text", "kinds"), table("evaluation/tagged_text", "thought_and_answer_are_parts_of_their_own_and_nothing_is_lost")
)
def test_thought_and_answer_are_parts_of_their_own_and_nothing_is_lost(text, kinds):
    parts = text_parts(text)
    assert [part.kind for part in parts] == kinds
    assert "".join(part.opening + part.text + part.closing for part in parts) == text
