"""Bounding boxes: how they are written, matched and scored."""

import time

import pytest
from helpers.tables import frozen, table
from helpers.verifiers import scored
from hypothesis import given, settings
from hypothesis import strategies as st

from remote_rm.answer_verifier import is_matchable
from remote_rm.box_verifier import Box, BoxVerifier, best_pairs, boxes_in, iou, same_class
from remote_rm.verifier import Item, Score

CORNERS = (10.0, 20.0, 30.0, 40.0)


def box(*corners: float, label: str | None = None) -> Box:
    return Box(corners=corners, label=label)


@pytest.mark.parametrize("text", table("remote_rm/answers/boxes", "the_ways_to_write_a_box"))
def test_the_ways_to_write_a_box(text):
    assert boxes_in(text) == [box(*CORNERS)]


@pytest.mark.parametrize(
    "text",
    [
        '[{"bbox_2d": [10, 20, 30, 40], "label": "the cat"}]',
        '```json\n[\n\t{"bbox_2d": [10, 20, 30, 40], "label": "the cat"}\n]\n```',
        '{"label": "the cat", "bbox": [10, 20, 30, 40]}',
        "{'bbox_2d': [10, 20, 30, 40], 'label': 'the cat'}",
        '{bbox_2d: [10, 20, 30, 40], label: "the cat"}',
        "<|object_ref_start|>the cat<|object_ref_end|><|box_start|>(10,20),(30,40)<|box_end|>",
    ],
)
def test_the_ways_to_name_its_class(text):
    assert boxes_in(text) == [box(*CORNERS, label="the cat")]


def test_several_boxes_in_their_order():
    text = '[{"bbox_2d": [0, 0, 1, 1], "label": "a"},\n {"bbox_2d": [1, 1, 2, 2], "label": "b"}, [2, 2, 3, 3]]'
    assert boxes_in(text) == [box(0, 0, 1, 1, label="a"), box(1, 1, 2, 2, label="b"), box(2, 2, 3, 3)]
    pair = "<|box_start|>(0,0),(1,1)<|box_end|><|box_start|>(1,1),(2,2)<|box_end|>"
    assert boxes_in(f"<|object_ref_start|>dogs<|object_ref_end|>{pair}") == [
        box(0, 0, 1, 1, label="dogs"),
        box(1, 1, 2, 2, label="dogs"),
    ]
    # Whichever key a reader would take: both are said.
    assert boxes_in('{"bbox": [0, 0, 1, 1], "bbox_2d": [1, 1, 2, 2]}') == [box(1, 1, 2, 2), box(0, 0, 1, 1)]


@pytest.mark.parametrize("text", ["[]", " [ ] ", "```json\n[]\n```", "[\n]"])
def test_an_empty_list_says_that_there_is_none(text):
    assert boxes_in(text) == []


@pytest.mark.parametrize(
    "text",
    ["", "none", "[], or not", "[][]", "{}", "[[]]", "no box: []", "[1, 2]", "[1, 2, 3]", "[1, 2, 3, 4, 5]", "[a, b, c, d]"]
    + ["(1, 2), (3)", "1, 2, 3, 4", "[1, 2, 3, 4", "[1, 2, 3, 4] " * 2000],
)  # fmt: skip
def test_nothing_is_said_by_anything_else(text):
    assert boxes_in(text) is None


@pytest.mark.parametrize(
    "text",
    [
        "[nan, 20, 30, 40]",
        "[10, 20, inf, 40]",
        "[10, 20, 30, 1e999]",
        "[-1, 20, 30, 40]",
        "[30, 20, 10, 40]",
        "[10, 40, 30, 20]",
        "[10, 20, 10, 40]",
        "[10, 20, 30, 20]",
        "[0, 0, 1e-200, 1e-200]",
        "[0, 0, 2000000, 10]",
        f"[0, 0, {'9' * 150}, 10]",
        '{"bbox_2d": [NaN, 20, 30, 40]}',
        '{"bbox_2d": [10, 20, Infinity, 40]}',
        '{"bbox_2d": [10, 20, 1e999, 40]}',
        f'{{"bbox_2d": [0, 0, {"9" * 900}, 10]}}',
        '{"bbox_2d": [10, 20, 30]}',
        '{"bbox_2d": [10, 20, 30, 40, 50]}',
        '{"bbox_2d": ["10", "20", "30", "40"]}',
        '{"bbox_2d": [true, 20, 30, 40]}',
        '{"bbox_2d": null}',
        '{"bbox_2d": "the left half"}',
        "(30,40),(10,20)",
    ],
)
def test_a_box_that_no_image_can_have_is_one_without_corners(text):
    assert boxes_in(text) == [Box(corners=None)]


