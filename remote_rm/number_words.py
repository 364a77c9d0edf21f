"""Numbers in words: `five`, `twenty-one`, `one hundred`."""

import re

_SMALL = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
).split()
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
_VALUES = {word: value for value, word in enumerate(_SMALL)} | {
    word: 10 * value for value, word in enumerate(_TENS, start=2)
}
_SCALES = {"hundred": 100, "thousand": 1000, "million": 10**6}
_WORDS = re.compile(r"[a-z]+(?:(?:-| and |[ ])[a-z]+){0,8}")


def parse_number_words(text: str) -> int | None:
    """Return the number that the words are, or None for anything else."""
    lowered = text.lower()
    if not _WORDS.fullmatch(lowered):
        return None
    words = [word for word in re.split("[- ]", lowered) if word != "and"]
    if not words or not all(word in _VALUES or word in _SCALES for word in words) or words[0] in _SCALES:
        return None
    total, group = 0, 0
    for before, word in zip(["", *words], words, strict=False):
        if word == "hundred":
            group *= 100
        elif word in _SCALES:
            total, group = total + group * _SCALES[word], 0
        elif before in _TENS and 0 < _VALUES[word] < 10 or not before or before in _SCALES:
            group += _VALUES[word]
        else:
            return None
    return total + group
