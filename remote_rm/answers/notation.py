"""Notations with a meaning of their own: yes and no, times of day, bases, residues, ratios, several choices."""

import re

from remote_rm.answers.quantity import parse_quantity

_YES_NO = re.compile(r"(yes|no|true|false)(?:$|[,.;:!]\s*(?!.*\b(?:yes|no|true|false|or)\b).*$)", re.IGNORECASE)
_TIME = re.compile(r"(\d{1,2}:\d\d(?::\d\d)?)(?: ?(AM|PM))?", re.IGNORECASE)
_BASED = re.compile(r"(-?(?=[A-Fa-f]*\d)[0-9A-Fa-f,]+)_\{?(\d+|[a-z]+)\}?", re.ASCII)
_DIGITS = re.compile(r"-?[0-9A-Fa-f,]+", re.ASCII)
_BASES = "two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen".split()
_RESIDUE = re.compile(
    r"(?:[A-Za-z]\\equiv ?)?(-?\d{1,300}) ?(?:\\pmod\{(\d{1,300})\}|\(?mod (\d{1,300})\)?)", re.ASCII
)
_RATIO = re.compile(r"\d{1,100}(?::\d{1,100})+", re.ASCII)
_SUBJECT = r"(?:the |this |it |its )?(?:[a-z]+ ){0,4}?"
_PHRASES = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        rf"(?:{_SUBJECT}has |there (?:is|are) )?(?:no (?:real )?solutions?|no real roots?|none)[.!]?",
        rf"(?:{_SUBJECT}(?:does not exist|doesn't exist)|dne|does not exist)[.!]?",
        rf"(?:{_SUBJECT}has |there (?:is|are) )?(?:an )?infinite(?:ly many| number of)(?: (?:real )?solutions?)?[.!]?",
        rf"(?:{_SUBJECT}is |{_SUBJECT})?undefined[.!]?",
    )
)
_CHOICES = re.compile(r"(?=[A-J]{2,10}$)A?B?C?D?E?F?G?H?I?J?")
_LISTED_CHOICES = re.compile(r"\(?[A-J]\)?(?:(?:[,;&\s]|and)+\(?[A-J]\)?)+")


def same_notation(answer: str, gold: str) -> bool | None:
    """Return whether two normalised texts mean the same where the gold is in a notation of this module, else None."""
    for rule in (_same_word, _same_phrase, _same_time, _same_based, _same_residue, _same_ratio, _same_choices):
        verdict = rule(answer, gold)
        if verdict is not None:
            return verdict
    return None


def _same_word(answer: str, gold: str) -> bool | None:
    """`Yes, it is.` is yes; `Yes or no` is neither."""
    if gold.lower() not in ("yes", "no", "true", "false"):
        return None
    match = _YES_NO.fullmatch(answer)
    return match is not None and match[1].lower() == gold.lower()


def _same_phrase(answer: str, gold: str) -> bool | None:
    """`There are no solutions.` is `No solution`; the gold says which phrase it is about."""
    for phrase in _PHRASES:
        if phrase.fullmatch(gold):
            return phrase.fullmatch(answer) is not None or None
    return None


def _same_time(answer: str, gold: str) -> bool | None:
    gold_time, answer_time = _TIME.fullmatch(gold), _TIME.fullmatch(answer)
    if gold_time is None or answer_time is None or not (gold_time[2] or answer_time[2]):
        return None
    halves = {(match[2] or "").upper() for match in (gold_time, answer_time)} - {""}
    return gold_time[1].lstrip("0") == answer_time[1].lstrip("0") and len(halves) == 1


def _same_based(answer: str, gold: str) -> bool | None:
    gold_based, answer_based = _BASED.fullmatch(gold), _BASED.fullmatch(answer)
    if gold_based and answer_based:
        return _digits(gold_based[1]) == _digits(answer_based[1]) and _base(gold_based[2]) == _base(answer_based[2])
    with_base, other = (gold_based, answer) if gold_based else (answer_based, gold)
    if with_base is None or not _DIGITS.fullmatch(other):
        return None
    return _digits(with_base[1]) == _digits(other)


def _same_residue(answer: str, gold: str) -> bool | None:
    gold_residue, answer_residue = _RESIDUE.fullmatch(gold), _RESIDUE.fullmatch(answer)
    if gold_residue is None and answer_residue is None:
        return None
    if gold_residue and answer_residue and _modulus(gold_residue) != _modulus(answer_residue):
        return False
    value = int(answer_residue[1]) if answer_residue else _integer(answer)
    gold_value = int(gold_residue[1]) if gold_residue else _integer(gold)
    if value is None or gold_value is None:
        return None
    modulus = _modulus(gold_residue) if gold_residue else 0
    # Without its modulus, an answer must be the residue itself: 10 is not "3 (mod 7)", but 10 (mod 7) is.
    if modulus and answer_residue:
        return (value - gold_value) % modulus == 0
    return value == gold_value


def _same_ratio(answer: str, gold: str) -> bool | None:
    answer = re.sub(r" to ", ":", answer)
    if not _RATIO.fullmatch(gold):
        return None
    terms = [int(term) for term in gold.split(":")]
    if _RATIO.fullmatch(answer):
        others = [int(term) for term in answer.split(":")]
        pairs = list(zip(terms, others, strict=False))
        proportional = all(a * pairs[0][1] == b * pairs[0][0] for a, b in pairs)
        return len(terms) == len(others) and proportional and any(others) == any(terms)
    number = parse_quantity(answer)
    if number is None or len(terms) != 2 or terms[1] == 0:
        return None
    return number.value * terms[1] == terms[0]


def _same_choices(answer: str, gold: str) -> bool | None:
    if not _CHOICES.fullmatch(gold) or not _LISTED_CHOICES.fullmatch(answer):
        return None
    return sorted(re.findall("[A-J]", answer)) == list(gold)


def _digits(written: str) -> str:
    return written.replace(",", "").upper()


def _base(written: str) -> int | str:
    return int(written) if written.isdigit() else _BASES.index(written) + 2 if written in _BASES else written


def _modulus(match: re.Match[str]) -> int:
    return int(match[2] or match[3])


def _integer(text: str) -> int | None:
    return int(text) if re.fullmatch(r"-?\d{1,300}", text, re.ASCII) else None
