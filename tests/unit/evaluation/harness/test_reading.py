import json
from pathlib import Path

import pytest
from helpers.tables import table

from lmm_r1.errors import UserError
from lmm_r1.evaluation.predictions import read_predictions, write_table

# As VLMEvalKit's evaluation of a multiple-choice benchmark leaves it.
RESULT = table("evaluation/harness/reading", "result")
# As lmms-eval writes it: this release, and one that kept the document.
SAMPLE = table("evaluation/harness/reading", "sample")
OLD_SAMPLE = table("evaluation/harness/reading", "old_sample")


def samples(path: Path, *records: dict) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.mark.parametrize("suffix", [".xlsx", ".tsv", ".json"])
def test_a_row_of_vlmevalkit_has_its_options_its_verdict_and_its_place(suffix, tmp_path):
    path = tmp_path / f"model_Bench_result{suffix}"
    write_table(path, [RESULT, {**RESULT, "index": 8, "hit": 0}])
    found = read_predictions(path)
    row = found.rows[0]
    assert (found.harness, found.metric, found.skipped) == ("VLMEvalKit", "hit", ())
    assert (row.key, row.label, row.responses, row.theirs) == ("7", "B", ("B. a dog",), 1.0)
    assert (row.question, row.datasource, dict(row.options)) == ("Which?", "animals", {"A": "a cat", "B": "a dog"})
    assert row.location == f"{path} row 1"
    assert found.rows[1].theirs == 0.0


def test_numbers_of_a_sheet_are_texts_as_they_were(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(
        '[{"index": 1.0, "answer": 3.0, "prediction": 2.5, "score": true}, {"index": NaN, "answer": "x", "prediction": NaN, "score": NaN}]'
    )
    first, second = read_predictions(path).rows.values()
    assert (first.key, first.label, first.responses, first.theirs) == ("1", "3", ("2.5",), 1.0)
    assert (second.key, second.responses, second.theirs) == ("1", ("",), None)


def test_rows_that_cannot_be_judged_are_left_out_with_the_reason(tmp_path):
    failed = {**RESULT, "prediction": "Failed to obtain answer via API."}
    path = tmp_path / "a.tsv"
    write_table(path, [{**RESULT, "answer": ""}, failed, RESULT])
    found = read_predictions(path)
    assert list(found.rows) == [2]
    assert [(row.index, row.reason.removeprefix(str(path))) for row in found.skipped] == [
        (0, " row 1: the answer is empty, so there is nothing to compare with"),
        (1, " row 2: the prediction is VLMEvalKit's note of a failed request; predict the row again"),
    ]


@pytest.mark.parametrize("record", [SAMPLE, OLD_SAMPLE])
def test_a_sample_of_lmms_eval_is_read_in_either_form(record, tmp_path):
    found = read_predictions(samples(tmp_path / "20260131_120500_samples_count_lite.jsonl", record))
    row = found.rows[0]
    assert (found.harness, found.metric) == ("lmms-eval", "exact_match")
    assert (row.key, row.question, row.label, row.responses) == ("4", "How many?", "7", ("7",))
    assert (row.theirs, row.datasource) == (record["exact_match"], "count_lite")


@pytest.mark.parametrize(
    ("said", "responses"),
    [("a", ("a",)), (["a", "b"], ("a", "b")), ([["a"]], ("a",)), ([["a"], ["b", "c"]], ("a", "b", "c"))],
)
def test_responses_are_read_however_deep_they_lie(said, responses, tmp_path):
    found = read_predictions(samples(tmp_path / "a.jsonl", {**SAMPLE, "filtered_resps": said}))
    assert found.rows[0].responses == responses


def test_likelihoods_are_no_responses(tmp_path):
    path = samples(tmp_path / "a.jsonl", SAMPLE, {**SAMPLE, "filtered_resps": [["-3.25", "False"], ["-0.5", "True"]]})
    found = read_predictions(path)
    assert (list(found.rows), found.skipped[0].index) == ([0], 1)
    assert "line 2: the sample holds likelihoods" in found.skipped[0].reason


def test_a_verdict_inside_an_object_is_found_and_one_of_several_is_asked_for(tmp_path):
    said = {"question_id": 3, "prediction": "7", "true_false": True}
    inner = {**{name: value for name, value in SAMPLE.items() if name != "exact_match"}, "gpt_eval_score": said}
    found = read_predictions(samples(tmp_path / "a.jsonl", inner))
    assert (found.metric, found.rows[0].theirs) == ("gpt_eval_score.true_false", 1.0)
    path = samples(tmp_path / "b.jsonl", {**SAMPLE, "anls": 0.25})
    with pytest.raises(UserError, match="has several verdicts, exact_match, anls: choose one with --rejudge_metric"):
        read_predictions(path)
    assert read_predictions(path, metric="anls").rows[0].theirs == 0.25


def test_what_is_no_verdict_is_told_and_a_wanted_one_must_be_one(tmp_path):
    path = tmp_path / "a.tsv"
    rated = {name: value for name, value in RESULT.items() if name != "hit"} | {"score": 7}
    write_table(path, [rated])
    found = read_predictions(path)
    assert (found.metric, found.rows[0].theirs) == (None, None)
    assert found.notes == (f"{path}: score is not a verdict, because the file has 7 there, which is not from 0 to 1",)
    with pytest.raises(UserError, match="--rejudge_metric score: .* has 7 there, which is not from 0 to 1; it may be"):
        read_predictions(path, metric="score")
    with pytest.raises(UserError, match="--rejudge_metric hits: .* has no numbers there"):
        read_predictions(path, metric="hits")


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    table("evaluation/harness/reading", "test_what_is_no_file_of_predictions_is_refused"),
)
def test_what_is_no_file_of_predictions_is_refused(name, content, sentence, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=sentence):
        read_predictions(tmp_path / name)