def test_a_crowd_is_no_answer():
    assert boxes_in("[10, 20, 30, 40] " * 100) == [box(*CORNERS)] * 100
    assert boxes_in("[10, 20, 30, 40] " * 101) is None
    assert boxes_in(f'{{"bbox_2d": [{"[1, 2, 3, 4], " * 100}[1, 2, 3, 4]]}}') is None


def test_width_and_height():
    assert boxes_in("[10, 20, 20, 20]", xywh=True) == [box(*CORNERS)]
    assert boxes_in('{"bbox": [10, 20, 20, 20]}', xywh=True) == [box(*CORNERS)]
    assert boxes_in("[10, 20, 0, 20]", xywh=True) == [Box(corners=None)]
    assert boxes_in("(10,20),(30,40)", xywh=True) == [box(*CORNERS)]


@pytest.mark.parametrize(
    ("one", "other", "expected"), frozen("remote_rm/answers/boxes", "the_intersection_over_the_union")
)
def test_the_intersection_over_the_union(one, other, expected):
    assert iou(box(*one), box(*other)) == pytest.approx(expected)
    assert iou(box(*other), box(*one)) == pytest.approx(expected)


def test_a_class_is_the_same_whatever_its_case_and_spaces():
    assert same_class("Traffic  Light ", "traffic light")
    assert not same_class("light", "traffic light")
    assert not same_class(None, "cat")


@pytest.mark.parametrize(
    "piece", ["{", "[", "(", "(1,2)   ", "{a", "[1,", "(1,2),", '{"label":', "<|object_ref_start|>", "\\"]
)
def test_endless_repetition_is_read_in_linear_time(piece):
    started = time.process_time()
    boxes_in((piece * 20_000)[:20_000])
    assert time.process_time() - started < 0.5


generated = settings(max_examples=150, deadline=None, derandomize=True, database=None)

tables = st.tuples(st.integers(1, 6), st.integers(1, 6)).flatmap(
    lambda shape: st.lists(
        st.lists(st.integers(0, 8).map(lambda eighths: eighths / 8), min_size=shape[1], max_size=shape[1]),
        min_size=shape[0],
        max_size=shape[0],
    )
)


@pytest.mark.parametrize(
    ("weights", "pairs"),
    [
        ([], []),
        ([[]], []),
        ([[0.3]], [(0, 0)]),
        # The largest entry first would leave 0.9 + 0.1.
        ([[0.9, 0.8], [0.8, 0.1]], [(0, 1), (1, 0)]),
        ([[0.1, 0.5, 0.4]], [(0, 1)]),
        ([[0.1], [0.5], [0.4]], [(1, 0)]),
        # Each of the three prefers the first column; 0.7 + 0.6 + 0.5 is the most.
        ([[0.9, 0.7, 0.1], [0.9, 0.5, 0.6], [0.5, 0.1, 0.1]], [(0, 1), (1, 2), (2, 0)]),
    ],
)
def test_the_pairs_of_the_largest_sum(weights, pairs):
    assert best_pairs(weights) == pairs


@generated
@given(weights=tables)
def test_the_sum_is_what_scipy_finds(weights: list[list[float]]):
    from scipy.optimize import linear_sum_assignment

    pairs = best_pairs(weights)
    rows, columns = [row for row, _ in pairs], [column for _, column in pairs]
    assert rows == sorted(set(rows))
    assert len(set(columns)) == len(columns) == min(len(weights), len(weights[0]))
    theirs = zip(*linear_sum_assignment(weights, maximize=True), strict=True)
    # Eighths are exact.
    assert sum(weights[row][column] for row, column in pairs) == sum(weights[row][column] for row, column in theirs)


