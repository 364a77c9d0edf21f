r"""Which letter of a multiple choice a text names: `B`, `(b)`, `B. 12 cm`, `option B is right because …`, `选B`, `[C]`."""

import unicodedata
from dataclasses import dataclass
from functools import lru_cache

from remote_rm.answers.lexer import Match, Token, introductions
from remote_rm.answers.reading import normalize
from remote_rm.answers.statement import clause_of
from remote_rm.answers.wording import ALPHABET, is_copied, plain

MAX_CHARS = 1000
"""A longer text names no choice."""

_SURE_REASONS = ("is", "must", "because", "since")
_WRONG = ("wrong", "incorrect", "false", "not", "错误", "错的", "不对", "不正确")


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A letter and the text of the option, which is "" if none is written."""

    letter: str
    text: str = ""


@lru_cache(maxsize=4096)
def read_choice(text: str) -> Choice | None:
    """Return the choice that an answer names, or None if it names none or several."""
    first, *others = [line for line in map(str.strip, text.strip().splitlines()) if line] or [""]
    is_option, *are_others = [Token.OPTION_LINE.fullmatch(line) or line in ALPHABET for line in (first, *others)]
    if is_option and not any(are_others) and not any(map(introductions, others)):
        # The answer, then the reasons.
        text = first
    if text.rstrip().endswith(("?", "？")):
        return None
    said = [_clean(form) for form in ([text, clause_of(text) or ""] if introductions(text) else [text])]
    marked = next(filter(None, map(_with_own_text, said)), None)
    if marked is not None:
        return marked
    text = Token.CONTRAST.sub("", said[-1])
    starts = (introduced.end() for introduced in introductions(text))
    fillings = ((start, Token.FILLING.match(text, start)) for start in starts)
    options = (Token.OPTION.match(text, filling.end() if filling else start) for start, filling in fillings)
    led_in = [option for option in options if option is not None]
    if len(set(map(_letter_of, led_in))) > 1:
        return None
    if concluded := Token.OPTION_CONCLUDED.search(text):
        return Choice(letter=concluded["letter"])
    right = _by_verdict(text)
    if right is not None and not led_in:
        return Choice(letter=right) if right else None
    match = led_in[0] if led_in else Token.OPTION.match(text)
    if match is None or (right and right != _letter_of(match)):
        return None
    rest = text[match.end() :]
    reason = Token.COMMENT.search(rest)
    if Token.DOUBTED.search(rest) or _is_left_open(rest[: reason.start()] if reason else rest, _letter_of(match)):
        return None
    return _choice(match, rest=rest, is_led_in=bool(led_in))


def _marked(text: str) -> tuple[str, str]:
    """The letter and the text of what begins as an option of a question, `(B) no` or `B. no`; "" and "" for anything else."""
    match = Token.OPTION.match(text)
    mark = None if match is None or match["named"] else Token.OPTION_BEFORE_TEXT.match(text, match.end())
    if match is None or mark is None or (match["bare"] and not mark[0].strip()):
        return "", ""
    return _letter_of(match), text[mark.end() :]


def _with_own_text(text: str) -> Choice | None:
    """The choice of a text that is one option whose text itself denies or names letters: `D. Cannot be determined`."""
    letter, said = _marked(text)
    if not said or Token.VERDICT_ON_OPTION.match(said) or Token.OPTION_OPEN.search(said):
        return None
    if Token.ABOUT_OPTIONS.fullmatch(said):
        return None if Token.OPTION_OTHER.search(said) else Choice(letter=letter, text=said)
    plain_text = Token.NAMED_BY_NOUN.sub(" ", said)
    is_own = Token.DENIAL_AS_TEXT.match(said) or plain_text != said
    if not is_own or any(pattern.search(plain_text) for pattern in (Token.OPTION_MARKED, Token.OPTION_LATER)):
        return None
    return Choice(letter=letter, text=said)


def stated_text(text: str) -> str:
    """Return the text of the one option that a text states with its letter, "" if it says anything more: `(B) no` → `no`."""
    text = (clause_of(text) or "") if introductions(text) else text
    letter, said = _marked(_clean(text))
    chosen = read_choice(text) if said else None
    if chosen is None or chosen.letter != letter or introductions(said):
        return ""
    is_more = any(pattern.search(said) for pattern in (Token.VERB, Token.CONSEQUENCE, Token.COMMENT, Token.DENIED))
    return "" if is_more or Token.VERDICT_ON_OPTION.match(said) else said


def read_label(text: str) -> Choice | None:
    """Return the choice that a label is, or None: unlike an answer, its text may hold whatever letters it likes."""
    text = _clean(text)
    match = Token.OPTION.match(text)
    if match is None or Token.OPTION_JOINED.match(text[match.end() :]):
        return None
    return _choice(match, rest=text[match.end() :], is_led_in=False)


def names_letter(text: str) -> bool:
    """Return whether the text names options by their letters, one or several."""
    text = _clean(text)
    return read_choice(text) is not None or Token.OPTION_MARKED.search(text) is not None or states_option(text)


@lru_cache(maxsize=4096)
def states_option(text: str) -> bool:
    """Return whether the text answers by the letters of options: it then says nothing else, whatever their texts are."""
    forms = (text, _clean(text))
    named = any(Token.OPTION_STATED.search(form) or len(set(Token.OPTION_MARKED.findall(form))) > 1 for form in forms)
    if named or _by_verdict(forms[1]) is not None:
        return True
    choice = read_choice(text) if introductions(text) else None
    return choice is not None and choice.letter in text


def matches(answer: str, label: str) -> bool:
    """Return whether the answer names the label's letter, or states the label or its option's text word for word."""
    gold = read_label(label)
    if gold is None or len(answer) > MAX_CHARS:
        return False
    stated = _clean(answer).casefold()
    is_its_text = stated == gold.text.casefold() and not Token.OPTIONS_ONLY.fullmatch(stated)
    if is_its_text or stated == _clean(label).casefold():
        return True
    choice = None if is_copied(answer) else read_choice(plain(answer))
    return choice is not None and same(choice, gold)


def same(answer: Choice, gold: Choice) -> bool:
    """Return whether both are the same letter, and their texts, if both have one, share a number or, without any, a word."""
    if answer.letter != gold.letter or not answer.text or not gold.text:
        return answer.letter == gold.letter
    numbers = [set(Token.DECIMAL.findall(option.text)) for option in (answer, gold)]
    if any(numbers):
        return bool(numbers[0] & numbers[1])
    words = [{word.casefold() for word in Token.TELLING_WORD.findall(option.text)} for option in (answer, gold)]
    return not all(words) or bool(words[0] & words[1])


def _clean(text: str) -> str:
    return normalize(unicodedata.normalize("NFKC", text)) if len(text) <= MAX_CHARS else ""


def _letter_of(match: Match) -> str:
    return (match["round"] or match["square"] or match["bare"]).upper()


def _by_verdict(text: str) -> str | None:
    """The letter that is called right; "" if several are, or only wrong ones; None if none is called anything."""
    if Token.BOTH.search(text):
        return ""
    verdicts = [(one["letter"], one["verdict"] or one["chinese"]) for one in Token.OPTION_JUDGED.finditer(text)]
    if not verdicts:
        return None
    wrong = {letter for letter, verdict in verdicts if verdict in _WRONG}
    right = {letter for letter, verdict in verdicts if verdict not in _WRONG} - wrong
    if right:
        return right.pop() if len(right) == 1 else ""
    first = Token.OPTION.match(text)
    return "" if first is None or _letter_of(first) in wrong else None


def _is_left_open(rest: str, letter: str) -> bool:
    """Whether another letter is named after the first, or what follows takes it back."""
    if Token.OPTION_JOINED.match(rest) or Token.OPTION_AT_ONCE.match(rest):
        return True
    if Token.OPTION_DENIED.search(rest):
        return True
    others = {
        other[other.lastgroup or 0]
        for pattern in (Token.OPTION_MARKED, Token.OPTION_LATER)
        for other in pattern.finditer(rest)
    }
    return bool(others - {letter})


def _choice(match: Match, *, rest: str, is_led_in: bool) -> Choice | None:
    """The choice, or None if the letter is only a word: `A dog`, `I think so`."""
    letter = _letter_of(match)
    if not rest:
        return Choice(letter=letter)
    if mark := Token.OPTION_MARK.match(rest):
        is_article = match["bare"] in ("A", "a") and mark[0].isspace() and not match["named"]
        is_word = is_article and not Token.VALUE_AFTER_A.match(rest)
        return None if is_word else Choice(letter=letter, text=rest[mark.end() :])
    if match["bare"] is None:
        return Choice(letter=letter, text=rest.strip())
    reason = Token.OPTION_REASON.match(rest)
    if reason is None:
        return None
    # "A for effort" and "I for one" are words; "A because ..." is not, nor is "option A for ...".
    said = is_led_in or match["named"] or not rest[0].isspace() or reason[0].strip().startswith(_SURE_REASONS)
    return Choice(letter=letter) if said else None
