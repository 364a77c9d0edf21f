"""What every registered verifier keeps to: in-process, over HTTP, and as OpenRLHF's reward_func file."""

import json
import pickle
import re

import pytest
from fastapi.testclient import TestClient
from helpers.verifiers import label as any_label
from helpers.verifiers import response as any_response
from hypothesis import given, settings

from remote_rm.answer_verifier import Weights
from remote_rm.composition import Composition, part_from
from remote_rm.llm_judge_verifier import PARTS, LlmJudge
from remote_rm.registry import VERIFIERS, get_verifier
from remote_rm.reward_function import reward_func_of
from remote_rm.service.app import create_app
from remote_rm.service.pool import QUICK_CHARS
from remote_rm.verifier import Item, Verifier

SELECTING = Composition(select=(part_from("choice"), part_from("math=2")), parts=(part_from("format=0.25"),))
# Nobody listens there: what the rule does not take for right, it judges alone.
UNREACHABLE = LlmJudge(judge_url="http://127.0.0.1:9/v1", judge_model="m")
HALF_SOFT = get_verifier("vqa", weights=Weights(accuracy=0.5), soft_weight=0.5)
CAT = '[{"bbox_2d": [10, 20, 30, 40], "label": "cat"}]'
BOX_PARTS = {"accuracy", "iou", "format", "ungradable"}
ANLS_PARTS = {"accuracy", "anls", "format", "ungradable"}
VQA_PARTS = {"accuracy", "vqa", "soft", "format", "ungradable"}

# name -> (a verifier, a label, the answer it wants, a wrong answer, the full reward, the parts of a score)
CASES: dict[str, tuple[Verifier, str, str, str, float, set[str]]] = {
    "math": (get_verifier("math"), r"\frac{1}{2}", "0.5", "0.6", 1.5, {"accuracy", "format", "ungradable"}),
    "choice": (get_verifier("choice"), "B", "B", "C", 1.5, {"accuracy", "format", "ungradable"}),
    "number": (get_verifier("number"), "3.14", "3.14", "3.15", 1.5, {"accuracy", "format", "ungradable"}),
    "exact": (get_verifier("exact"), "Rye, NY", "Rye, NY", "rye, NY", 1.5, {"accuracy", "format"}),
    "list": (get_verifier("list"), "1, 3, 5", "1, 3, 5", "5, 3, 1", 1.5, {"accuracy", "format", "ungradable"}),
    "box": (get_verifier("box"), "[10, 20, 30, 40]", "[10, 20, 30, 40]", "[60, 60, 80, 80]", 1.5, BOX_PARTS),
    "edit_distance": (get_verifier("edit_distance"), '["Rye, NY", "NY"]', "rye,  NY", "Boston", 1.5, ANLS_PARTS),
    "vqa": (get_verifier("vqa"), json.dumps(["net"] * 4 + ["mesh"] * 6), "a net", "dog", 1.5, VQA_PARTS),
    "sokoban": (
        get_verifier("sokoban"),
        "#####\n#@$.#\n#####",
        "Right",
        "Left",
        1.5,
        {"accuracy", "format", "ungradable"},
    ),
    "format": (get_verifier("format"), "any", "any", "", 1.0, {"format"}),
    "llm_judge": (UNREACHABLE, r"\frac{1}{2}", "0.5", "0.6", 1.5, {"accuracy", "format", *PARTS}),
    "composition": (get_verifier("composition"), "42", "42", "43", 1.5, {"accuracy", "math", "format", "ungradable"}),
    "selecting composition": (SELECTING, "choice: B", "B", "C", 1.25, {"accuracy", "format", "ungradable"}),
    "ignoring case": (get_verifier("exact", ignore_case=True), "Rye", "RYE", "Ray", 1.5, {"accuracy", "format"}),
    "unordered list": (
        get_verifier("list", unordered=True),
        "1, 3, 5",
        "5, 3, 1",
        "5, 3, 3",
        1.5,
        {"accuracy", "format", "ungradable"},
    ),
    "no box": (get_verifier("box"), "[]", "[]", "[10, 20, 30, 40]", 1.5, BOX_PARTS),
    "class of a box": (get_verifier("box", match_labels=True), CAT, CAT, CAT.replace("cat", "dog"), 1.5, BOX_PARTS),
    "soft vqa": (HALF_SOFT, json.dumps(["net"] * 10), "the net", "dog", 1.5, VQA_PARTS),
}
REGISTERED = pytest.mark.parametrize("name", VERIFIERS)
EVERY = pytest.mark.parametrize("case", CASES)

JUNK = (
    "",
    "\0",
    "\ud800",
    "<think>",
    "</think></answer><answer>",
    "<answer>",
    r"<answer>\boxed{</answer>",
    "<answer>" + "{" * 10_000 + "</answer>",
    "<answer>" + "(" * 900 + "</answer>",
    "<answer>,;,;,</answer>",
    "<answer>$$</answer>",
    "<answer>9^{9^{9^9}}</answer>",
    "<answer>" + "9" * 990 + "</answer>",
    "<answer>A or B or 41 or 42</answer>",
    "<answer>1/0, 1e999, 1/0</answer>",
    "<answer>" + "٣ ½ ² ﷺ " * 100 + "</answer>",
    "<answer>" + "a, " * 330 + "</answer>",
)


def formatted(answer: str) -> str:
    return f"<think>so</think><answer>{answer}</answer>"


def wrong_response(case: str) -> str:
    """A response that scores 0: for the format, one without blocks."""
    return "no blocks here" if case == "format" else f"<answer>{CASES[case][3]}</answer>"


def item(response: str, label: str) -> Item:
    return Item(prompt="p", response=response, label=label)


