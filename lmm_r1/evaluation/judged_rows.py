"""From what a checkpoint answered to judged responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from lmm_r1.data.messages import Row, TextPart
from lmm_r1.evaluation.judging import Judge
from lmm_r1.evaluation.response_log import JudgedResponse, Verdict
from lmm_r1.evaluation.row_set import RowSet
from remote_rm.verifier import Item


class GivenResponse(Protocol):
    """What a response must say of itself, whichever engine it is from."""

    @property
    def text(self) -> str: ...

    @property
    def num_tokens(self) -> int: ...

    @property
    def finish_reason(self) -> str: ...


def judge_responses(
    responses: Sequence[GivenResponse], *, checkpoint: str, row_set: RowSet, judges: Mapping[str, Judge]
) -> list[JudgedResponse]:
    """Return the responses with the verdicts of the file's verifiers.

    Args:
        responses: to the rows of the set, in its order, with all samples of a row one after the other.
        judges: by verifier; they are running.
    """
    samples = row_set.sampling.n_samples
    assert len(responses) == samples * len(row_set.rows)
    asked = [(index, row, question_of(row)) for index, row in row_set.rows.items() for _ in range(samples)]
    items = [
        Item(prompt=question, response=response.text, label=row.answer)
        for response, (_, row, question) in zip(responses, asked, strict=True)
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
            question=question,
            sample=place % samples,
            response=response.text,
            response_tokens=response.num_tokens,
            finish_reason=response.finish_reason,
            verdicts={
                verifier: Verdict(
                    score=judgements[place].score.score,
                    parts=judgements[place].score.parts,
                    timed_out=judgements[place].timed_out,
                )
                for verifier, judgements in judged.items()
            },
        )
        for place, (response, (index, row, question)) in enumerate(zip(responses, asked, strict=True))
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
