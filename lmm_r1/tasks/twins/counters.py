"""The tasks `money`, `dice` and `cards`: values of coins, dice and playing cards are read and combined."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from functools import cache

from PIL import Image

from lmm_r1.tasks.twins import Factors, Family, TwinItem, TwinTask
from lmm_r1.tasks.twins.drawing import COLOURS, COPPER, GOLD, Canvas, Point, Rgb

COINS = (1, 2, 5, 10, 20, 50)


@cache
def _purses(count: int) -> dict[int, list[tuple[int, ...]]]:
    """All sets of as many coins, by their sum."""
    found: dict[int, list[tuple[int, ...]]] = {}
    for coins in itertools.combinations_with_replacement(COINS, count):
        found.setdefault(sum(coins), []).append(coins)
    return found


def _money(factors: Factors, *, seen: tuple[Factors, ...], level: int, rng: random.Random) -> TwinItem:
    more, coin = map(int, factors)
    purses = _purses(level + 1)
    total = rng.choice(list(purses))
    purse = rng.choice(purses[total])
    coins = rng.sample(purse, len(purse))
    cells = sorted(rng.sample(range(9), len(coins)))
    answer = total + more * coin
    return TwinItem(
        facts=f"Coins: {', '.join(map(str, coins))}.",
        question=f"How many cents are there with {more} more coins of {coin} cent{'s' if coin > 1 else ''}?",
        answer=str(answer),
        choices=len(purses),
        thought=f"{'+'.join(map(str, coins))}={total}. {more}*{coin}={more * coin}. {total}+{more * coin}={answer}.",
        draw=lambda scale: _draw_coins(coins, cells, scale),
    )


def _draw_coins(coins: Sequence[int], cells: Sequence[int], scale: int) -> Image.Image:
    canvas = Canvas(112, 112, scale=scale)
    for coin, cell in zip(coins, cells, strict=True):
        centre = (cell % 3 * 37 + 19, cell // 3 * 37 + 19)
        canvas.disc(centre, 14 + COINS.index(coin), COLOURS["black"])
        canvas.disc(centre, 13 + COINS.index(coin), COPPER if coin < 10 else GOLD)
        canvas.text(str(coin), centre, COLOURS["black"], dot=2)
    return canvas.image


OPERATIONS: dict[str, Callable[[Sequence[int]], int]] = {
    "sum": sum,
    "highest": max,
    "lowest": min,
    "range": lambda values: max(values) - min(values),
}
_ASKED = {1: 2, 2: 2, 3: 3, 4: 3, 5: 4}
"""How many dice or cards a question is about, by difficulty."""


@cache
def _hands(operation: str, count: int, values: range) -> dict[int, list[tuple[int, ...]]]:
    """All values of so many dice or cards, by what the operation makes of them."""
    found: dict[int, list[tuple[int, ...]]] = {}
    for hand in itertools.product(values, repeat=count):
        found.setdefault(OPERATIONS[operation](hand), []).append(hand)
    return found


def _hand(
    factors: Factors,
    *,
    level: int,
    rng: random.Random,
    values: range,
    groups: Sequence[str],
    question: str,
    facts: Callable[[Sequence[tuple[str, int]]], str],
    draw: Callable[[Sequence[tuple[str, int]], int], Image.Image],
) -> TwinItem:
    """A question about the values of one group among others; no place of the picture belongs to a group."""
    operation, group = map(str, factors)
    hands = _hands(operation, _ASKED[level], values)
    answer = rng.choice(list(hands))
    asked = rng.choice(hands[answer])
    others = [name for name in groups if name != group]
    shown = [(group, value) for value in asked] + [(rng.choice(others), rng.choice(values)) for _ in range(level)]
    rng.shuffle(shown)
    read = [value for name, value in shown if name == group]
    result = "+".join(map(str, read)) if operation == "sum" else f"{operation} of {', '.join(map(str, read))}"
    return TwinItem(
        facts=facts(shown),
        question=question.format(operation=operation, group=group),
        answer=str(answer),
        choices=len(hands),
        thought=f"{group}: {result}={answer}.",
        draw=lambda scale: draw(shown, scale),
    )


def _dice(factors: Factors, *, seen: tuple[Factors, ...], level: int, rng: random.Random) -> TwinItem:
    return _hand(
        factors,
        level=level,
        rng=rng,
        values=range(1, 7),
        groups=tuple(COLOURS),
        question="What is the {operation} of the {group} dice?",
        facts=lambda shown: f"Dice: {', '.join(f'{colour} {value}' for colour, value in shown)}.",
        draw=_draw_dice,
    )


_PIPS: dict[int, list[Point]] = {
    1: [(0, 0)],
    2: [(-1, -1), (1, 1)],
    3: [(-1, -1), (0, 0), (1, 1)],
    4: [(-1, -1), (1, -1), (-1, 1), (1, 1)],
    5: [(-1, -1), (1, -1), (0, 0), (-1, 1), (1, 1)],
    6: [(-1, -1), (1, -1), (-1, 0), (1, 0), (-1, 1), (1, 1)],
}


def _draw_dice(shown: Sequence[tuple[str, int]], scale: int) -> Image.Image:
    canvas = Canvas(112, 112, scale=scale)
    for place, (colour, value) in enumerate(shown):
        column, row = place % 3 * 37 + 19, place // 3 * 37 + 19
        canvas.box(column - 16, row - 16, column + 16, row + 16, COLOURS[colour])
        pip = COLOURS["black" if colour in ("white", "yellow") else "white"]
        for x, y in _PIPS[value]:
            canvas.disc((column + 9 * x, row + 9 * y), 3, pip)
    return canvas.image


SUITS = ("hearts", "diamonds", "spades", "clubs")
RANKS = range(2, 11)


def _cards(factors: Factors, *, seen: tuple[Factors, ...], level: int, rng: random.Random) -> TwinItem:
    return _hand(
        factors,
        level=level,
        rng=rng,
        values=RANKS,
        groups=SUITS,
        question="What is the {operation} of the {group}?",
        facts=lambda shown: f"Cards: {', '.join(f'{value} of {suit}' for suit, value in shown)}.",
        draw=_draw_cards,
    )


def _draw_cards(shown: Sequence[tuple[str, int]], scale: int) -> Image.Image:
    canvas = Canvas(168, 168, scale=scale)
    for place, (suit, value) in enumerate(shown):
        left, top = place % 3 * 56 + 8, place // 3 * 56 + 2
        canvas.box(left - 1, top - 1, left + 41, top + 53, COLOURS["black"])
        canvas.box(left, top, left + 40, top + 52, COLOURS["white"])
        ink = COLOURS["red" if suit in ("hearts", "diamonds") else "black"]
        canvas.text(str(value), (left + 20, top + 12), ink, dot=2)
        _SYMBOLS[suit](canvas, (left + 20, top + 35), ink)
    return canvas.image


def _heart(canvas: Canvas, centre: Point, ink: Rgb) -> None:
    x, y = centre
    canvas.disc((x - 5, y - 4), 5, ink)
    canvas.disc((x + 5, y - 4), 5, ink)
    canvas.polygon([(x - 10, y - 2), (x + 10, y - 2), (x, y + 11)], ink)


def _diamond(canvas: Canvas, centre: Point, ink: Rgb) -> None:
    x, y = centre
    canvas.polygon([(x, y - 12), (x + 9, y), (x, y + 12), (x - 9, y)], ink)


def _spade(canvas: Canvas, centre: Point, ink: Rgb) -> None:
    x, y = centre
    canvas.disc((x - 5, y + 2), 5, ink)
    canvas.disc((x + 5, y + 2), 5, ink)
    canvas.polygon([(x - 10, y), (x, y - 13), (x + 10, y)], ink)
    canvas.polygon([(x, y), (x + 4, y + 12), (x - 4, y + 12)], ink)


def _club(canvas: Canvas, centre: Point, ink: Rgb) -> None:
    x, y = centre
    for place in ((x, y - 7), (x - 7, y + 2), (x + 7, y + 2)):
        canvas.disc(place, 5, ink)
    canvas.polygon([(x, y - 3), (x + 4, y + 12), (x - 4, y + 12)], ink)


_SYMBOLS = {"hearts": _heart, "diamonds": _diamond, "spades": _spade, "clubs": _club}
MONEY = TwinTask(family=Family(name="money", factors=tuple(itertools.product(range(2, 8), COINS)), make=_money))
DICE = TwinTask(family=Family(name="dice", factors=tuple(itertools.product(OPERATIONS, COLOURS)), make=_dice))
CARDS = TwinTask(family=Family(name="cards", factors=tuple(itertools.product(OPERATIONS, SUITS)), make=_cards))
