"""How ten languages say numbers, yes and no, and that something is the answer: `languages.ini`, and the patterns made of it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from remote_rm.answers.lexer import sections

_SECTIONS = sections("languages.ini")
LANGUAGES = tuple(language for name, language in _SECTIONS.items() if name != "Others")


def _words() -> dict[str, str]:
    """What an answer of one word is in English; a word of two meanings is none."""
    meanings: dict[str, set[str]] = {}
    for language in LANGUAGES:
        written = {str(number): forms.split("/") for number, forms in enumerate(language["numbers"].split())}
        for english, forms in (*written.items(), *((name, language[name].split("|")) for name in ("yes", "no"))):
            for form in forms:
                meanings.setdefault(form.casefold(), set()).add(english)
    return {word: english.pop() for word, english in meanings.items() if len(english) == 1}


# English has these words, too.
_ENGLISH = frozenset("once six null une ein eine um _".split())
WORDS = {word: english for word, english in _words().items() if word not in _ENGLISH} | {"không": "no"}
WHOLE_WORD = "sept"
"""The abbreviation of a month if it has a capital or a full stop."""


def _any_of(patterns: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns if pattern), re.IGNORECASE)


def _introduction(language: Mapping[str, str]) -> re.Pattern[str]:
    """What introduces an answer, with its verb; in a language with the verb at the end, it may be missing here."""
    joined, often = (f"|{language['verb']}", "*") if "ending" in language else ("", "+")
    verb = rf"(?:\s*(?:(?:{language['verb']})(?![^\W\d_]){joined}|[:：=]))"
    return _any_of((f"(?:{language['answer']}){verb}{often}", language.get("with_verb", "")))


DENIED, MAYBE, ANSWER = (
    _any_of(language.get(key, "").replace("\n", "") for language in _SECTIONS.values())
    for key in ("denied", "maybe", "answer")
)
INTRODUCED = tuple(map(_introduction, LANGUAGES))
"""What introduces an answer in each of LANGUAGES, with its verb."""

STATED = tuple(re.compile(rf"(?:^|\s)(?:{language.get('states', '(?!)')})\s", re.IGNORECASE) for language in LANGUAGES)
"""The verb of a plain sentence in each of LANGUAGES."""

_ARTICLE = r"^(?:eine?n?|de[rns]|das|die|une?|les?|la|l['’]|el|los|las|una|uma?) (?=\w)"


def bare_answer(said: str, language: Mapping[str, str]) -> str:
    """Return an answer without its article, the verb after it and the noun before its letter; `or` joins alternatives."""
    if "ending" in language:
        said = re.sub(rf"\s*(?:{language['ending']})(?=\W*$)", "", said)
    if "option" in language:
        said = re.sub(rf"^(?:{language['option']})\s+(?=\(?[A-J]\b)", "", said, flags=re.IGNORECASE)
    said = re.sub(_ARTICLE, "", said, flags=re.IGNORECASE)
    return re.sub(language["either"], " or ", said, flags=re.IGNORECASE)