@pytest.mark.parametrize(
    ("fitting", "fits"),
    [
        ([], True),
        ([[True]], True),
        ([[False]], False),
        ([[True, True], [True, False]], True),
        ([[True, False], [True, False]], False),
    ],
)
def test_every_row_needs_a_column_of_its_own(fitting, fits):
    assert is_matchable(fitting) is fits


ONE = "[0, 0, 10, 10]"
TWO = "[[0, 0, 10, 10], [20, 0, 30, 10]]"


def measured(answer: str, label: str, **settings) -> float:
    return scored("box", answer, label, **settings).parts["iou"]


@pytest.mark.parametrize(
    ("answer", "expected", "is_right"),
    table("remote_rm/box_verifier", "the_score_is_the_iou_and_the_accuracy_whether_it_reaches_the_threshold"),
)
def test_the_score_is_the_iou_and_the_accuracy_whether_it_reaches_the_threshold(answer, expected, is_right):
    score = scored("box", answer, ONE)
    kept = float(bool(answer))
    parts = {"accuracy": is_right, "iou": expected, "format": kept, "ungradable": 0.0}
    assert score.parts == pytest.approx(parts)
    assert (score.score, score.reward) == pytest.approx((expected, expected + 0.5 * kept))


def test_the_threshold_is_a_setting():
    assert scored("box", "[0, 0, 10, 7]", ONE, iou_threshold=0.75).parts["accuracy"] == 0.0
    assert scored("box", "[0, 0, 10, 8]", ONE, iou_threshold=0.75).parts["accuracy"] == 1.0
    for threshold in (0.0, 1.1, float("nan")):
        with pytest.raises(ValueError, match="--iou-threshold must be above 0 and at most 1"):
            BoxVerifier(iou_threshold=threshold)


@pytest.mark.parametrize(
    ("answer", "expected", "is_right"), table("remote_rm/box_verifier", "several_boxes_are_matched_one_to_one")
)
def test_several_boxes_are_matched_one_to_one(answer, expected, is_right):
    score = scored("box", answer, TWO)
    assert score.parts["iou"] == pytest.approx(expected)
    assert score.parts["accuracy"] == is_right


def test_the_matching_has_the_largest_sum():
    # The second box of the answer is the best for both golds: taken by the first one, 0.9 + 0.6 would be the sum.
    gold = "[[0, 0, 10, 10], [0, 0, 10, 8]]"
    answer = "[[0, 2, 10, 10], [0, 0, 10, 9]]"
    # First gold with first box 80/100, second gold with second box 80/90.
    assert measured(answer, gold) == pytest.approx((0.8 + 8 / 9) / 2)


def test_naming_many_boxes_to_hit_one_pays_nothing():
    many = ", ".join(f"[{left}, 0, {left + 10}, 10]" for left in range(0, 100, 10))
    assert measured(f"[{many}]", ONE) == pytest.approx(0.1)
    assert measured(f"{ONE} or [20, 20, 30, 30]", ONE) == 0.5
    crowd = ", ".join([ONE] * 101)
    assert measured(f"[{crowd}]", ONE) == 0.0


def test_an_empty_label_list_is_met_by_an_empty_list_alone():
    assert scored("box", "[]", "[]").parts == {"accuracy": 1.0, "iou": 1.0, "format": 1.0, "ungradable": 0.0}
    for answer in ("", "none", "ok", "no box", "{}", "[[]]", ONE, "[nan, 0, 1, 1]", '{"bbox_2d": null}'):
        assert scored("box", answer, "[]").score == 0.0, answer
    for response in ("", "<think>[]</think>", "<answer></answer>", "<think>t</think>"):
        score = BoxVerifier().score(Item(prompt="p", response=response, label="[]"))
        assert (score.reward, score.score) == (0.0, 0.0), response


