r"""Are two values equal: compared by kind, by simple rules and values at points if they decide.

The gold value says how an answer is read: as a choice, a text, a sequence, a region, a matrix, a number, or an expression.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from math import inf, isclose

from remote_rm.answers import choice
from remote_rm.answers.algebra import numeric_value, same_algebra
from remote_rm.answers.lexer import Latex, Token
from remote_rm.answers.notation import (
    SEQUENCES,
    Kind,
    are_compared,
    both_signs,
    elements,
    gold_sequence,
    has_relation,
    in_full,
    is_text,
    kind_of,
    read_notation,
    same_as_plain,
    same_choices,
    same_written,
)
from remote_rm.answers.quantity import parse_quantity, rounded_places, same_quantity, same_unit, split_unit
from remote_rm.answers.reading import (
    Region,
    Span,
    as_components,
    as_tuple,
    bracketed,
    enclosing_delimiters,
    inside_of,
    is_plain_pair,
    normalize,
    parse_matrix,
    parse_region,
    split_top_level,
    without_membership,
)

_CONTAINERS = SEQUENCES | {Kind.EQUATION}
_INFINITE_ENDS = {"-\\infty": -inf, "\\infty": inf}


Undecided = Callable[[str, str], bool | None]
"""(answer, gold) -> whether they are equal, for what the simple rules leave open."""


def work_out(answer: str, gold: str) -> bool | None:
    """Return whether both are equal by their values at points, or None; what may round to a rounded gold is left open."""
    is_equal = same_algebra(answer, gold)
    number = None if is_equal is not False else parse_quantity(gold)
    return None if number is not None and rounded_places(number) is not None else is_equal


def refuse(_answer: str, _gold: str) -> bool:
    """As `undecided`: equal is only what the rules find equal."""
    return False


def match_value(answer: str, gold: str, undecided: Undecided) -> bool | None:
    """Return whether two normalised texts are the same value; None if `undecided` says so."""
    if not answer or not gold:
        return False
    if answer.casefold() == gold.casefold() and (answer == gold or is_text(gold)):
        return True
    if (label := choice.read_label(gold) if is_choice(gold) else None) is not None:
        if (chosen := choice.read_choice(answer)) is not None or not label.text or is_choice(normalize(label.text)):
            return chosen is not None and choice.same(chosen, label)
        return match_value(answer, normalize(label.text), undecided)
    several = same_choices(answer, gold)
    if several is not None:
        return several
    answer_kind, gold_kind = kind_of(answer), kind_of(gold)
    if Kind.TUPLE in (answer_kind, gold_kind) and answer_kind is not gold_kind:
        other = gold if answer_kind is Kind.TUPLE else answer
        components = as_components(other) or as_tuple(parse_matrix(other))
        if components is not None:
            return match_value(*((answer, components) if answer_kind is Kind.TUPLE else (components, gold)), undecided)
    if not are_compared(answer_kind, gold_kind):
        return False
    read, wanted = read_notation(answer), read_notation(gold)
    if read is not None and wanted is not None:
        return same_written(read, wanted)
    written, other = (read, gold) if wanted is None else (wanted, answer)
    if written is not None and answer_kind not in _CONTAINERS and kind_of(other) not in _CONTAINERS:
        return same_as_plain(written, other, is_gold=wanted is not None)
    return _match_open(answer, gold, undecided)


def _match_open(answer: str, gold: str, undecided: Undecided) -> bool | None:
    """Compare two values that are read by their parts."""
    gold_rows = parse_matrix(gold)
    if gold_rows is not None:
        return _match_matrix(answer, gold, gold_rows, undecided)
    gold_region = parse_region(gold)
    if gold_region is not None:
        answer_region = parse_region(answer)
        if answer_region is not None and not (is_plain_pair(gold_region) and is_plain_pair(answer_region)):
            return _match_regions(answer, gold, answer_region, gold_region, undecided)
    answer, gold = without_membership(answer)[0], without_membership(gold)[0]
    single = _only_element(answer), _only_element(gold)
    if single != (answer, gold):
        return match_value(*single, undecided)
    gold_items = gold_sequence(gold)
    if gold_items is not None:
        return _match_sequence(answer, gold, gold_items, undecided)
    return _match_single(answer, gold, undecided)


def _match_matrix(answer: str, gold: str, gold_rows: tuple[tuple[str, ...], ...], undecided: Undecided) -> bool | None:
    cells = [cell for row in gold_rows for cell in row]
    answer_rows = parse_matrix(answer)
    if answer_rows is not None:
        if [len(row) for row in answer_rows] != [len(row) for row in gold_rows]:
            return False
        answer_cells = [cell for row in answer_rows for cell in row]
    else:
        is_vector = 1 in (len(gold_rows), len(gold_rows[0]))
        components = bracketed(answer) if is_vector else None
        if components is None or len(components) != len(cells):
            return undecided(answer, gold)
        answer_cells = list(components)
    return _match_in_order(answer_cells, cells, undecided)


def _match_regions(
    answer: str, gold: str, answer_region: Region, gold_region: Region, undecided: Undecided
) -> bool | None:
    names = {answer_region.variable, gold_region.variable} - {""}
    if len(names) < 2 and _differ_in_numbers(answer_region, gold_region):
        return False
    if len(names) > 1 or len(answer_region.spans) != len(gold_region.spans):
        return undecided(answer, gold)
    if len(gold_region.spans) == 1:
        return _match_spans(answer_region.spans[0], gold_region.spans[0], undecided)
    left = list(answer_region.spans)
    for gold_span in gold_region.spans:
        met = next((span for span in left if _match_spans(span, gold_span, refuse)), None)
        if met is None:
            return undecided(answer, gold)
        left.remove(met)
    return True


def _differ_in_numbers(answer: Region, gold: Region) -> bool:
    """Whether both are intervals apart from each other, with numbers for ends, and not the same ones."""
    ends = [_numeric_spans(answer), _numeric_spans(gold)]
    if ends[0] is None or ends[1] is None:
        return False
    if len(ends[0]) != len(ends[1]):
        return True
    pairs = zip(ends[0], ends[1], strict=True)
    return any(
        not isclose(one, other, rel_tol=1e-6, abs_tol=1e-9) for pair in pairs for one, other in zip(*pair, strict=True)
    )


def _numeric_spans(region: Region) -> list[tuple[float, float]] | None:
    """The ends in order; None if one is no number, or two intervals may be one."""
    spans = []
    for span in region.spans:
        ends = [_INFINITE_ENDS.get(end, numeric_value(normalize(end))) for end in (span.left, span.right)]
        if ends[0] is None or ends[1] is None or ends[0] >= ends[1]:
            return None
        spans.append((ends[0], ends[1], span.brackets))
    spans.sort(key=lambda span: span[:2])
    for before, after in pairwise(spans):
        is_apart = before[1] < after[0] or (before[1] == after[0] and (before[2][1], after[2][0]) == (")", "("))
        if not is_apart:
            return None
    return [(left, right) for left, right, _ in spans]


def _match_spans(answer: Span, gold: Span, undecided: Undecided) -> bool | None:
    if answer.brackets != gold.brackets:
        return False
    return _match_in_order([answer.left, answer.right], [gold.left, gold.right], undecided)


def _match_single(answer: str, gold: str, undecided: Undecided) -> bool | None:
    """Compare if the gold is one value, relation or text, and the two differ as strings."""
    gold_number, answer_number = parse_quantity(gold), parse_quantity(answer)
    if gold_number is not None and answer_number is not None:
        return same_quantity(answer_number, gold=gold_number)
    (gold_value, gold_unit), (answer_value, answer_unit) = split_unit(gold), split_unit(answer)
    if gold_unit and "=" in answer and not has_relation(gold):
        # The unit of x = 12 m is in its last side.
        last = _end_of_chain(answer)
        return last is not None and match_value(last, gold, undecided)
    if gold_unit or answer_unit:
        is_same = same_unit(answer_unit, gold_unit)
        return match_value(answer_value, gold_value, undecided) if is_same else False
    named_letter = Token.NAMED_LETTER.fullmatch(answer)
    if named_letter is not None and gold.isalpha() and gold.isupper() and len(gold) == 1 and gold.isascii():
        return named_letter[1] == gold
    if is_text(gold) or is_text(answer):
        return in_full(_as_words(answer), gold=_as_words(gold)) == _as_words(gold)
    gold_assigned, answer_assigned = Latex.ASSIGNMENT.fullmatch(gold), Latex.ASSIGNMENT.fullmatch(answer)
    if gold_assigned and (answer_assigned or not has_relation(answer)):
        names = {match[1] for match in (answer_assigned, gold_assigned) if match}
        # `f(x)` is called `y`, too.
        if len(names) > 1 and not ("y" in names and any(map(Latex.OF_X.fullmatch, names))):
            return undecided(answer, gold)
        return match_value(answer_assigned[2] if answer_assigned else answer, gold_assigned[2], undecided)
    if gold_assigned and answer.count("=") == 1 and parse_quantity(gold_assigned[2]) is not None:
        # 3n = 36 is not solved.
        left, right = answer.split("=")
        return match_value(left, gold_assigned[2], undecided) if right == gold_assigned[1] else False
    is_longer = kind_of(answer) is Kind.LIST or len(split_top_level(answer)) > len(split_top_level(gold))
    if is_longer and kind_of(gold) is not Kind.EXPRESSION:
        return False
    gold_terms, answer_terms = gold.split(":"), answer.split(":")
    if len(gold_terms) > 1 and all(gold_terms) and all(answer_terms):
        return len(gold_terms) == len(answer_terms) and _match_in_order(answer_terms, gold_terms, undecided)
    if "=" in answer and not has_relation(gold):
        last = _end_of_chain(answer)
        return last is not None and match_value(last, gold, undecided)
    # sympy would take one side of what it does not know.
    return undecided(answer, gold) if Latex.SIGN.search(gold) or not Latex.SIGN.search(answer) else False


def _end_of_chain(text: str) -> str | None:
    """The value that a chain of equations ends in: `3+4=7` → `7`, `7=x` → `7`, `m+n=7` → `7`; None if it has none.

    A side in other letters is what the value is called, unless it has a factor: `3x+4y=12` is an equation. A side in the
    letters of the end, or without any, has to be equal to it: `3x=2x` and `0=7` are wrong.
    """
    *before, last = text.split("=")
    if len(last) == 1 and last.isascii() and last.isalpha():
        *before, last = before
    if not all(side.strip() for side in before):
        return None
    letters = set(Latex.LETTER.findall(last))
    for index, side in enumerate(before):
        if not set(Latex.LETTER.findall(side)) <= letters:
            if index == 0 and len(before) == 1 and Latex.TERM_WITH_FACTOR.search(side):
                return None
        elif same_algebra(side, last) is False and not rounds_to(side, last):
            return None
    return last


def rounds_to(exact: str, about: str) -> bool:
    r"""Return whether a decimal is what a normalised value is when rounded to its places: 113.1 for `36\pi`."""
    (exact, unit), (about, other_unit) = split_unit(exact), split_unit(about)
    rounded, value = parse_quantity(normalize(about)), numeric_value(normalize(exact))
    if rounded is None or value is None or not rounded.places or not same_unit(unit, other_unit):
        return False
    return abs(value - float(rounded.value)) <= 0.5001 * 10.0**-rounded.places


def _match_sequence(answer: str, gold: str, gold_items: list[str], undecided: Undecided) -> bool | None:
    named_answer, named_gold = _named_one_by_one(answer), _named_one_by_one(gold)
    gold_pair, answer_pair = enclosing_delimiters(named_gold), enclosing_delimiters(named_answer)
    pairs = {pair[0] for pair in (answer_pair, gold_pair) if pair is not None}
    if answer_pair != gold_pair:
        # Of two elements, [1, 2] is a closed interval, (1, 2) an open one or a point, {1, 2} a set.
        are_alike = None in (answer_pair, gold_pair) or len(gold_items) > 2 or pairs == {"{", r"\{"}
        if {("[", ")"), ("(", "]")} & {answer_pair, gold_pair} or not are_alike:
            return False
    if "(" in pairs and (Latex.OR.search(answer) or Latex.OR.search(gold)):
        return False
    if Latex.OR.search(answer) and not Latex.OR.search(gold) and all(map(Token.NAME_ONLY.fullmatch, gold_items)):
        return False
    gold_items = gold_items if named_gold == gold else split_top_level(inside_of(named_gold, gold_pair))
    answer_items = [
        signed
        for item in elements(inside_of(named_answer, answer_pair), length=len(gold_items))
        for signed in both_signs(item)
    ]
    is_set = bool(pairs & {"{", r"\{"})
    if is_set:
        answer_items, gold_items = list(dict.fromkeys(answer_items)), list(dict.fromkeys(gold_items))
    if len(answer_items) != len(gold_items):
        return False
    answer_items, gold_items = _as_solutions(answer_items, gold_items), _as_solutions(gold_items, answer_items)
    aligned = _aligned(answer_items, gold_items, is_placed=(named_answer != answer, named_gold != gold))
    if aligned is not None:
        return _match_in_order(*aligned, undecided)
    match = _match_unordered if is_set or not pairs else _match_in_order
    return match(answer_items, gold_items, undecided)


def _only_element(text: str) -> str:
    """The element of a list or set of one: `[5]` → `5`; any other text as it is."""
    pair = enclosing_delimiters(text)
    if pair is None or pair[0] not in ("[", r"\{", "{"):
        return text
    items = split_top_level(inside_of(text, pair))
    return normalize(items[0]) or text if len(items) == 1 and parse_region(text) is None else text


def _named_one_by_one(text: str) -> str:
    """`(a,b)=(1,2)` as `a=1, b=2`; any other text as it is."""
    match = Latex.TUPLE_ASSIGNMENT.match(text)
    if match is None:
        return text
    names, values = split_top_level(match[0][1:-2]), text[match.end() :]
    pair = enclosing_delimiters(values)
    items = split_top_level(inside_of(values, pair)) if pair is not None else []
    if len(items) != len(names):
        return text
    return ", ".join(f"{name}={item}" for name, item in zip(names, items, strict=True))


def _aligned(
    answer_items: list[str], gold_items: list[str], *, is_placed: tuple[bool, bool]
) -> tuple[list[str], list[str]] | None:
    """Both lists by name if the names of one are all different, else None: `y=2, x=1` is `x=1, y=2` and `1, 2`.

    Names that only one side has are dropped; it is then in the order of `(x,y)=`, if it is written so, or of the alphabet.
    """
    answers, golds = _values_by_name(answer_items), _values_by_name(gold_items)
    if answers is not None and golds is not None:
        same_names = set(answers) == set(golds)
        return (sorted(answer_items), sorted(gold_items)) if same_names else (answer_items, gold_items)
    unnamed = gold_items if golds is None else answer_items
    if (answers is None and golds is None) or _are_solutions(answers or golds or {}) or "=" in "".join(unnamed):
        return None
    return (
        answer_items if answers is None else _in_order(answers, is_placed=is_placed[0]),
        gold_items if golds is None else _in_order(golds, is_placed=is_placed[1]),
    )


def _in_order(values: dict[str, str], *, is_placed: bool) -> list[str]:
    return list(values.values()) if is_placed else [values[name] for name in sorted(values)]


def _are_solutions(values: dict[str, str]) -> bool:
    """Whether the names are one letter with numbers: `x_1=3, x_2=5` are solutions, in no order."""
    return len({name.partition("_")[0] for name in values}) == 1


def _as_solutions(items: list[str], others: list[str]) -> list[str]:
    """`x_1=2, x_2=-3` as `x=2, x=-3`, unless the other side numbers its values as well."""
    if not _are_solutions(_values_by_name(items) or {}) or _values_by_name(others) is not None:
        return items
    return [Latex.NUMBER_OF_NAME.sub(r"\1", normalize(item)) for item in items]


def _values_by_name(items: list[str]) -> dict[str, str] | None:
    """The values of a list whose items are all named, each differently."""
    named = [Latex.ASSIGNMENT.fullmatch(normalize(item)) for item in items]
    values = {match[1]: match[2] for match in named if match is not None}
    return values if len(values) == len(items) > 1 else None


def _match_in_order(answers: Iterable[str], golds: Iterable[str], undecided: Undecided) -> bool | None:
    pairs = zip(map(normalize, answers), map(normalize, golds), strict=True)
    return all_of([match_value(answer, gold, undecided) for answer, gold in pairs])


def _match_unordered(answer_items: list[str], gold_items: list[str], undecided: Undecided) -> bool | None:
    remaining = [normalize(item) for item in answer_items]
    verdicts: list[bool | None] = []
    for gold_item in map(normalize, gold_items):
        # What the rules alone find equal is taken first, so that sympy never changes their verdict.
        compared = [match_value(item, gold_item, work_out) for item in remaining]
        if True not in compared:
            compared = [
                match_value(item, gold_item, undecided) if verdict is None else verdict
                for item, verdict in zip(remaining, compared, strict=True)
            ]
        verdict = any_of(compared)
        verdicts.append(verdict)
        if verdict:
            remaining.pop(compared.index(True))
    return all_of(verdicts)


def all_of(verdicts: Sequence[bool | None]) -> bool | None:
    """Return whether all are true; None if that is left open."""
    return False if False in verdicts else None if None in verdicts else True


def any_of(verdicts: Sequence[bool | None]) -> bool | None:
    """Return whether one is true; None if that is left open."""
    return True if True in verdicts else None if None in verdicts else False


def _as_words(text: str) -> str:
    """Words without what does not tell them apart: capitals, an article, an exclamation mark, doubled spaces."""
    plain = Token.ARTICLE.sub("", " ".join(text.casefold().rstrip("!").replace("-", " ").split()))
    return Token.SIDE.sub(r"\1", plain)


def is_choice(gold: str) -> bool:
    """Return whether a normalised gold answer is a letter from A to J, with or without the text of its option."""
    return Token.GOLD_CHOICE.fullmatch(gold) is not None
