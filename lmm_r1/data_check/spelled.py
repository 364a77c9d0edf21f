"""What the texts of rows spell of special tokens: training reads it as text, and most often it was not meant as such."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping

from lmm_r1.data.messages import Message, Row, TextPart
from lmm_r1.data_check.findings import Finding
from lmm_r1.data_check.judged import sides_of

# Those of well-known chat templates, where no model says which tokens it has.
COMMON = re.compile(r"<\|\w+\|>|<｜[\w▁]+｜>|<(?:start|end)_of_turn>|\[/?INST\]|</s>")


def spelled_findings(rows: Mapping[int, Row], control: re.Pattern[str]) -> Iterator[Finding]:
    """Yield what rows spell of special tokens, one finding per row.

    Args:
        control: matches the spelling of each special token.
    """
    for index, row in rows.items():
        counts: dict[str, Counter[str]] = {}
        for message in _messages(row):
            for part in message.parts:
                if isinstance(part, TextPart) and (found := [one[0] for one in control.finditer(part.text)]):
                    counts.setdefault(message.role, Counter()).update(found)
        if counts:
            told = "; ".join(f"the {role}'s text: {_listed(of_role)}" for role, of_role in counts.items())
            yield Finding(kind="special tokens", index=index, location=row.location, what=told)


def _messages(row: Row) -> Iterator[Message]:
    yield from row.messages
    for said in (row.response, row.rejected):
        if said is not None:
            yield said
    if row.prefill:
        yield Message(role="assistant", parts=(TextPart(row.prefill),))
    for side in sides_of(row):
        yield from side.turns


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{text} ({count} x)" if count > 1 else text for text, count in counts.most_common())
