"""A job: one line per row in the order of the rows, whatever order they end in."""

import json
from pathlib import Path

from lmm_r1.data.messages import Message, Row, TextPart
from lmm_r1.data.sample import Completion
from lmm_r1.errors import UserError
from lmm_r1.generation.engine import Outcome
from lmm_r1.tools.batch import RowLog, in_order, record_of, run_job
from remote_rm.verifier import Score


def row(text):
    return Row(
        messages=(Message(role="user", parts=(TextPart(text),)),),
        answer="2",
        datasource="sums",
        location="rows line 1",
    )


def outcome(index, *texts):
    completions = tuple(Completion(text=text, num_tokens=len(text), finish_reason="stop") for text in texts)
    return Outcome(index=index, row=row(f"question {index}"), completions=completions, seconds=0.25)


class LengthScorer:
    """Rewards length; refuses rows with a response that is empty."""

    def score(self, row, completions):
        if any(not completion.text for completion in completions):
            raise UserError(f"{row.location}: nothing to score")
        return [Score(reward=float(len(item.text)), score=1.0, parts={"long": 1.0}) for item in completions]


def test_outcomes_wait_for_those_before_them():
    seen = []

    def source():
        for index in (5, 3, 9, 7):
            seen.append(index)
            yield Outcome(index=index)

    ordered = in_order(source(), order=[3, 5, 7, 9])
    assert next(ordered).index == 3
    assert seen == [5, 3]
    assert [item.index for item in ordered] == [5, 7, 9]


def test_rows_are_written_in_order_with_scores_and_bad_ones_apart(tmp_path):
    log = RowLog(tmp_path / "out.jsonl")
    log.open({}, overwrite=False, flag="--output")
    told = []
    totals = run_job(
        [outcome(2, ""), outcome(1, "abc", "d"), Outcome(index=0, reason="rows line 1: no image"), outcome(4, "ef")],
        order=[0, 1, 2, 4],
        log=log,
        scorer=LengthScorer(),
        on_progress=lambda totals: told.append((totals.rows, totals.skipped)),
    )
    assert (totals.rows, totals.responses, totals.tokens, totals.skipped) == (2, 3, 6, 2)
    assert told == [(0, 1), (1, 1), (1, 2), (2, 2)]
    first, second = map(json.loads, log.path.read_text().splitlines())
    assert first == {
        "index": 1,
        "location": "rows line 1",
        "datasource": "sums",
        "answer": "2",
        "prompt": [{"role": "user", "content": "question 1"}],
        "responses": [
            {"text": "abc", "tokens": 3, "finish_reason": "stop", "reward": 3.0, "scores": {"long": 1.0}},
            {"text": "d", "tokens": 1, "finish_reason": "stop", "reward": 1.0, "scores": {"long": 1.0}},
        ],
        "seconds": 0.25,
    }
    assert second["index"] == 4
    assert [item.reason for item in log.skipped()] == ["rows line 1: no image", "rows line 1: nothing to score"]


def test_a_response_that_was_not_judged_in_time_says_so_in_its_line():
    score = Score(reward=0.5, score=0.0, parts={"accuracy": 0.0}, timed_out=True)
    (response,) = record_of(outcome(0, "a"), [score], folder=Path())["responses"]
    assert (response["reward"], response["scores"]) == (0.5, {"accuracy": 0.0, "timed_out": 1.0})
