"""Rows that ask the same however that is written, answers that no response could be right by, and how numbers are spread."""

import io

from PIL import Image

from lmm_r1.data.messages import ImagePart, Message, Row, TextPart
from lmm_r1.scoring.sources import VerifierJudge
from lmm_r1.tools.data_check.contents import (
    Distribution,
    Finding,
    Repeats,
    answer_findings,
    content_of,
    contents,
    prompts_of,
)


def picture(color: str, *, size: tuple[int, int] = (8, 4), kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, color).save(buffer, format=kind)
    return buffer.getvalue()


def row(text: str, answer: str = "4", *images: bytes, line: int = 1, said: str | None = None) -> Row:
    messages = [Message(role="user", parts=(*map(ImagePart, images), TextPart(text)))]
    if said is not None:
        messages.append(Message(role="assistant", parts=(TextPart(said),)))
    return Row(messages=tuple(messages), answer=answer, datasource="d", location=f"rows.jsonl line {line}")


def test_spaces_and_capitals_do_not_matter_but_pictures_do():
    first = content_of(row("What is 2 + 2?"))
    assert content_of(row("what  is\n2+2?")).question == first.question
    assert content_of(row("What is 2 + 3?")).question != first.question
    red = content_of(row("What is 2 + 2?", "4", picture("red")))
    assert red.question != first.question
    assert red.sizes == ((8, 4),)
    # The same pixels in another file.
    assert content_of(row("What is 2 + 2?", "4", picture("red", kind="BMP"))).question == red.question
    assert content_of(row("What is 2 + 2?", "4", picture("red", size=(4, 8)))).question != red.question
    assert content_of(row("What is 2 + 2?", "4", picture("blue"))).question != red.question


def test_a_picture_that_cannot_be_decoded_is_told():
    found = dict(contents({0: row("a", "1", b"no image"), 7: row("b")}))
    assert list(found) == [0, 7]
    assert "rows.jsonl line 1: cannot read the image" in found[0].error
    assert found[7].error is None


def told(repeats: Repeats, *rows: Row) -> list[tuple[str, int, str]]:
    return [
        (finding.kind, finding.index, finding.what)
        for index, one in enumerate(rows)
        for finding in repeats.findings(index, one, content_of(one))
    ]


def test_repeated_rows_and_those_of_another_file_are_told_with_their_places():
    held_out = prompts_of({0: row("Which?", "1", line=9), 1: row("a", "1", b"no image")})
    rows = [row("2+2?"), row("2 + 2?", " 4", line=2), row("2+2?", "5", line=3), row("WHICH?", "2", line=4)]
    assert told(Repeats((held_out,)), *rows) == [
        ("duplicate", 1, "repeats rows.jsonl line 1"),
        ("contradiction", 2, "asks what rows.jsonl line 1 asks, but has the answer '5' instead of '4'"),
        ("leak", 3, "asks what rows.jsonl line 9 asks"),
    ]


def trajectory(text: str, said: str, *images: bytes, system: str = "Crop.") -> Row:
    """A question about the first image, with a call and the second image behind it."""
    asked = row(text, "4", images[0], said=said).messages
    shown = Message(role="user", parts=(ImagePart(images[1]), TextPart("Go on.")))
    rules = Message(role="system", parts=(TextPart(system),))
    messages = (rules, *asked, shown, Message(role="assistant", parts=(TextPart("<answer>4</answer>"),)))
    return Row(messages=messages, answer="4", datasource="d", location="rows.jsonl line 9")


def test_a_trajectory_leaks_the_question_that_it_answers():
    held_out = row("How many dots?", "4", picture("red"), line=5)
    other = prompts_of({0: held_out})
    leaking = trajectory("how many dots?", "<call>", picture("red"), picture("blue"))
    of_another_picture = trajectory("How many dots?", "<call>", picture("green"), picture("red"))
    assert told(Repeats((other,)), leaking, of_another_picture) == [("leak", 0, "asks what rows.jsonl line 5 asks")]
    # The other way about, and the same question by way of another part is no repetition.
    assert [kind for kind, *_ in told(Repeats((prompts_of({0: leaking}),)), held_out)] == ["leak"]
    again = trajectory("How many dots?", "<other call>", picture("red"), picture("white"))
    assert told(Repeats(), leaking, again) == []


def rows(*answers: str) -> dict[int, Row]:
    messages = (Message(role="user", parts=(TextPart("?"),)),)
    return {
        index: Row(messages=messages, answer=answer, datasource="d", location=f"line {index}")
        for index, answer in enumerate(answers)
    }


def found(spec: str, *answers: str) -> list[tuple[str, int]]:
    return [(finding.kind, finding.index) for finding in findings(spec, *answers)]


def findings(spec: str, *answers: str) -> list[Finding]:
    judge = VerifierJudge(spec, workers=1, item_timeout_seconds=5.0)
    return list(answer_findings(rows(*answers), judge, timeout_s=5.0))


def test_mathematics_accepts_whole_answers_and_tells_those_that_are_cut_off():
    assert found("math", "4", r"\frac{1}{2}", r"\frac{1}{", "", "a long way") == [("gold refused", 2)]


def test_an_answer_of_several_golds_is_given_as_one_of_them():
    assert found("edit_distance", '["Rye, NY", "Rye"]', "[]") == [("gold refused", 1)]
    assert found("box", "[0, 0, 10, 10]", "[]", "[10, 10, 0, 0]") == [("gold refused", 2)]
    assert found("composition:select.vqa=1.0,format=0.5", 'vqa: ["net", "net", "mesh"]') == []
    # Of ten people each said something else: nothing is right.
    assert found("vqa", '["net", "nets"]', str(list(range(10)))) == [("gold wrong", 1)]


def test_a_level_is_solved_for_its_answer():
    solvable, lost = "#####\n#@$.#\n#####", "######\n#$@-.#\n######"
    assert found("sokoban", solvable, lost, "Right") == [("gold wrong", 1), ("gold refused", 2)]


def test_what_a_verifier_does_not_take_for_right_is_told_in_words(monkeypatch):
    from remote_rm.short_verifiers import ExactVerifier

    monkeypatch.setattr(ExactVerifier, "matches", lambda self, answer, label: answer != "5")
    (finding,) = findings("exact", "4", "5")
    assert (finding.kind, finding.index) == ("gold wrong", 1)
    assert finding.what == "exact does not accept a response that gives the answer '5' itself"


def test_quantiles_are_values_that_so_large_a_share_does_not_exceed():
    spread = Distribution.of("tokens", [*range(1, 101)], limit=60)
    assert (spread.least, spread.median, spread.most_of_90, spread.most_of_99, spread.largest) == (1, 50, 90, 99, 100)
    assert (spread.count, spread.limit) == (100, 60)
