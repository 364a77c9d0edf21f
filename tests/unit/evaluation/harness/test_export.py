import hashlib
import json
from pathlib import Path

import pytest
from helpers.commands import write_rows
from helpers.run_folders import judged, judged_rows
from helpers.tables import table

from lmm_r1.errors import UserError
from lmm_r1.evaluation.board import CheckpointResponses, MeasuredFile
from lmm_r1.evaluation.exports import check_exports, export_path, source_columns, write_exports
from lmm_r1.evaluation.predictions import read_predictions, read_table
from lmm_r1.records.responses import JudgedResponse

QUESTION = "What is 2 + 2?"


def measured(source: str = "nowhere.jsonl", *, ks: tuple[int, ...] = (1,)) -> MeasuredFile:
    return MeasuredFile(
        name="held_out", source=source, verifiers=("math",), ks=ks, sampling={"temperature": 0.0, "max_new_tokens": 16}
    )


def exported(path: Path, responses: list[JudgedResponse], *, columns: dict | None = None) -> Path:
    checkpoint = CheckpointResponses(name="base", path="m", files={"held_out": responses})
    (written,) = write_exports(
        [str(path)], checkpoints=[checkpoint], files=[measured()], columns={"held_out": columns or {}}
    )
    assert written == path
    return path


@pytest.mark.parametrize("suffix", [".xlsx", ".tsv", ".json"])
def test_predictions_have_the_columns_of_vlmevalkit_and_are_read_as_the_same_rows(suffix, tmp_path):
    columns = {
        0: {"index": "12", "question": QUESTION, "A": 4, "B": "5", "category": "sums"},
        1: {"index": "13", "question": QUESTION, "A": 4, "B": "5", "category": "more"},
    }
    path = exported(tmp_path / f"a{suffix}", judged_rows([[True], [False]]), columns=columns)
    first, second = read_table(path)
    assert list(first) == ["index", "question", "A", "B", "answer", "category", "prediction"]
    assert [str(value) for value in first.values()] == [
        *("12", QUESTION, "4", "5", "4", "sums", "<think>so</think><answer>4</answer>")
    ]
    assert [row.responses[0][-20:] for row in read_predictions(path).rows.values()] == [
        "k><answer>4</answer>",
        "k><answer>5</answer>",
    ]
    assert (read_predictions(path).metric, read_predictions(path).rows[1].key) == (None, "13")


def test_the_index_of_a_row_is_its_place_where_its_own_file_has_none_or_repeats_one(tmp_path):
    for columns in ({}, {0: {"index": 3}, 1: {"index": 3}}, {0: {"index": 3}, 1: {}}):
        path = exported(tmp_path / "a.json", judged_rows([[True], [True]]), columns=columns)
        assert [row["index"] for row in read_table(path)] == [0, 1]


def test_a_sample_has_the_fields_of_lmms_eval_and_its_hashes(tmp_path):
    path = exported(tmp_path / "a.jsonl", judged_rows([[True, False]]))
    (sample,) = map(json.loads, path.read_text().splitlines())
    doc = {"question": QUESTION, "answer": "4"}
    right, wrong = "<think>so</think><answer>4</answer>", "<think>so</think><answer>5</answer>"
    assert sample == {
        "doc_id": 0,
        "doc": doc,
        "target": "4",
        "arguments": [[QUESTION, {"temperature": 0.0, "max_new_tokens": 16}]],
        "input": QUESTION,
        "resps": [[right], [wrong]],
        "filtered_resps": [right, wrong],
        "doc_hash": hashlib.sha256(json.dumps(doc, indent=2).encode()).hexdigest(),
        "prompt_hash": hashlib.sha256(QUESTION.encode()).hexdigest(),
        "target_hash": hashlib.sha256(b"4").hexdigest(),
        "math_score": 0.5,
    }
    row = read_predictions(path).rows[0]
    assert (row.responses, row.theirs, row.question) == ((right, wrong), 0.5, QUESTION)


def test_columns_come_from_the_file_of_the_rows(tmp_path):
    row = {"messages": [], "answer": "4", "question": QUESTION, "choices": ["4", "5"], "hint": None, "image": "x"}
    source = write_rows(tmp_path, row)
    own = CheckpointResponses(name="base", path="m", files={"held_out": [judged()]})
    said: list[str] = []
    found = source_columns(measured(str(source)), checkpoints=[own], report=said.append)
    assert (found, said) == ({0: {"question": QUESTION, "A": "4", "B": "5"}}, [])


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "held_out: nowhere.jsonl is not a file here, so the export has no columns"),
        ({"question": "Another?"}, "has another question at rows.jsonl line 1"),
        ("{", "the export has no columns from the rows' own file: "),
    ],
)
def test_columns_of_other_rows_are_not_taken_and_that_is_told(content, sentence, tmp_path):
    source = "nowhere.jsonl" if content is None else str(write_rows(tmp_path, content))
    own = CheckpointResponses(name="base", path="m", files={"held_out": [judged()]})
    said: list[str] = []
    assert source_columns(measured(source), checkpoints=[own], report=said.append) == {}
    assert sentence in said[0]


@pytest.mark.parametrize(
    ("template", "checkpoints", "files", "sentence"),
    table("evaluation/harness/export", "test_exports_that_cannot_be_are_refused"),
)
def test_exports_that_cannot_be_are_refused(template, checkpoints, files, sentence):
    with pytest.raises(UserError) as error:
        check_exports([template], checkpoints=checkpoints, files=files)
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    ("templates", "checkpoints"),
    [(["bench.tsv"], ["m"]), (["{checkpoint}.tsv"], ["org/m", "org m"]), (["x.json", "./x.json"], ["m"])],
)
def test_an_export_takes_the_place_of_no_file_that_was_read_or_written_here(templates, checkpoints, tmp_path):
    named = [str(tmp_path / template) for template in templates]
    with pytest.raises(UserError, match="the command already reads or writes this file"):
        check_exports(named, checkpoints=checkpoints, files={"f": 1}, taken=[tmp_path / "bench.tsv"])


def test_names_of_checkpoints_make_no_folders():
    path = export_path("out/{checkpoint}_{file}.tsv", checkpoint="org/model 7B", file="a")
    assert path == Path("out/org_model_7B_a.tsv")
