import itertools
import math
import random
import re
from collections import Counter, defaultdict, deque

import numpy as np
import pytest

from lmm_r1.tasks import LEVELS, TASKS, TWINS, get_task
from lmm_r1.tasks.twins import TwinTask, held
from lmm_r1.tasks.twins.dates import WEEKDAYS, time_of
from lmm_r1.tasks.twins.drawing import BOARD, COLOURS, SHAPES
from lmm_r1.tasks.twins.mazes import shortest_paths
from lmm_r1.tasks.twins.shapes import draw
from remote_rm.registry import get_verifier
from remote_rm.verifier import Item

MATH = get_verifier("math")
FULL = pytest.mark.full
# The easiest and the hardest level by default, the others in the full run.
CASES = [
    pytest.param(name, level, marks=() if level in (LEVELS[0], LEVELS[-1]) else FULL)
    for name in TWINS
    for level in LEVELS
]


def make(name, modality="text", *, level=2, split="train", rows=200, seed=0, scale=1):
    task = get_task(name).at_difficulty(level)
    if scale != 1:
        task = TwinTask(family=task.family, difficulty=level, scale=scale)
    return list(task.generate(split=split, modality=modality, rows=rows, seed=seed))


def words_of(row):
    content = row.messages[0]["content"]
    return content if isinstance(content, str) else content[-1]["text"]


def facts_and_question(row):
    facts, _, question = words_of(row).rpartition("\n")
    return facts, question


def picture_of(row):
    return row.messages[0]["content"][0]["image"]


@pytest.mark.parametrize("name", TWINS)
@pytest.mark.parametrize("split", ["train", "test"])
def test_rows_of_text_and_of_images_at_one_place_ask_the_same(name, split):
    task = get_task(name)
    texts, images = (
        list(task.generate(split=split, modality=modality, rows=12, seed=3)) for modality in ("text", "image")
    )
    for text, image in zip(texts, images, strict=True):
        assert (text.answer, text.solution) == (image.answer, image.solution)
        assert text.columns == image.columns
        assert facts_and_question(text)[1] == words_of(image)


@pytest.mark.parametrize("name", TASKS)
def test_each_task_has_five_difficulties_with_rows_of_their_own(name):
    rows = {
        tuple(
            words_of(row)
            for row in get_task(name).at_difficulty(level).generate(split="train", modality="text", rows=8, seed=0)
        )
        for level in LEVELS
    }
    assert len(rows) == 5


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"difficulty": 6}, "difficulty 6: it must be from 1 to 5"), ({"scale": 0}, "scale 0: it must be from 1 to 16")],
)
def test_a_wrong_setting_is_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        TwinTask(family=get_task("count").family, **settings)


@pytest.mark.parametrize(("name", "level"), CASES)
@pytest.mark.parametrize("split", ["train", "test"])
def test_without_the_picture_no_guess_is_more_than_five_points_above_chance(name, level, split):
    rows = make(name, level=level, split=split, rows=4000)
    learned, asked = rows[::2], rows[1::2]
    chance = sum(row.columns["chance"] for row in asked) / len(asked)
    constant = Counter(row.answer for row in learned).most_common(1)[0][0]

    def share(guess):
        return sum(guess(row) == row.answer for row in asked) / len(asked)

    assert share(lambda row: constant) <= chance + 0.05
    # The question as a whole, its words with their places, and its length.
    features = [lambda row: facts_and_question(row)[1], lambda row: len(facts_and_question(row)[1])]
    features += [
        lambda row, place=place: [*facts_and_question(row)[1].split(), *[""] * 30][place] for place in range(20)
    ]
    for feature in features:
        answers = defaultdict(Counter)
        for row in learned:
            answers[feature(row)][row.answer] += 1
        best = {value: counts.most_common(1)[0][0] for value, counts in answers.items()}
        assert share(lambda row, feature=feature, best=best: best.get(feature(row), constant)) <= chance + 0.05


@pytest.mark.parametrize(("name", "level"), CASES)
def test_all_answers_of_a_question_are_equally_frequent(name, level):
    groups = defaultdict(Counter)
    for row in make(name, level=level, rows=6000):
        groups[tuple(row.columns["factors"]), row.columns["chance"]][row.answer] += 1
    for (factors, chance), counts in groups.items():
        total = sum(counts.values())
        assert len(counts) <= round(1 / chance)
        expected, spread = total * chance, math.sqrt(total * chance * (1 - chance))
        assert all(count <= expected + 5 * spread + 3 for count in counts.values()), (factors, counts)
        # Where few are missing by chance, none is.
        if total * chance > 12:
            assert len(counts) == round(1 / chance), (factors, counts)


@pytest.mark.parametrize("name", TWINS)
def test_train_and_test_share_no_combination_of_factors_and_no_row(name):
    family = get_task(name).family
    train, test = held(family, "train"), held(family, "test")
    assert set(train) | set(test) == set(family.factors)
    assert not set(train) & set(test)
    assert len(test) == round(len(family.factors) / 5)
    assert set(itertools.chain(*test)) <= set(itertools.chain(*train))
    made = {split: {words_of(row) for row in make(name, split=split, rows=300)} for split in ("train", "test")}
    assert not made["train"] & made["test"]


