r"""Is an answer equivalent to a label: read by simple rules and exact algebra where they decide, else by math-verify.

The gold answer says how an answer is read: as a choice, a text, a sequence, a region, a matrix, a number, or an
expression. `quick_match` and `matches` walk the same rules; they differ in nothing but what the rules leave open.
"""

import re
from dataclasses import replace

from remote_rm.answers.comparison import Rules, gold_sequence, has_relation, is_text, match_value, refuse, work_out
from remote_rm.answers.expression import same_expression
from remote_rm.answers.extraction import is_prose, listed_values, sole_value
from remote_rm.answers.gold import is_gradable
from remote_rm.answers.normalization import normalize
from remote_rm.answers.sentence import complements, subject, without_remark
from remote_rm.answers.units import split_unit

MAX_ANSWER_CHARS = 1000
"""A longer answer is compared as a string only."""


_RESTATED = re.compile(r",?\s+(?:or equivalently|or,? in other words|equivalently|i\.e\.|that is|or)[,:]?\s+")
_NAME_BEFORE = re.compile(
    r"^[\s$]*(?:\\(?:text|mathrm|vec|mathbf|overrightarrow|overline)\s*\{[^{}]{1,40}\}(?:_\{?\w+\}?)?"
    r"|[A-Z]\s*\\c[au]p\s*[A-Z]|\((?:[a-z],\s?)+[a-z]\)(?=\s*\\in)|(?:[A-Za-z]{2,}\s){0,4}[A-Za-z]{4,})\s*(?:=|\\in(?![a-z]))\s*(?=\S)"
)


def check_label(label: str) -> None:
    """Raise a ValueError for a label that no answer could be judged by."""
    if not normalize(label.strip()[:MAX_ANSWER_CHARS]):
        raise ValueError(
            f"the gold answer is empty ({label[:80]!r}), so no response can be judged; "
            "name the column that holds the answers (OpenRLHF's --data.label_key) or drop such rows"
        )


def quick_match(answer: str, label: str, *, ordered: bool = False) -> bool | None:
    """Return whether the answer equals the label where simple rules can tell, else None."""
    return _match(answer, label, Rules(undecided=work_out, ordered=ordered))


def matches(answer: str, label: str, *, ordered: bool = False) -> bool:
    r"""Return whether the answer equals the label; may run for as long as sympy likes.

    A list without brackets has an order only with `ordered`: `2, -1` meets `-1, 2`; tuples have one and sets none.
    False for every answer where `gold.is_gradable(label)` is False.
    """
    return bool(_match(answer, label, Rules(undecided=_ask_sympy, ordered=ordered)))


def is_stated(answer: str, label: str) -> bool:
    """Return whether the answer equals the label as it stands, with nothing worked out: `2^4` does not state `16`."""
    return bool(_match(answer, label, Rules(undecided=refuse, ordered=False)))


def _ask_sympy(answer: str, gold: str) -> bool:
    is_equal = work_out(answer, gold)
    return same_expression(answer, gold) if is_equal is None else is_equal


def _match(answer: str, label: str, rules: Rules) -> bool | None:
    check_label(label)
    if len(answer) > MAX_ANSWER_CHARS or len(label) > MAX_ANSWER_CHARS:
        return answer.strip() == label.strip() and is_gradable(label)
    if not is_gradable(label):
        return False
    answer = _without_name(without_remark(answer), label)
    gold, read = normalize(label), normalize(answer)
    if split_unit(read)[1] or (not is_prose(answer) and not is_text(read)):
        return match_value(read, gold, rules)
    if match_value(read, gold, replace(rules, undecided=refuse)):
        return True
    if _alternatives_agree(answer, gold, rules):
        return True
    said = complements(answer)
    if said:
        last = normalize(said[0])
        if split_unit(last)[1] or (not is_prose(said[0]) and not is_text(last)):
            return match_value(last, gold, rules)
        if any(match_value(normalize(words), gold, replace(rules, undecided=refuse)) for words in said):
            return True
    if is_text(gold) and subject(answer).casefold() == gold.casefold():
        return True
    value = sole_value(answer)
    if value is None:
        gold_items, listed = gold_sequence(gold), listed_values(answer)
        # One formula for every element of the gold: with as many values as are asked for, naming several is no hedge.
        value = ", ".join(listed) if gold_items is not None and len(listed) == len(gold_items) else ""
    return match_value(normalize(value), gold, rules)


def _alternatives_agree(answer: str, gold: str, rules: Rules) -> bool:
    """Whether an answer gives several forms, each of which is the gold: `1/2, or equivalently 0.5`."""
    parts = _RESTATED.split(answer)
    if len(parts) < 2:
        return False
    forms = [(complements(part) or [part])[0] for part in parts]
    exact = replace(rules, undecided=lambda answer, gold: work_out(answer, gold) or False)
    return all(match_value(normalize(form), gold, exact) for form in forms)


def _without_name(answer: str, label: str) -> str:
    r"""The answer without what it is called: `\text{Area}=12\pi` → `12\pi`; as it is where the label has a relation, too."""
    return answer if has_relation(label) else _NAME_BEFORE.sub("", answer, count=1)
