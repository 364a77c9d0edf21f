"""Answers that no response could be right by are found before a training is rewarded by them."""

from lmm_r1.data.messages import Message, Row, TextPart
from lmm_r1.data_check.contents import answer_findings


def rows(*answers: str) -> dict[int, Row]:
    messages = (Message(role="user", parts=(TextPart("?"),)),)
    return {
        index: Row(messages=messages, answer=answer, datasource="d", location=f"line {index}")
        for index, answer in enumerate(answers)
    }


def found(spec: str, *answers: str) -> list[tuple[str, int]]:
    findings = answer_findings(rows(*answers), spec, workers=1, timeout_s=5.0)
    return [(finding.kind, finding.index) for finding in findings]


def test_mathematics_accepts_whole_answers_and_tells_those_that_are_cut_off():
    assert found("math", "4", r"\frac{1}{2}", r"\frac{1}{", "", "a long way") == [("gold refused", 2)]


def test_each_verifier_has_labels_of_its_own():
    assert found("number", "4", "some apples") == [("gold refused", 1)]
    assert found("choice", "B", "7") == [("gold refused", 1)]


def test_an_answer_of_several_golds_is_given_as_one_of_them():
    assert found("edit_distance", '["Rye, NY", "Rye"]', "[]") == [("gold refused", 1)]
    assert found("box", "[0, 0, 10, 10]", "[]", "[10, 10, 0, 0]") == [("gold refused", 2)]
    assert found("composition:select.vqa=1.0,format=0.5", 'vqa: ["net", "net", "mesh"]') == []
    # Of ten people each said something else: nothing is right.
    assert found("vqa", '["net", "nets"]', str(list(range(10)))) == [("gold wrong", 1)]


def test_a_level_is_solved_for_its_answer():
    solvable, lost = "#####\n#@$.#\n#####", "######\n#$@-.#\n######"
    assert found("sokoban", solvable, lost, "Right") == [("gold wrong", 1), ("gold refused", 2)]


def test_a_label_names_the_verifier_that_a_composition_selects():
    spec = "composition:select.number=1.0,format=0.5"
    assert found(spec, "number: 4", "4") == [("gold refused", 1)]


def test_what_a_verifier_does_not_take_for_right_is_told_in_words(monkeypatch):
    from remote_rm.exact_verifier import ExactVerifier

    monkeypatch.setattr(ExactVerifier, "matches", lambda self, answer, label: answer != "5")
    (finding,) = answer_findings(rows("4", "5"), "exact", workers=1, timeout_s=5.0)
    assert (finding.kind, finding.index) == ("gold wrong", 1)
    assert finding.what == "exact does not accept a response that gives the answer '5' itself"
