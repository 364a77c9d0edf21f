"""The judge of evaluations with its real worker processes."""

import threading

import psutil
import pytest
from helpers.http_servers import chat_server, completion
from helpers.judge_server import asked_of

from lmm_r1.data.messages import Message, Row, TextPart
from lmm_r1.errors import UserError
from lmm_r1.scoring.sources import VerifierJudge
from remote_rm.verifier import Item

# Both sides are beyond the rules, and sympy expands the power for far longer than anyone waits.
ENDLESS = Item(prompt="", response=r"<answer>(x+y+z+w+1)^{4000}-(x+1)^{3000}</answer>", label=r"(x+y+z+w+2)^{4000}")


def row(answer: str) -> Row:
    return Row(
        messages=(Message(role="user", parts=(TextPart("?"),)),),
        answer=answer,
        datasource="d",
        location="rows.jsonl line 3",
    )


def test_no_worker_and_no_thread_is_left_behind():
    # Judges that live as long as their process, of other tests, have threads of their own.
    before, workers = set(threading.enumerate()), set(psutil.Process().children(recursive=True))
    with VerifierJudge("math", workers=2, item_timeout_seconds=5.0):
        assert [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("judge ")]
        workers = set(psutil.Process().children(recursive=True)) - workers
        assert len(workers) >= 2
    assert len([worker for worker in workers if not worker.is_running() or worker.status() == "zombie"]) >= 2
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
    judge.check_rows([row("2")])
    with pytest.raises(
        UserError, match=r"^rows.jsonl line 3: math cannot judge by this row's answer: the gold answer"
    ):
        judge.check_rows([row("2"), row("$$")])


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
