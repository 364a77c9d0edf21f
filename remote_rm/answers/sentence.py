"""What a sentence says: `The function is even.` says `even`, `It takes 2 minutes.` has the unit of its number behind it."""

import re

from remote_rm.answers.units import canonical_unit, unit_behind

MAX_SENTENCE_CHARS = 400
MAX_VERBS = 3
_FILLING = r"(?:(?:an?|the|exactly|simply|equal to|given by)\s+)*"
_VERB = re.compile(
    rf"\b(?:is|are|was|were|be|equals?|becomes?|such that|satisfying|namely)\b\s+{_FILLING}|(?:是|为)[:：]?\s*(?=[^\s.。])",
    re.IGNORECASE,
)
_COLON = re.compile(rf"(?<=[A-Za-z*]):\s+{_FILLING}", re.IGNORECASE)
_NEGATION = re.compile(
    r"\b(?:not|never|cannot|neither|nor|except|unlike|wrong|incorrect|impossible|unsure|unclear)\b|n't\b",
    re.IGNORECASE,
)
_END = re.compile(r"(?<=[^\s.])[.!?。]\s+(?=[A-Z])")
_CHAIN = re.compile(
    r"(?<![\^_\w\\{.,])\d[\d,]*(?:\.\d+)?\)?\s*=\s*(\$?-?\d[\d,]*(?:\.\d+)?(?:/\d+)?%?)(?![\w\\^*/+(-]|[.,]\d)"
)
_CONCLUDED_OPTION = re.compile(r"\b(?:therefore|so|thus|hence),?\s*\(?([A-J])\)?\.?$")
_CORRECT_OPTION = re.compile(
    r"\b(?:option|choice|answer|statement)\s*\(?([A-J])\)?\s+(?:is|are|must be)\s+(?:the\s+)?(?:only\s+)?"
    r"(?:correct|right|true|best|answer)",
    re.IGNORECASE,
)
_LEADING_VALUE = re.compile(
    r"(\$[^$]{1,200}\$|\\\([^\n]{1,200}?\\\)|-?\d[\d,]*(?:\.\d+)?)(?=,? (?:when|where|at|for|if|since|because|which|with|by|achieved|attained)\b)"
)
_WRAPPED_WORDS = re.compile(r"\\text\s*\{([^{}]{1,300})\}")
_SUBJECT = re.compile(r"\**([A-Z][a-z]+)\**\s+(?:has|had|is|was|wins?|won|ran|got|took|does|did|finishe[sd])\b")
_BOLD_AT_END = re.compile(r"\*\*([^*\n]{1,60})\*\*[.!]?$")
_OR = re.compile(r"\bor\b")
_ROUNDED = re.compile(
    r"(?<=\S),?\s+(?:\((?:that is|i\.e\.|about|approximately|≈|=)[^()]*\)"
    r"|(?:or|which is) (?:about|approximately|roughly) \$?\\?\$?[\d.,]+\\?%?\$?)(?=[.\s*$]*$)"
)
_REMARK = re.compile(r"\s\((?!.*\bor\b)[a-z]{2,}(?: [a-z]+){1,8}\)(?=[.\s$*]*$)")
_NO_UNIT_IN_PROSE = frozenset(("in", "a", "A", "at"))


def complement(text: str) -> str | None:
    """Return what the last sentence says of its subject, or None where it says nothing or denies something."""
    said = complements(text)
    return said[0] if said else None


def complements(text: str) -> list[str]:
    """Return what stands behind each verb of the last sentence, the last one first; nothing where it denies something.

    `The answer is n is odd.` → `odd`, `n is odd`.
    """
    text = _WRAPPED_WORDS.sub(r"\1", text)
    sentence = _END.split(text.strip()[-MAX_SENTENCE_CHARS:])[-1].strip()
    if _NEGATION.search(sentence):
        return []
    option = {letter.upper() for letter in _CORRECT_OPTION.findall(sentence)}
    concluded = _CONCLUDED_OPTION.search(sentence)
    if concluded is not None:
        return [concluded[1]]
    if len(option) == 1:
        return [option.pop()]
    verbs = list(_VERB.finditer(sentence)) or list(_COLON.finditer(sentence))
    said = [_value_of(sentence[verb.end() :]) for verb in verbs[: -MAX_VERBS - 1 : -1]]
    subjects = [sentence[: verb.start()].split() for verb in verbs[: -MAX_VERBS - 1 : -1]]
    # The triangle is an isosceles triangle.
    said += [
        words[: -len(subject[-1])].strip()
        for words, subject in zip(said, subjects, strict=True)
        if subject and words.lower().endswith(f" {subject[-1].lower()}")
    ]
    return [words for words in [*said, *_end_of_chain(sentence)] if words.strip("$ ")]


def _end_of_chain(sentence: str) -> list[str]:
    """The last value of a chain of numbers, with its unit: `3 * 60 * 3 = 540 meters a week` → `540 meters`."""
    plain = sentence.replace("**", "")
    chain = None if _OR.search(plain) else next(reversed(list(_CHAIN.finditer(plain))), None)
    return [] if chain is None else [f"{chain[1]} {unit_in_prose(plain, chain.end())}".strip()]


def _value_of(words: str) -> str:
    said = without_remark(words).strip(" *").rstrip(".!。").strip(" *")
    leading = _LEADING_VALUE.match(said)
    return leading[1] if leading else said


def subject(text: str) -> str:
    """Return who a sentence is about: `Evelyn has the greatest speed.` → `Evelyn`; "" where it denies or leaves open."""
    match = _SUBJECT.match(text.strip())
    return "" if match is None or _NEGATION.search(text) or _OR.search(text) else match[1]


def bold_end(line: str) -> str | None:
    """Return the bold words that a line ends in: `It will be a **Friday**.`"""
    match = _BOLD_AT_END.search(line)
    return match[1].strip() if match else None


def without_remark(text: str) -> str:
    """Return the text without what only comments on it: `6, 8, 10 (in increasing order)`, `1/3, or about 0.33`."""
    return _REMARK.sub("", _ROUNDED.sub("", text))


def unit_in_prose(text: str, position: int) -> str:
    """Return the unit behind a value that ends at `position`, "" where there is none; `in` is no inch there."""
    unit = unit_behind(text, position)
    return "" if unit in _NO_UNIT_IN_PROSE or not canonical_unit(unit) else unit
