"""Whether verifiers can judge by the answers of rows, and take each of them for right when a response gives it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from lmm_r1.config.verifier_spec import verifier_from
from lmm_r1.data.messages import Row
from lmm_r1.data_check.findings import Finding
from remote_rm.answer_verifier import AnswerVerifier
from remote_rm.composition import Composition
from remote_rm.reward_function import reward_func_of
from remote_rm.verifier import Verifier


def answer_findings(rows: Mapping[int, Row], spec: str, *, workers: int, timeout_s: float) -> Iterator[Finding]:
    """Yield what there is to say of the rows that have an answer.

    Args:
        spec: of the verifier, as a command line names it.
        timeout_s: seconds after which the judging of one answer is cut off.
    """
    verifier = verifier_from(spec)
    judged: dict[int, Row] = {}
    for index, row in rows.items():
        if not row.answer:
            continue
        try:
            verifier.check_label(row.answer)
            judged[index] = row
        except ValueError as error:
            yield Finding(kind="gold refused", index=index, location=row.location, what=f"{spec}: {error}")
    if not judged:
        return
    judge = reward_func_of(verifier, workers=workers, item_timeout_seconds=timeout_s)
    labels = [row.answer for row in judged.values()]
    responses = [_response(verifier, label) for label in labels]
    reply = judge(responses, [""] * len(labels), labels, responses=responses)
    logs = reply["extra_logs"]
    ungradable = logs.get("ungradable", [0.0] * len(labels))
    accuracies = logs.get("accuracy", reply["scores"])
    for (index, row), accuracy, unread, late in zip(
        judged.items(), accuracies, ungradable, logs["timed_out"], strict=True
    ):
        if unread:
            what = f"{spec} cannot read the answer {row.answer!r}: no response is right by it"
            yield Finding(kind="gold refused", index=index, location=row.location, what=what)
        elif accuracy < 1.0:
            cause = f"was cut off after {timeout_s:g} s on" if late else "does not take for right"
            what = f"{spec} {cause} a response that gives the answer {row.answer!r} itself"
            yield Finding(kind="gold wrong", index=index, location=row.location, what=what)


def _response(verifier: Verifier, label: str) -> str:
    """Return the response that a policy would be taught: the thought and the answer, each in its tags."""
    gold = verifier.answer_of(label) if isinstance(verifier, (AnswerVerifier, Composition)) else label
    return f"<think>\nThis is known.\n</think>\n<answer>{gold}</answer>"
