import json
import subprocess
import sys

import pytest

from remote_rm.llm_judge import endpoint as ledger_module
from remote_rm.llm_judge.endpoint import DISAGREEMENTS, Ledger


def test_a_verdict_outlives_its_process(tmp_path):
    first = Ledger(str(tmp_path / "new" / "folder"))
    assert first.verdict("k") is None
    first.keep("k", True)
    first.keep("k", False)
    first.keep("l", False)
    first.close()
    second = Ledger(str(tmp_path / "new" / "folder"))
    assert (second.verdict("k"), second.verdict("l"), second.verdict("m")) == (True, False, None)


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kept = Ledger(None)
    kept.keep("k", True)
    kept.disagree({"answer": "4"})
    assert kept.verdict("k") is True
    assert list(tmp_path.iterdir()) == []


def test_requests_are_charged_before_they_are_sent(tmp_path):
    spent = Ledger(str(tmp_path), max_requests=2)
    assert [spent.reserve(), spent.reserve(), spent.reserve()] == [True, True, False]
    spent.charge(-1, 0)
    assert spent.spending() == (1, 0)


def test_tokens_end_the_budget_once_they_reach_it(tmp_path):
    spent = Ledger(str(tmp_path), max_tokens=100)
    spent.charge(0, 99)
    assert spent.reserve()
    spent.charge(0, 1)
    assert not spent.reserve()
    assert spent.spending() == (1, 100)


def test_processes_that_start_together_share_one_budget(tmp_path):
    spend = (
        "import sys\n"
        "from remote_rm.llm_judge.endpoint import Ledger\n"
        "ledger = Ledger(sys.argv[1], max_requests=100)\n"
        "print(sum(ledger.reserve() for _ in range(60)))\n"
        "ledger.keep(sys.argv[2], True)\n"
    )
    started = [
        subprocess.Popen([sys.executable, "-c", spend, str(tmp_path), key], stdout=subprocess.PIPE, text=True)
        for key in "abc"
    ]
    granted = [int(process.communicate(timeout=60)[0]) for process in started]
    assert [process.returncode for process in started] == [0, 0, 0]
    assert sum(granted) == 100
    kept = Ledger(str(tmp_path))
    assert [kept.verdict(key) for key in "abc"] == [True] * 3


def test_disagreements_are_lines_up_to_a_size(tmp_path, monkeypatch):
    kept = Ledger(str(tmp_path))
    kept.open()
    kept.disagree({"answer": "北京"})
    line = (tmp_path / DISAGREEMENTS).read_bytes()
    assert json.loads(line)["answer"] == "北京"
    monkeypatch.setattr(ledger_module, "MAX_DISAGREEMENT_BYTES", 2 * len(line) + 1)
    for _ in range(5):
        kept.disagree({"answer": "北京"})
    assert (tmp_path / DISAGREEMENTS).read_bytes().count(b"\n") == 2


def test_a_folder_that_cannot_be_made_is_an_os_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        Ledger(str(tmp_path / "file")).open()
