import json
from pathlib import Path

import pytest
from helpers.run_folders import judged, judged_rows
from helpers.tables import table

from lmm_r1.config.evaluate import responses_path
from lmm_r1.errors import UserError
from lmm_r1.records.responses import VerifierVerdict, read_responses, write_responses


def test_what_is_written_is_read_again(tmp_path: Path):
    path = responses_path(tmp_path / "new" / "scores.json")
    assert path.name == "scores.responses.jsonl"
    first = judged_rows([[True, False], [True, True]])
    odd = judged(
        response="half \ud800 a pair\u2028\x00", verdicts={"m": VerifierVerdict(score=0, parts={}, timed_out=True)}
    )
    write_responses(path, first, append=False)
    write_responses(path, [odd], append=True)
    assert read_responses(path) == [*first, odd]
    write_responses(path, first[:1], append=False)
    assert read_responses(path) == first[:1]


@pytest.mark.parametrize(
    ("change", "sentence"), table("records/responses", "test_a_damaged_file_is_told_with_its_line")
)
def test_a_damaged_file_is_told_with_its_line(change, sentence, tmp_path):
    path = tmp_path / "a.responses.jsonl"
    write_responses(path, [judged()], append=False)
    path.write_text(json.dumps(json.loads(path.read_text()) | change) + "\n")
    with pytest.raises(UserError, match=f"a.responses.jsonl, {sentence}"):
        read_responses(path)


def test_a_missing_or_empty_file_is_refused(tmp_path):
    with pytest.raises(UserError, match="no file of responses .*none.responses.jsonl"):
        read_responses(tmp_path / "none.responses.jsonl")
    (tmp_path / "empty").touch()
    with pytest.raises(UserError, match="holds no responses; evaluate again"):
        read_responses(tmp_path / "empty")


@pytest.mark.parametrize(
    ("score", "parts", "is_right"),
    [
        (1.0, {}, True),
        (0.0, {}, False),
        # An overlap of 0.6 where 0.75 was wanted, and one of 0.4 where 0.3 was.
        (0.6, {"accuracy": 0.0, "iou": 0.6}, False),
        (0.4, {"accuracy": 1.0, "iou": 0.4}, True),
    ],
)
def test_a_verifier_that_measures_says_what_is_right_beside_its_score(score, parts, is_right):
    assert VerifierVerdict(score=score, parts=parts).right is is_right
