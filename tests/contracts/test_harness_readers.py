"""What we write, read by VLMEvalKit and lmms-eval themselves, and what they write, read by us, where they are installed.

pip install --no-deps ms-vlmeval lmms-eval validators sty tabulate portalocker xlsxwriter pytz loguru
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from helpers.run_folders import judged

from lmm_r1.evaluation.board import CheckpointResponses, MeasuredFile
from lmm_r1.evaluation.exports import write_exports
from lmm_r1.evaluation.predictions import read_predictions
from lmm_r1.records.responses import JudgedResponse

# Without the package's own __init__, which imports an engine for every model that it knows.
VLMEVAL_READER = """
import importlib, importlib.util, json, sys
sys.modules["vlmeval"] = importlib.util.module_from_spec(importlib.util.find_spec("vlmeval"))
load = importlib.import_module("vlmeval.smp.file").load
data = load(sys.argv[1])
data = data if isinstance(data, list) else data.to_dict("records")
print(json.dumps(data, default=lambda value: value.item()))
"""
LMMS_EVAL_READER = """
import json, sys
from lmms_eval.baselines.loader import load_baseline
print(json.dumps(load_baseline(sys.argv[1], "held_out")[0]))
"""
VLMEVAL_WRITER = """
import importlib, importlib.util, json, pandas, sys
sys.modules["vlmeval"] = importlib.util.module_from_spec(importlib.util.find_spec("vlmeval"))
importlib.import_module("vlmeval.smp.file").dump(pandas.DataFrame(json.loads(sys.argv[2])), sys.argv[1])
print("null")
"""
LMMS_EVAL_WRITER = """
import json, sys
from lmms_eval.loggers.evaluation_tracker import EvaluationTracker
tracker = EvaluationTracker(output_path=sys.argv[1])
tracker.general_config_tracker.model_name_sanitized, tracker.date_id = "model", "20260131_120500"
tracker.save_results_samples("bench", json.loads(sys.argv[2]))
print("null")
"""
RESPONSES = ["<answer>B</answer>", '"quoted",\ttab\nand line', "=1+1", "B. $\\frac{1}{2}$ ü 答案"]


def said_by(package: str, script: str, *arguments: str) -> object:
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    # VLMEvalKit wants a folder for its data.
    environment = {**os.environ, "LMUData": str(Path(arguments[0]).parent)}
    command = [sys.executable, "-c", script, *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    if "ModuleNotFoundError" in ended.stderr:
        pytest.skip(f"{package} lacks a dependency: {ended.stderr.splitlines()[-1]}")
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


def exported(path: Path) -> list[JudgedResponse]:
    responses = [
        judged(place % 2 == 0, index=place, row=f"rows.jsonl line {place + 1}", response=text, label="B")
        for place, text in enumerate(RESPONSES)
    ]
    columns = {place: {"index": 10 + place, "question": "What is 2 + 2?", "A": "3", "B": "4"} for place in range(4)}
    write_exports(
        [str(path)],
        checkpoints=[CheckpointResponses(name="base", path="m", files={"held_out": responses})],
        files=[MeasuredFile(name="held_out", source="rows.jsonl", verifiers=("math",), ks=(1,))],
        columns={"held_out": columns},
    )
    return responses


@pytest.mark.parametrize("suffix", [".xlsx", ".tsv", ".json"])
def test_vlmevalkit_reads_the_rows_that_we_read(suffix, tmp_path):
    path = tmp_path / f"base_held_out{suffix}"
    exported(path)
    found = said_by("vlmeval", VLMEVAL_READER, str(path))
    assert [row["prediction"] for row in found] == RESPONSES
    ours = read_predictions(path).rows.values()
    assert [(str(row["index"]), row["question"], row["answer"], row["prediction"]) for row in found] == [
        (row.key, row.question, row.label, *row.responses) for row in ours
    ]
    assert [{letter: str(row[letter]) for letter in "AB"} for row in found] == [dict(row.options) for row in ours]


def test_lmms_eval_reads_our_verdicts(tmp_path):
    path = tmp_path / "20260131_120500_samples_held_out.jsonl"
    responses = exported(path)
    found = said_by("lmms_eval", LMMS_EVAL_READER, str(path))
    assert found == {str(one.index): one.verdicts["math"].score for one in responses}
    assert [row.theirs for row in read_predictions(path).rows.values()] == list(found.values())


@pytest.mark.parametrize("suffix", [".xlsx", ".tsv", ".json"])
def test_we_read_what_vlmevalkit_writes(suffix, tmp_path):
    rows = [
        {"index": place, "question": "Which?", "A": "3", "B": "4", "answer": "B", "prediction": text, "hit": place % 2}
        for place, text in enumerate(RESPONSES)
    ]
    path = tmp_path / f"model_Bench{suffix}"
    said_by("vlmeval", VLMEVAL_WRITER, str(path), json.dumps(rows))
    found = read_predictions(path)
    assert (found.harness, found.metric) == ("VLMEvalKit", "hit")
    assert [(row.key, row.label, *row.responses, row.theirs) for row in found.rows.values()] == [
        (str(row["index"]), "B", row["prediction"], float(row["hit"])) for row in rows
    ]


def test_we_read_what_lmms_eval_writes(tmp_path):
    said = [([["so B"]], ["B"], 1.0), ([["C"]], ["C"], 0.0), ([["C"], ["B"]], ["C", "B"], 0.5)]
    samples = [
        {
            "doc_id": place,
            "doc": {},
            "target": "B",
            "arguments": ["Which?", {}],
            "resps": raw,
            "filtered_resps": filtered,
        }
        | {"token_counts": [None], "doc_hash": "ab", "exact_match": score}
        for place, (raw, filtered, score) in enumerate(said)
    ]
    said_by("lmms_eval", LMMS_EVAL_WRITER, str(tmp_path), json.dumps(samples))
    found = read_predictions(tmp_path / "model/20260131_120500_samples_bench.jsonl")
    assert (found.harness, found.metric) == ("lmms-eval", "exact_match")
    assert [(row.key, row.question, row.label, row.responses, row.theirs) for row in found.rows.values()] == [
        (str(place), "Which?", "B", tuple(filtered), score) for place, (_, filtered, score) in enumerate(said)
    ]
