"""How many characters must be inserted, deleted or replaced to make one text of another."""


def edit_distance(one: str, other: str) -> int:
    """Return the Levenshtein distance.

    Bit-parallel (Myers 1999, in the form of Hyyrö 2003): one step for each character of the shorter text, on integers with
    a bit for each character of the longer one. Texts of 1,000 characters take about a millisecond.
    """
    if len(one) < len(other):
        one, other = other, one
    if not other:
        return len(one)
    places: dict[str, int] = {}
    for place, character in enumerate(one):
        places[character] = places.get(character, 0) | 1 << place
    every, last = (1 << len(one)) - 1, 1 << (len(one) - 1)
    # Down a column of the table of distances a cell is one more (rises), one less (falls) or the same.
    rises, falls, distance = every, 0, len(one)
    for character in other:
        equal = places.get(character, 0)
        steps = (((equal & rises) + rises) ^ rises) | equal
        # The same along the row, from the last column to this one.
        more, less = falls | (every & ~(steps | rises)), rises & steps
        distance += bool(more & last) - bool(less & last)
        more, less = (more << 1 | 1) & every, (less << 1) & every
        equal |= falls
        rises, falls = less | (every & ~(equal | more)), more & equal
    return distance


def similarity(one: str, other: str) -> float:
    """Return 1 - distance / length of the longer text, from 0.0 to 1.0; 1.0 for two empty ones."""
    longest = max(len(one), len(other))
    return 1.0 - edit_distance(one, other) / longest if longest else 1.0
