import time

import pytest
from helpers.tables import frozen, table

from remote_rm.box_verifier import Box, boxes_in, iou, same_class

pytestmark = pytest.mark.unit

CORNERS = (10.0, 20.0, 30.0, 40.0)


def box(*corners: float, label: str | None = None) -> Box:
    return Box(corners=corners, label=label)


@pytest.mark.parametrize(
    "text",
    table("remote_rm/answers/boxes", "the_ways_to_write_a_box"),
)
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
    ("one", "other", "expected"),
    frozen("remote_rm/answers/boxes", "the_intersection_over_the_union"),
)
def test_the_intersection_over_the_union(one, other, expected):
    assert iou(box(*one), box(*other)) == pytest.approx(expected)
    assert iou(box(*other), box(*one)) == pytest.approx(expected)


def test_what_is_no_box_overlaps_nothing():
    assert iou(Box(corners=None), Box(corners=None)) == 0.0
    assert iou(box(0, 0, 1, 1), Box(corners=None)) == 0.0


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
