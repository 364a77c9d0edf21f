import pytest
from helpers.tables import table
from helpers.verifier_scores import scored

from remote_rm.box_verifier import BoxVerifier
from remote_rm.verifier import Item, Score

pytestmark = pytest.mark.unit

ONE = "[0, 0, 10, 10]"
TWO = "[[0, 0, 10, 10], [20, 0, 30, 10]]"


def iou(answer: str, label: str, **settings) -> float:
    return scored("box", answer, label, **settings).parts["iou"]


@pytest.mark.parametrize(
    ("answer", "expected", "is_right"),
    table("remote_rm/box_verifier", "the_score_is_the_iou_and_the_accuracy_whether_it_reaches_the_threshold"),
)
def test_the_score_is_the_iou_and_the_accuracy_whether_it_reaches_the_threshold(answer, expected, is_right):
    score = scored("box", answer, ONE)
    parts = {"accuracy": is_right, "iou": expected, "format": 1.0, "ungradable": 0.0}
    assert score.parts == pytest.approx(parts)
    assert (score.score, score.reward) == pytest.approx((expected, expected + 0.5))


def test_the_threshold_is_a_setting():
    assert scored("box", "[0, 0, 10, 7]", ONE, iou_threshold=0.75).parts["accuracy"] == 0.0
    assert scored("box", "[0, 0, 10, 8]", ONE, iou_threshold=0.75).parts["accuracy"] == 1.0
    for threshold in (0.0, 1.1, float("nan")):
        with pytest.raises(ValueError, match="--iou-threshold must be above 0 and at most 1"):
            BoxVerifier(iou_threshold=threshold)


@pytest.mark.parametrize(
    ("answer", "expected", "is_right"),
    table("remote_rm/box_verifier", "several_boxes_are_matched_one_to_one"),
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
    assert iou(answer, gold) == pytest.approx((0.8 + 8 / 9) / 2)


def test_naming_many_boxes_to_hit_one_pays_nothing():
    many = ", ".join(f"[{left}, 0, {left + 10}, 10]" for left in range(0, 100, 10))
    assert iou(f"[{many}]", ONE) == pytest.approx(0.1)
    assert iou(f"{ONE} or [20, 20, 30, 30]", ONE) == 0.5
    crowd = ", ".join([ONE] * 101)
    assert iou(f"[{crowd}]", ONE) == 0.0


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


def test_a_box_in_the_thinking_is_no_answer():
    score = BoxVerifier().score(Item(prompt="p", response=f"<think>{ONE}</think><answer>?</answer>", label=ONE))
    assert (score.score, score.parts["format"]) == (0.0, 1.0)


def test_classes_count_where_they_are_asked_for():
    label = '[{"bbox_2d": [0, 0, 10, 10], "label": "cat"}, {"bbox_2d": [20, 0, 30, 10], "label": "dog"}]'
    swapped = label.replace("cat", "?").replace("dog", "Cat").replace("?", "dog")
    assert iou(swapped, label) == 1.0
    assert iou(swapped, label, match_labels=True) == 0.0
    assert iou(label.upper().replace("BBOX_2D", "bbox_2d").replace("LABEL", "label"), label, match_labels=True) == 1.0
    # A class that is left out is not the label's; one that the label does not name is free.
    assert iou(TWO, label, match_labels=True) == 0.0
    assert iou(label, TWO, match_labels=True) == 1.0


def test_boxes_by_width_and_height():
    assert iou("[20, 0, 10, 10]", "[20, 0, 10, 10]", xywh=True) == 1.0
    # Read as corners, they are no boxes.
    assert scored("box", "[20, 0, 10, 10]", "[20, 0, 10, 10]").parts["ungradable"] == 1.0


def test_many_boxes_are_left_to_a_worker():
    boxes = ", ".join(f"[{left}, 0, {left + 1}, 1]" for left in range(17))
    item = Item(prompt="p", response=f"<answer>{boxes}</answer>", label=boxes)
    assert BoxVerifier().quick_score(item) is None
    assert BoxVerifier().score(item).parts["iou"] == 1.0


def scaled(answer: str, label: str, *scales: tuple[float, float], **settings) -> Score:
    response = f"<think>t</think><answer>{answer}</answer>"
    return BoxVerifier(**settings).score(Item(prompt="p", response=response, label=label, image_scales=scales))


def test_what_a_model_writes_is_scaled_to_pixels_of_the_stored_image():
    # Shown with half the width and a quarter of the height.
    assert scaled("[5, 5, 10, 10]", "[10, 20, 20, 40]", (2, 4)).score == 1.0
    # [10, 20, 20, 30] has half of the label's box.
    assert scaled("[5, 5, 10, 7.5]", "[10, 20, 20, 40]", (2, 4)).score == 0.5
    assert scaled("[5, 5, 5, 5]", "[10, 20, 20, 40]", (2, 4), xywh=True).score == pytest.approx(10 * 20 / (20 * 40))
    assert scaled("[10, 20, 20, 40]", "[10, 20, 20, 40]", (2, 4)).score == 0.0


def test_labels_in_the_models_own_coordinates_or_in_shares_are_met_by_what_is_written():
    assert scaled("[10, 20, 20, 40]", "[10, 20, 20, 40]", (2, 4), unscaled=True).score == 1.0
    assert scaled("[0.1, 0.2, 0.2, 0.4]", "[0.1, 0.2, 0.2, 0.4]", (2, 4)).score == 1.0
    assert scaled("[]", "[]", (2, 4), (1, 1)).score == 1.0


def test_an_answer_about_one_of_several_images_is_judged_where_they_are_scaled_alike():
    assert scaled("[5, 5, 10, 10]", "[10, 20, 20, 40]", (2, 4), (2, 4)).score == 1.0
    several = scaled("[5, 5, 10, 10]", "[10, 20, 20, 40]", (2, 4), (3, 4))
    assert (several.score, several.parts["ungradable"]) == (0.0, 1.0)
