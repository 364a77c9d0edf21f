"""From what a checkpoint answered to judged responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lmm_r1.data.messages import Row, TextPart
from lmm_r1.data.sample import Completion
from lmm_r1.evaluation.row_set import RowSet
from lmm_r1.records.responses import JudgedResponse, Verdict
from lmm_r1.scoring.response_scores import Judge
from remote_rm.verifier import Item


def judge_responses(
    completions: Mapping[int, Sequence[Completion]], *, checkpoint: str, row_set: RowSet, judges: Mapping[str, Judge]
) -> list[JudgedResponse]:
    """Return the responses with the verdicts of the file's verifiers, all samples of a row one after the other.

    Args:
        completions: by the row's place in the file.
        judges: by verifier; they are running.
    """
    asked = [
        (index, row_set.rows[index], sample, completion)
        for index, samples in completions.items()
        for sample, completion in enumerate(samples)
    ]
    items = [
        Item(prompt=question_of(row), response=completion.text, label=row.answer) for _, row, _, completion in asked
    ]
    judged = {verifier: judges[verifier].judge(items) for verifier in row_set.file.verifiers}
    return [
        JudgedResponse(
            checkpoint=checkpoint,
            file=row_set.file.name,
            index=index,
            row=row.location,
            datasource=row.datasource,
            label=row.answer,
            question=items[place].prompt,
            sample=sample,
            response=completion.text,
            response_tokens=completion.num_tokens,
            finish_reason=completion.finish_reason,
            verdicts={
                verifier: Verdict(
                    score=scores[place].score, parts=scores[place].parts, timed_out=scores[place].timed_out
                )
                for verifier, scores in judged.items()
            },
        )
        for place, (index, row, sample, completion) in enumerate(asked)
    ]


def question_of(row: Row) -> str:
    """Return the text of the user's turns."""
    return "\n".join(
        part.text
        for message in row.messages
        if message.role == "user"
        for part in message.parts
        if isinstance(part, TextPart)
    )
