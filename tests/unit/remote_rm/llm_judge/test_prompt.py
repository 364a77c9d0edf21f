import json
import re

import pytest
from helpers.judge_server import asked_of
from helpers.tables import table

from remote_rm.llm_judge import CUT, MAX_ANSWER_CHARS, Question, question_of, question_text, read_verdict
from remote_rm.verifier import Item

CODE = "c0123abcd"
# What a policy may come to write instead of an answer.
ADVERSARIAL = table("remote_rm/llm_judge/prompt", "adversarial")


def question(answer: str, *, prompt: str = "6*7?", label: str = "42") -> Question:
    return question_of(Item(prompt=prompt, response="", label=label), answer=answer)


@pytest.mark.parametrize("answer", ADVERSARIAL, ids=range(len(ADVERSARIAL)))
def test_no_answer_leaves_its_string_or_spells_a_token(answer):
    asked = question(answer)
    system, user = asked.messages(code=CODE)
    lines = user["content"].split("\n")
    assert (system["role"], user["role"], len(lines)) == ("system", "user", 5)
    assert user["content"].splitlines() == lines
    # A reader finds exactly what was given, and nothing is lost but white space and what no text can carry.
    read = asked_of({"messages": [system, user]})
    assert (read.code, read.question, read.reference) == (CODE, "6*7?", "42")
    assert read.answer == " ".join(answer.replace("\ud800", "\ufffd").replace("\udfff", "\ufffd").split())
    assert not re.search(r"[<>|｜]|\[/?[A-Z]", lines[2])
    assert all(character.isprintable() for character in lines[2])


@pytest.mark.parametrize("answer", ADVERSARIAL, ids=range(len(ADVERSARIAL)))
def test_an_answer_that_is_repeated_is_no_verdict(answer):
    # The code is drawn after the answer was written.
    for repeated in (answer, answer.partition("\n")[0], question(answer).messages(code="c9")[1]["content"]):
        with pytest.raises(ValueError, match="no verdict with this request's code"):
            read_verdict(repeated, code="c9")


def test_mathematics_of_other_scripts_stays_readable():
    content = question("[1, 2], ½·π → 北京, café", prompt="p").messages(code=CODE)[1]["content"]
    assert "[1, 2], ½·π → 北京, café" in content


def test_a_long_answer_shows_both_its_ends():
    asked = question("42 " + "and " * 1000 + "or 43")
    assert len(asked.answer) == MAX_ANSWER_CHARS + len(CUT)
    assert asked.answer.startswith("42 and and ")
    assert asked.answer.endswith(" and or 43")


@pytest.mark.parametrize(
    ("prompt", "text"), table("remote_rm/llm_judge/prompt", "the_question_is_the_text_of_the_messages")
)
def test_the_question_is_the_text_of_the_messages(prompt, text):
    assert question_text(prompt) == text


@pytest.mark.parametrize(
    "changed", [{"answer": "43"}, {"reference": "43"}, {"question": "q2"}, {"question": "q4", "reference": "2"}]
)
def test_a_verdict_is_kept_by_all_that_it_depends_on(changed):
    base = {"question": "q", "reference": "42", "answer": "41"}
    key = Question(**base).key(model="m")
    assert key == Question(**base).key(model="m")
    assert key != Question(**(base | changed)).key(model="m")
    assert key != Question(**base).key(model="m2")


@pytest.mark.parametrize(
    ("reply", "is_right"),
    [
        ('{"code": "c0123abcd", "verdict": "right"}', True),
        (' {"code":"c0123abcd","verdict":"wrong"}\n', False),
        ('```json\n{"code": "c0123abcd", "verdict": "right"}\n```', True),
        ('<think>right? {"verdict": "right"}</think>\n{"code": "c0123abcd", "verdict": "wrong"}', False),
    ],
)
def test_a_verdict_is_read(reply, is_right):
    assert read_verdict(reply, code=CODE) is is_right


@pytest.mark.parametrize(
    "reply",
    [
        "",
        "right",
        "1",
        "null",
        "[]",
        '"right"',
        '[["code", "c0123abcd"], ["verdict", "right"]]',
        '{"verdict": "right"}',
        '{"code": "c9999999", "verdict": "right"}',
        '{"code": "c0123abcd", "verdict": "Right"}',
        '{"code": "c0123abcd", "verdict": "maybe"}',
        '{"code": "c0123abcd", "verdict": true}',
        '{"code": "c0123abcd", "verdict": "wrong", "verdict": "right"}',
        '{"code": "c0123abcd", "verdict": "right", "reason": "so"}',
        '{"code": "c0123abcd", "verdict": "wrong"} {"code": "c0123abcd", "verdict": "right"}',
        'The verdict: {"code": "c0123abcd", "verdict": "right"}',
        json.dumps([{"code": CODE, "verdict": "right"}]),
        "{" * 100_000,
        "[" * 100_000,
    ],
)
def test_anything_else_is_none(reply):
    with pytest.raises(ValueError, match="no verdict with this request's code"):
        read_verdict(reply, code=CODE)
