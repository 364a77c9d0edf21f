"""The judge of evaluations with its real worker processes."""

import threading
from statistics import fmean

import psutil
import pytest
from helpers.http_servers import chat_server, completion
from helpers.judge_server import asked_of
from helpers.run_folders import PageText

from lmm_r1.data.messages import Message, Row, TextPart
from lmm_r1.errors import UserError
from lmm_r1.records.metrics import append_metrics, read_metrics
from lmm_r1.records.run_folder import read_run
from lmm_r1.report import build_report
from lmm_r1.scoring.response_scores import VerifierJudge
from remote_rm.verifier import Item, extra_logs_of

# Both sides are beyond the rules, and sympy expands the power for far longer than anyone waits.
ENDLESS = Item(prompt="", response=r"<answer>(x+y+z+w+1)^{4000}-(x+1)^{3000}</answer>", label=r"(x+y+z+w+2)^{4000}")


def row(answer: str) -> Row:
    return Row(
        messages=(Message(role="user", parts=(TextPart("?"),)),),
        answer=answer,
        datasource="d",
        location="rows.jsonl line 3",
    )


def test_an_answer_that_keeps_sympy_busy_is_cut_off_and_the_others_are_judged():
    items = [
        Item(prompt="", response="<answer>2</answer>", label="2"),
        ENDLESS,
        Item(prompt="", response=r"<answer>\sqrt{8}</answer>", label=r"2\sqrt{2}"),
        Item(prompt="", response="<answer>5</answer>", label="2"),
    ]
    with VerifierJudge("math", workers=1, item_timeout_seconds=1.0) as judge:
        scores = judge.judge(items)
        again = judge.judge(items[:1])
    assert [score.score for score in scores] == [1.0, 0.0, 1.0, 0.0]
    assert [score.timed_out for score in scores] == [False, True, False, False]
    assert again[0].score == 1.0


def test_no_worker_and_no_thread_is_left_behind():
    # Judges that live as long as their process, of other tests, have threads of their own.
    before = set(threading.enumerate())
    with VerifierJudge("math", workers=2, item_timeout_seconds=5.0) as judge:
        assert [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("judge ")]
        pids = judge._pool.worker_pids
        assert len(pids) == 2
        assert all(map(psutil.pid_exists, pids))
    assert not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids)
    left = set(threading.enumerate()) - before
    assert not [thread for thread in left if thread.name.startswith("judge ")]


def test_a_judge_may_be_entered_again():
    judge = VerifierJudge("choice", workers=1, item_timeout_seconds=5.0)
    item = Item(prompt="", response="<answer>B</answer>", label="B")
    for _ in range(2):
        with judge:
            assert judge.judge([item])[0].score == 1.0


def test_a_label_that_the_verifier_refuses_is_told_with_its_row():
    judge = VerifierJudge("math", workers=1, item_timeout_seconds=1.0)
    judge.check_labels([row("2")])
    with pytest.raises(
        UserError, match=r"^rows.jsonl line 3: math cannot judge by this row's answer: the gold answer"
    ):
        judge.check_labels([row("2"), row("$$")])


def test_a_language_model_is_asked_about_what_the_rule_does_not_take_for_right(tmp_path):
    """The batches of `evaluate` and `batch_inference`, the rule's workers included, and a second run that asks nothing."""
    items = [
        Item(prompt="q", response="<answer>2</answer>", label="2"),
        Item(prompt="q", response=r"<answer>\sin^2 x</answer>", label=r"1-\cos^2 x"),
        Item(prompt="q", response="<answer>the larger of both</answer>", label=r"\max(a, b)"),
        ENDLESS,
    ]

    def reply(body, _number):
        asked = asked_of(body)
        return completion(asked.verdict("right" if asked.answer == "the larger of both" else "wrong"))

    with chat_server(reply) as server:
        spec = f"llm_judge:judge_url={server.url},judge_model=m,judge_folder={tmp_path}"
        for _ in range(2):
            with VerifierJudge(spec, workers=1, item_timeout_seconds=4.0) as judge:
                scores = judge.judge(items)
            assert [score.score for score in scores] == [1.0, 1.0, 1.0, 0.0]
            assert [score.parts["judge_asked"] for score in scores] == [0.0, 0.0, 1.0, 1.0]
            assert [score.timed_out for score in scores] == [False] * 4
    assert len(server.requests) == 2


def test_at_the_cap_of_its_budget_a_run_goes_on_by_the_rule_and_its_report_says_from_when(tmp_path):
    def reply(body, _number):
        return completion(asked_of(body).verdict("right"))

    with chat_server(reply) as server:
        (tmp_path / "rl").mkdir()
        spec = f"llm_judge:judge_url={server.url},judge_model=m,judge_folder={tmp_path / 'judge'},judge_max_requests=3"
        with VerifierJudge(spec, workers=1, item_timeout_seconds=5.0) as judge:
            for step in (1, 2, 3):
                answers = [f"<answer>the larger of {step} and {number}</answer>" for number in (1, 2)]
                scores = judge.judge([Item(prompt="q", response=answer, label=r"\max(a, b)") for answer in answers])
                values = {name: fmean(value) for name, value in extra_logs_of(scores).items()}
                append_metrics(tmp_path / "rl" / "metrics.jsonl", step=step, seconds=float(step), values=values)
    lines = read_metrics(tmp_path / "rl" / "metrics.jsonl")
    assert lines.series("accuracy") == [(1, 1.0), (2, 0.5), (3, 0.0)]
    assert lines.series("judged_by_rule") == [(1, 0.0), (2, 0.5), (3, 1.0)]
    assert len(server.requests) == 3
    said = PageText(build_report(read_run(tmp_path))).text
    assert "rl: from step 2 on the rule judged instead of the judge, which had no budget left or failed" in said