def test_what_is_held_out_of_counting_appears_in_no_scene_of_the_training_rows():
    shown = {
        tuple(shape.split())
        for row in make("count", level=5, rows=2000)
        for shape in re.findall(r"\w+ (?:circle|square|triangle|diamond|cross|star)\b", facts_and_question(row)[0])
    }
    assert shown == set(held(get_task("count").family, "train"))


def wrong_responses(row, other):
    return [
        f"<think>{row.answer}.</think><answer>{other}</answer>",
        f"<think>so</think><answer>{row.answer} or {other}</answer>",
        row.solution.partition("</think>")[0],
    ]


def check_rewards(rows):
    answers = sorted({row.answer for row in rows})
    rng = random.Random(0)
    for row in rows:
        other = rng.choice([answer for answer in answers if answer != row.answer])
        scores = [
            MATH.score(Item(prompt="", response=response, label=row.answer)).score
            for response in [row.solution, *wrong_responses(row, other)]
        ]
        assert scores == [1.0, 0.0, 0.0, 0.0], (row, other)


@pytest.mark.parametrize("rows", [60, pytest.param(2000, marks=FULL)])
@pytest.mark.parametrize("name", TWINS)
def test_a_solution_earns_the_reward_and_wrong_answers_do_not(name, rows):
    for level in LEVELS:
        check_rewards(make(name, level=level, rows=rows))


@pytest.mark.parametrize("name", TWINS)
def test_the_same_seed_gives_the_same_pixels(name):
    for level in LEVELS:
        first, second, other = (make(name, "image", level=level, rows=4, seed=seed) for seed in (1, 1, 2))
        assert [picture_of(row).tobytes() for row in first] == [picture_of(row).tobytes() for row in second]
        assert [(row.messages[0]["content"][1], row.solution) for row in first] == [
            (row.messages[0]["content"][1], row.solution) for row in second
        ]
        assert [picture_of(row).tobytes() for row in first] != [picture_of(row).tobytes() for row in other]


@pytest.mark.parametrize("name", TWINS)
def test_one_picture_with_one_question_has_one_answer(name):
    for level in LEVELS:
        answers = defaultdict(set)
        for row in make(name, "image", level=level, rows=300):
            answers[picture_of(row).tobytes(), words_of(row)].add(row.answer)
        assert all(len(found) == 1 for found in answers.values())


@pytest.mark.parametrize("name", TWINS)
def test_pictures_are_small_multiples_of_28_pixels_and_larger_by_their_scale(name):
    (row,), (large,) = (make(name, "image", rows=1, scale=scale) for scale in (1, 2))
    width, height = picture_of(row).size
    assert width == height in (112, 140, 168, 196)
    assert picture_of(large).size == (2 * width, 2 * height)


# The answers, worked out from the words without the code of the families.


def numbers(text):
    return [int(number) for number in re.findall(r"\d+", text)]


def board_of(facts):
    cells = [re.findall(r"(?<=[:,] )(?:\w+ \w+|-)", line) for line in facts.splitlines()]
    return {
        (row, column): cell.split()
        for row, line in enumerate(cells)
        for column, cell in enumerate(line)
        if cell != "-"
    }


def counted(facts, question):
    colour, shape = re.fullmatch(r"How many (\w+) (\w+?)(?:(?<=cross)e)?s are there\?", question).groups()
    return str(list(board_of(facts).values()).count([colour, shape]))


def compared(facts, question):
    first, second = re.match(r"Are there more (\w+) or more (\w+)", question).groups()
    have = [f"{word}{end}" for cell in board_of(facts).values() for word in cell for end in ("", "s", "es")]
    difference = have.count(first) - have.count(second)
    return "equal" if difference == 0 else first if difference > 0 else second


def related(facts, question):
    board = board_of(facts)
    *steps, anchor = re.findall(r"left of|right of|above|below|circle|square|triangle|diamond|cross|star", question)
    (place,) = [cell for cell, (_, shape) in board.items() if shape == anchor]
    for step in reversed(steps):
        row, column = {"left of": (0, -1), "right of": (0, 1), "above": (-1, 0), "below": (1, 0)}[step]
        place = (place[0] + row, place[1] + column)
    return board[place][0]


def charted(facts, question):
    values = {letter: int(value) for letter, value in re.findall(r"([A-F]) (\d+)", facts)}
    assert "Pie" not in facts or sum(values.values()) == 12
    return str(eval(re.sub(r"[A-F]", lambda letter: str(values[letter[0]]), question[8:-1])))


def told_time(facts, question):
    hour, mark, *rest = numbers(facts)
    minutes = hour % 12 * 60 + mark % 12 * 5 + sum(rest) + sum(numbers(question))
    return f"{(minutes // 60 - 1) % 12 + 1}:{minutes % 60:02}"


def dated(facts, question):
    first = facts.splitlines()[1].split().index("1")
    if day := numbers(question):
        return WEEKDAYS[(first + day[0] - 1) % 7]
    nth, weekday = re.search(r"the (\w+) (\w+)\?", question).groups()
    days = [day for day in range(1, 32) if (first + day - 1) % 7 == WEEKDAYS.index(weekday)]
    return str(days[["first", "second", "third", "fourth"].index(nth)])


