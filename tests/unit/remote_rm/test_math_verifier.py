import pickle

import pytest

from remote_rm.math_verifier import MathVerifier, Weights, build_parser, quick_score, score
from remote_rm.verifier import Item

pytestmark = pytest.mark.unit

RIGHT = "<think>6 * 7</think><answer>42</answer>"


@pytest.mark.parametrize(
    ("response", "reward", "parts"),
    [
        (RIGHT, 1.5, {"accuracy": 1.0, "format": 1.0}),
        ("<think>6 * 7</think><answer>41</answer>", 0.5, {"accuracy": 0.0, "format": 1.0}),
        (r"It is \boxed{42}", 1.0, {"accuracy": 1.0, "format": 0.0}),
        ("no idea", 0.0, {"accuracy": 0.0, "format": 0.0}),
        (r"<think>\boxed{42}</think><answer>7</answer>", 0.5, {"accuracy": 0.0, "format": 1.0}),
        ("", 0.0, {"accuracy": 0.0, "format": 0.0}),
    ],
)
def test_the_reward_is_accuracy_plus_half_the_format(response, reward, parts):
    for judged in (score(response, "42"), quick_score(response, "42")):
        assert judged.reward == reward
        assert judged.score == parts["accuracy"]
        assert judged.parts == {**parts, "ungradable": 0.0}


def test_the_weights_are_settable():
    assert score(RIGHT, "42", weights=Weights(accuracy=2.0, format=0.25)).reward == 2.25


@pytest.mark.parametrize("label", ["42", "1, 3, 5", r"\frac{1}{2}", "B", "north", "x = 5", "[1, 2)", "12 cm"])
def test_the_gold_answer_itself_scores_full_marks(label):
    assert score(f"<think>t</think><answer>{label}</answer>", label).reward == 1.5


def test_quick_score_leaves_expressions_to_sympy():
    assert quick_score(r"<answer>\sqrt[3]{16}</answer>", r"2\sqrt[3]{2}") is None
    assert score(r"<answer>\sqrt[3]{16}</answer>", r"2\sqrt[3]{2}").score == 1.0


def test_quick_score_works_out_square_roots_and_polynomials():
    assert quick_score(r"<answer>\sqrt{8}</answer>", r"2\sqrt{2}") == score(r"<answer>\sqrt{8}</answer>", r"2\sqrt{2}")
    assert quick_score(r"<answer>\sqrt{8}</answer>", r"2\sqrt{2}").score == 1.0
    assert quick_score("<answer>(x+1)^2</answer>", "x^2+2x+2").score == 0.0


def test_an_empty_label_is_an_error_and_no_score():
    with pytest.raises(ValueError, match="gold answer is empty"):
        score(RIGHT, "")


def test_a_label_that_cannot_be_read_is_reported_as_ungradable_and_never_scores():
    for judged in (score(r"<answer>\frac{</answer>", r"\frac{"), quick_score(r"<answer>\frac{</answer>", r"\frac{")):
        assert (judged.reward, judged.parts) == (0.0, {"accuracy": 0.0, "format": 0.0, "ungradable": 1.0})


def test_a_failed_item_keeps_its_format():
    item = Item(prompt="p", response=RIGHT, label="42")
    failed = MathVerifier().failed_score(item)
    assert (failed.reward, failed.parts) == (0.5, {"accuracy": 0.0, "format": 1.0, "ungradable": 0.0})


def test_the_verifier_survives_pickle():
    verifier = MathVerifier(weights=Weights(accuracy=3.0))
    assert pickle.loads(pickle.dumps(verifier)) == verifier


@pytest.mark.parametrize(
    "argv", [["--port", "70000"], ["--workers", "0"], ["--item-timeout-seconds", "-1"], ["--wrokers", "2"]]
)
def test_a_bad_flag_ends_with_exit_code_2(argv, capsys):
    with pytest.raises(SystemExit) as stopped:
        build_parser().parse_args(argv)
    assert stopped.value.code == 2
    assert argv[0] in capsys.readouterr().err