@pytest.mark.parametrize(
    "response",
    [
        "<think>Maybe [20, 20, 30, 30].</think>\n[0, 0, 10, 10]",
        "<think>t</think>The box is [0, 0, 10, 10].",
        "<think>t</think>\n```json\n[\n\t{\"bbox_2d\": [0, 0, 10, 10], \"label\": \"cat\"}\n]\n```",
        r"So it is \boxed{[0, 0, 10, 10]}.",
        "<think>t</think><grounding>{\"bbox_2d\": [1, 2, 3, 4]}</grounding> <answer>[0, 0, 10, 10]</answer>",
        "<|object_ref_start|>cat<|object_ref_end|><|box_start|>(0,0),(10,10)<|box_end|>",
    ],
)  # fmt: skip
def test_where_the_boxes_of_a_response_are_looked_for(response):
    assert BoxVerifier().score(Item(prompt="p", response=response, label=ONE)).score == 1.0


def test_classes_count_where_they_are_asked_for():
    label = '[{"bbox_2d": [0, 0, 10, 10], "label": "cat"}, {"bbox_2d": [20, 0, 30, 10], "label": "dog"}]'
    swapped = label.replace("cat", "?").replace("dog", "Cat").replace("?", "dog")
    assert measured(swapped, label) == 1.0
    assert measured(swapped, label, match_labels=True) == 0.0
    assert (
        measured(label.upper().replace("BBOX_2D", "bbox_2d").replace("LABEL", "label"), label, match_labels=True)
        == 1.0
    )
    # A class that is left out is not the label's; one that the label does not name is free.
    assert measured(TWO, label, match_labels=True) == 0.0
    assert measured(label, TWO, match_labels=True) == 1.0


def test_boxes_by_width_and_height():
    assert measured("[20, 0, 10, 10]", "[20, 0, 10, 10]", xywh=True) == 1.0
    # Read as corners, they are no boxes.
    assert scored("box", "[20, 0, 10, 10]", "[20, 0, 10, 10]").parts["ungradable"] == 1.0


def test_many_boxes_are_left_to_a_worker():
    boxes = ", ".join(f"[{left}, 0, {left + 1}, 1]" for left in range(17))
    item = Item(prompt="p", response=f"<answer>{boxes}</answer>", label=boxes)
    assert BoxVerifier().quick_score(item) is None
    assert BoxVerifier().score(item).parts["iou"] == 1.0


def scored_at_scale(answer: str, label: str, *scales: tuple[float, float], **settings) -> Score:
    response = f"<think>t</think><answer>{answer}</answer>"
    return BoxVerifier(**settings).score(Item(prompt="p", response=response, label=label, image_scales=scales))


def test_what_a_model_writes_is_scaled_to_pixels_of_the_stored_image():
    # Shown with half the width and a quarter of the height.
    assert scored_at_scale("[5, 5, 10, 10]", "[10, 20, 20, 40]", (2, 4)).score == 1.0
    # [10, 20, 20, 30] has half of the label's box.
    assert scored_at_scale("[5, 5, 10, 7.5]", "[10, 20, 20, 40]", (2, 4)).score == 0.5
    assert scored_at_scale("[5, 5, 5, 5]", "[10, 20, 20, 40]", (2, 4), xywh=True).score == pytest.approx(
        10 * 20 / (20 * 40)
    )
    assert scored_at_scale("[10, 20, 20, 40]", "[10, 20, 20, 40]", (2, 4)).score == 0.0


def test_labels_in_the_models_own_coordinates_or_in_shares_are_met_by_what_is_written():
    assert scored_at_scale("[10, 20, 20, 40]", "[10, 20, 20, 40]", (2, 4), unscaled=True).score == 1.0
    assert scored_at_scale("[0.1, 0.2, 0.2, 0.4]", "[0.1, 0.2, 0.2, 0.4]", (2, 4)).score == 1.0
    assert scored_at_scale("[]", "[]", (2, 4), (1, 1)).score == 1.0


def test_an_answer_about_one_of_several_images_is_judged_where_they_are_scaled_alike():
    assert scored_at_scale("[5, 5, 10, 10]", "[10, 20, 20, 40]", (2, 4), (2, 4)).score == 1.0
    several = scored_at_scale("[5, 5, 10, 10]", "[10, 20, 20, 40]", (2, 4), (3, 4))
    assert (several.score, several.parts["ungradable"]) == (0.0, 1.0)
