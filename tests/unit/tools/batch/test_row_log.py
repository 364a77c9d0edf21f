"""The output of a job: resumed, cut where a process was killed, and intact on a full disk."""

import json
import resource
import signal
import subprocess
import sys

import pytest

from lmm_r1.data.messages import SkippedRow
from lmm_r1.errors import UserError
from lmm_r1.tools.batch import RowLog

SETTINGS = {"model": "m", "temperature": 0.0, "stop": ("a",)}


@pytest.fixture
def log(tmp_path):
    return RowLog(tmp_path / "out" / "rows.jsonl")


def begin(log, settings=SETTINGS, *, overwrite=False):
    return log.open(settings, overwrite=overwrite, flag="--output")


def test_a_job_goes_on_behind_the_last_row_of_either_file(log):
    assert begin(log) == 0
    log.append([{"index": 0, "text": "a"}, {"index": 1, "text": "b"}])
    assert begin(log) == 2
    log.append_skipped([SkippedRow(index=2, reason="no image")])
    assert begin(log) == 3
    log.append([{"index": 3, "text": "c"}])
    assert begin(log) == 4
    assert [record["index"] for record in log.records()] == [0, 1, 3]
    assert log.skipped() == [SkippedRow(index=2, reason="no image")]


@pytest.mark.parametrize("torn", ['{"index": 1, "te', '{"index": 1, "text": "whole but for its newline"}'])
def test_a_torn_last_line_is_cut_off_and_its_row_done_again(torn, log):
    begin(log)
    log.append([{"index": 0, "text": "a"}])
    whole = log.path.read_bytes()
    log.path.write_bytes(whole + torn.encode())
    assert begin(log) == 1
    assert log.path.read_bytes() == whole


def test_other_settings_are_not_mixed_into_a_file(log):
    begin(log)
    log.append([{"index": 0}])
    with pytest.raises(UserError, match=r"was begun with another --temperature \(0.0, now 1.0\); choose another file"):
        begin(log, {**SETTINGS, "temperature": 1.0})
    assert begin(log, {**SETTINGS, "temperature": 1.0}, overwrite=True) == 0
    assert [record["index"] for record in log.records()] == [0], "the old rows stay until there are new ones"
    log.append([{"index": 0, "text": "new"}])
    assert [record["text"] for record in log.records()] == ["new"]
    assert begin(log, {**SETTINGS, "temperature": 1.0}) == 1


def test_a_foreign_file_is_left_alone(log):
    log.path.parent.mkdir()
    log.path.write_text("something else\n")
    with pytest.raises(UserError, match="exists and was not begun by this command"):
        begin(log)
    log.settings_path.write_text(json.dumps(SETTINGS))
    with pytest.raises(UserError, match="its last line was not written by this command"):
        begin(log)
    assert log.path.read_text() == "something else\n"


def test_a_folder_and_a_place_under_a_file_are_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--output .*tmp.* is a folder; name a file"):
        begin(RowLog(tmp_path))
    with pytest.raises(UserError, match="--output .*: cannot be written, because .*file is a file"):
        begin(RowLog(tmp_path / "file" / "rows.jsonl"))


FILL = """
import sys
from pathlib import Path
from lmm_r1.errors import UserError
from lmm_r1.tools.batch import RowLog
log = RowLog(Path(sys.argv[1]))
first = log.open({}, overwrite=False, flag="--output")
try:
    for index in range(first, 100):
        log.append([{"index": index, "text": "x" * 1000}])
except UserError as error:
    sys.exit(str(error))
"""


def test_where_no_more_can_be_written_the_file_keeps_whole_rows_and_the_job_goes_on_later(tmp_path):
    """A limit on the size of files acts as a full disk does: a write ends early, and the next one fails."""
    output = tmp_path / "rows.jsonl"

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_500, resource.RLIM_INFINITY))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    command = [sys.executable, "-c", FILL, str(output)]
    ended = subprocess.run(command, capture_output=True, text=True, preexec_fn=limit)
    assert ended.returncode == 1
    assert ended.stderr.startswith(
        f"{output}: cannot be written (File too large); it holds all rows that were finished."
    )
    lines = output.read_bytes().splitlines(keepends=True)
    assert [json.loads(line)["index"] for line in lines] == list(range(10))
    assert all(line.endswith(b"\n") for line in lines)

    assert subprocess.run(command, capture_output=True, text=True).returncode == 0
    assert [record["index"] for record in RowLog(output).records()] == list(range(100))