def paid(facts, question):
    more, coin = numbers(question)
    return str(sum(numbers(facts)) + more * coin)


def combined(facts, question):
    operation, group = re.fullmatch(r"What is the (\w+) of the (\w+)(?: dice)?\?", question).groups()
    values = [*map(int, re.findall(rf"{group} (\d+)", facts)), *map(int, re.findall(rf"(\d+) of {group}", facts))]
    return str({"sum": sum, "highest": max, "lowest": min, "range": np.ptp}[operation](values))


def walked(facts, question):
    lines = facts.splitlines()
    corner, colour = re.search(r"the (\w+ \w+) corner to (\w+)", question).groups()
    mark = "B" if colour == "black" else colour[0]
    start = (len(lines) - 2 if "bottom" in corner else 1, len(lines) - 2 if "right" in corner else 1)
    waiting, far = deque([start]), {start: 0}
    while waiting:
        row, column = waiting.popleft()
        if lines[row][column] == mark:
            return str(far[row, column] // 2)
        for beside in ((row + 1, column), (row - 1, column), (row, column + 1), (row, column - 1)):
            if lines[beside[0]][beside[1]] != "#" and beside not in far:
                far[beside] = far[row, column] + 1
                waiting.append(beside)
    raise AssertionError("no way")


def measured(facts, question):
    known = numbers(facts)
    if "perimeter" in question:
        return str(2 * sum(known))
    if "area" in question:
        return str(math.prod(known))
    whole = 360 if "quadrilateral" in question else 180
    return str((whole - sum(known)) // (2 if "base" in question else 1))


def evaluated(facts, question):
    formula = facts.removeprefix("f(x) = ").rstrip(".")
    formula = re.sub(r"\|(.*?)\|", r"abs(\1)", formula).replace("^", "**")
    formula = re.sub(r"(\d) if (.*), else", r"\1 if \2 else", re.sub(r"(\d)(?=[a(x])", r"\1*", formula))
    (x,) = numbers(question)
    for _ in range(question.count("f(")):
        x = eval(formula, {"x": x, "abs": abs})
    return str(x)


WORKED_OUT = {
    "bar_chart": charted,
    "calendar": dated,
    "cards": combined,
    "clock": told_time,
    "compare": compared,
    "count": counted,
    "dice": combined,
    "function_graph": evaluated,
    "geometry": measured,
    "line_chart": charted,
    "maze": walked,
    "money": paid,
    "pie_chart": charted,
    "relations": related,
}


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize(("name", "level"), CASES)
def test_each_answer_follows_from_the_words(name, level, split):
    for row in make(name, level=level, split=split, rows=150):
        assert WORKED_OUT[name](*facts_and_question(row)) == row.answer, words_of(row)


# What the pictures show.


def test_a_shape_has_its_colour_in_the_middle_of_its_cell_and_other_cells_are_empty():
    for colour, shape in itertools.product(COLOURS, SHAPES):
        pixels = np.asarray(draw({(1, 2): (colour, shape)}, 1).convert("RGB"))
        assert tuple(pixels[42, 70]) == COLOURS[colour]
        inside = np.zeros((112, 112), dtype=bool)
        inside[28:56, 56:84] = True
        assert (pixels[~inside] == BOARD).all()


def test_shapes_are_different_from_each_other():
    drawn = [np.asarray(draw({(0, 0): ("white", shape)}, 1).convert("RGB"))[:28, :28, 0] == 255 for shape in SHAPES]
    assert all((one != other).sum() >= 40 for one, other in itertools.combinations(drawn, 2))


def test_a_bar_is_ten_pixels_high_per_unit():
    for row in make("bar_chart", "image", level=1, rows=20):
        (text,) = [twin for twin in make("bar_chart", level=1, rows=20) if twin.solution == row.solution][:1]
        values = numbers(facts_and_question(text)[0])
        pixels = np.asarray(picture_of(row).convert("RGB"))
        columns = [(pixels == COLOURS[colour]).all(axis=2).sum(axis=0).max() for colour in ("red", "green")]
        assert columns == [10 * value for value in values]


def test_times_go_round_the_dial():
    assert [time_of(minutes) for minutes in (0, 5, 719, 720, 785)] == ["12:00", "12:05", "11:59", "12:00", "1:05"]


def test_a_shortest_path_takes_the_opening_that_is_nearest():
    # A ring of four cells, open all round: the opposite corner is two steps away.
    ring = [((0, 0), (0, 1)), ((0, 1), (1, 1)), ((1, 1), (1, 0))]
    paths = shortest_paths((0, 0), frozenset(map(frozenset, ring)))
    assert paths == {(0, 0): (), (0, 1): ("right",), (1, 1): ("right", "down"), (1, 0): ("right", "down", "left")}
    closed = shortest_paths((0, 0), frozenset(map(frozenset, [*ring, ((1, 0), (0, 0))])))
    assert closed[1, 0] == ("down",)