@REGISTERED
def test_every_registered_verifier_is_covered_here_and_goes_by_its_name(name):
    assert CASES[name][0].name == get_verifier(name).name == name


@EVERY
def test_the_gold_answer_scores_full_and_a_wrong_one_nothing(case):
    verifier, label, right, _, full, _ = CASES[case]
    scored = verifier.score(item(formatted(right), label))
    assert (scored.reward, scored.score) == (full, 1.0)
    missed = verifier.score(item(wrong_response(case), label))
    assert (missed.reward, missed.score) == (0.0, 0.0)


@EVERY
@pytest.mark.parametrize("label", ["", " \n\t", "\u2003"])
def test_an_empty_label_is_refused_everywhere(case, label):
    verifier = CASES[case][0]
    for refusing in (
        lambda: verifier.check_label(label),
        lambda: verifier.score(item("x", label)),
        lambda: verifier.quick_score(item("x", label)),
    ):
        with pytest.raises(ValueError, match=r"empty|names no verifier"):
            refusing()


@EVERY
@pytest.mark.parametrize("junk", JUNK, ids=range(len(JUNK)))
def test_junk_never_raises_and_never_scores(case, junk):
    verifier, label, *_, parts = CASES[case]
    quick, failed = verifier.quick_score(item(junk, label)), verifier.failed_score(item(junk, label))
    assert quick is None or (set(quick.parts), quick.parts.get("accuracy", 0.0)) == (parts, 0.0)
    assert set(failed.parts) == parts


@EVERY
def test_any_text_is_judged_within_a_second_or_left_to_a_worker(case):
    verifier, *_, parts = CASES[case]

    @settings(max_examples=60, deadline=1000, derandomize=True, database=None)
    @given(response=any_response, label=any_label)
    def judge(response: str, label: str) -> None:
        # The server sends longer texts to a worker.
        judged = item(response[:QUICK_CHARS], label)
        try:
            verifier.check_label(label)
        except ValueError:
            return
        quick = verifier.quick_score(judged)
        assert quick is None or set(quick.parts) == parts

    judge()


@EVERY
@pytest.mark.parametrize("label", [text for text in JUNK if text.strip()], ids=range(len(JUNK) - 1))
def test_a_junk_label_is_refused_or_never_breaks_a_score(case, label):
    verifier, *_, parts = CASES[case]
    assert set(verifier.failed_score(item(formatted("42"), label)).parts) == parts
    try:
        verifier.check_label(label)
    except ValueError:
        return
    quick = verifier.quick_score(item(formatted("42"), label))
    assert quick is None or quick.parts.get("accuracy", 0.0) == 0.0


@EVERY
def test_what_is_decided_quickly_is_what_the_full_judgement_says(case):
    verifier, label, right, wrong, *_ = CASES[case]
    answers = [right, wrong, label, "", "42", "41", "B", "(b)", "A or B", "0.5", "1, 3, 5", "x = 42", "3.14159", "Rye"]
    decided = 0
    for response in [text for answer in answers for text in (formatted(answer), answer, rf"So \boxed{{{answer}}}.")]:
        quick = verifier.quick_score(item(response, label))
        if quick is not None:
            decided += 1
            assert quick == verifier.score(item(response, label)), response
    assert decided >= 30


@EVERY
def test_a_failed_item_keeps_its_format_and_gets_no_accuracy(case):
    verifier, label, right, *_, parts = CASES[case]
    failed = verifier.failed_score(item(formatted(right), label))
    assert set(failed.parts) == parts
    assert failed.parts["format"] == 1.0
    assert failed.parts.get("accuracy", 0.0) == 0.0
    assert failed.reward == {"format": 1.0, "selecting composition": 0.25}.get(case, 0.5)


@EVERY
def test_a_verifier_survives_pickle(case):
    verifier, label, right, _, full, _ = CASES[case]
    copy = pickle.loads(pickle.dumps(verifier))
    assert copy == verifier
    assert copy.score(item(formatted(right), label)).reward == full


@pytest.mark.parametrize("case", [case for case in CASES if case != "llm_judge"])
def test_the_application_serves_it(case):
    verifier, label, right, _, full, parts = CASES[case]
    # Not entered as a context: no worker starts, and what is posted here is decided without one.
    client = TestClient(create_app(verifier, workers=1, item_timeout_seconds=1.0))
    request = {
        "query": ["q", "q"],
        "prompts": ["p", "p"],
        "labels": [label, label],
        "responses": [formatted(right), wrong_response(case)],
    }
    reply = client.post("/get_reward", json=request).json()
    assert (reply["rewards"], reply["scores"]) == ([full, 0.0], [1.0, 0.0])
    assert parts <= set(reply["extra_logs"])
    assert {len(values) for values in reply["extra_logs"].values()} == {2}
    refused = client.post("/get_reward", json=request | {"labels": [label, ""]})
    assert refused.status_code == 422
    assert "labels[1]" in refused.text


@pytest.mark.parametrize("name", [name for name in VERIFIERS if name != "llm_judge"])
def test_it_is_a_reward_function(name):
    _, label, right, _, full, parts = CASES[name]
    reward_func = reward_func_of(name)
    query = f"<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n{formatted(right)}<|im_end|>"
    reply = reward_func([query, f"p{wrong_response(name)}"], ["p", "p"], [label, label])
    assert (reply["rewards"], reply["scores"]) == ([full, 0.0], [1.0, 0.0])
    assert set(reply["extra_logs"]) == parts | {"timed_out"}
    with pytest.raises(ValueError, match=re.escape("labels[0]")):
        reward_func([query], ["p"], [""])
