"""Counted things behind a number, `16 apples`, `5个苹果`, told from words that change it: `5 halves`, `5 below zero`, `5 wrong`."""

import re

from remote_rm.answers.numerals import NUMBER_WORDS

_PHRASE = re.compile(r"[A-Za-z]{2,20}(?:[ -][A-Za-z]{2,20}){0,7}", re.ASCII)
_ORDINALS = re.compile(
    r"(?:thir|four|fif|six|seven|eigh|nine?|ten|eleven|twelf|\w+teen|\w+tie|hundred|thousand|million|billion)ths?"
)
_NUMBER_CHANGING = frozenset(
    (
        "squared cubed factorial factorials doubled tripled quadrupled halved divided multiplied raised times plus minus "
        "less fewer more over under above below zero negative positive inverse inverted reciprocal root power powers "
        "exponent percent percents percentage tens hundreds thousands millions billions trillions dozens doubles triples "
        "halves fold folds and or nor if unless when is are was were be equals not never no none but maybe perhaps either "
        "neither than then except excluding without wrong incorrect false mod modulo base remainder even odd sqrt sin cos tan "
        "log off short too ish almost nearly barely hardly"
    ).split()
)
_NO_PLURALS = frozenset(
    (
        "is was has does its this yes as us thus plus minus less unless always perhaps besides across versus sometimes "
        "towards upwards downwards backwards forwards afterwards equals makes gives means seems differs fails lacks loses "
        "needs exceeds misses lies his hers ours theirs doubts guess guesses stands becomes remains adds subtracts"
    ).split()
)
_PLURALS = frozenset(
    (
        "people men women children mice geese teeth feet fish sheep deer dice oxen cattle police aircraft spacecraft "
        "offspring fruit staff persons personnel data media criteria vertices indices axes radii foci formulae bacteria "
        "them cents kids"
    ).split()
)
_MEASURES = frozenset(
    (
        "teaspoon tablespoon cup pint gallon quart barrel litre item piece unit point person page student mark slice pizza "
        "cake pie bottle box bag apple orange egg book pen pencil dog cat boy girl man woman child way solution triangle "
        "square circle side edge vertex face cube dot star line car bus day team game goal vote step turn lap mile time "
        "intersection root pair set group row column table chair room house tree flower ball card coin ticket family"
    ).split()
)
"""What may stand in the singular, as behind one and behind a fraction."""
_JOINTS = frozenset("of in on per with from at for to inside within among".split())
_REMARKS = frozenset(
    "total altogether each left remaining apart away long tall wide high deep old only overall now today".split()
)
_IN_ALL = re.compile(r"(?:^| )in (?:total|all)$")

_CLASSIFIERS = "个只条张本支枝名位头匹辆颗棵件块枚朵瓶杯碗盒箱袋粒间座架台艘人家户种群双套组根片串"
_BARE_CLASSIFIERS = "次层遍步圈倍题页行列岁套项面边角点组届场门台节号级楼折人"
_CHINESE = re.compile(rf"[{_CLASSIFIERS}](?P<thing>[\u4e00-\u9fff]{{0,4}})|[{_BARE_CLASSIFIERS}]")


def counted_thing(text: str) -> str | None:
    """Return the canonical name of what is counted, "" for things left unnamed, or None for words that count nothing.

    `red apples` → `red apple`, `in total` → ``, `只羊` → `羊`; `wrong`, `halves` and `or more` → None.
    """
    chinese = _CHINESE.fullmatch(text)
    if chinese is not None:
        return chinese["thing"] or ""
    text = _IN_ALL.sub("", text).strip()
    if not text:
        return ""
    if not _PHRASE.fullmatch(text):
        return None
    words = re.split("[ -]", text.lower())
    if changes_number(text):
        return None
    while words and words[-1] in _REMARKS:
        words.pop()
    if not words:
        return ""
    joint = next((place for place, word in enumerate(words) if word in _JOINTS), len(words))
    if joint == 0 or joint > 4 or len(words) - joint > 5:
        return None
    head = _singular(words[joint - 1])
    return None if head is None else " ".join([*words[: joint - 1], head, *words[joint:]])


def changes_number(words: str) -> bool:
    """Return whether words behind a number make it another one, or none: `halves`, `below zero`, `divided by two`, `or 6`."""
    return any(
        word in _NUMBER_CHANGING or word in NUMBER_WORDS or _ORDINALS.fullmatch(word) is not None
        for word in re.split(r"[\s-]+", words.lower())
    )


def _singular(noun: str) -> str | None:
    """The noun without its plural's ending, or None for a word that names nothing that is counted."""
    if noun in _PLURALS or noun in _MEASURES:
        return noun
    if len(noun) < 4 or not noun.endswith("s") or noun.endswith("ss") or noun in _NO_PLURALS:
        return None
    if noun.endswith("ies") and len(noun) > 4:
        return f"{noun[:-3]}y"
    return noun[:-2] if noun.endswith(("ses", "xes", "zes", "ches", "shes")) else noun[:-1]
