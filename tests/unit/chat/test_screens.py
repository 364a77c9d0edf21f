import io
import itertools
import os
import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmm_r1.chat.screen import PlainScreen, Streams, StyledSpan, TagReader, TerminalScreen, captured_output, one_line
from lmm_r1.errors import UserError

HOSTILE = "a\x1b[31mb\x1b]0;title\x07c\r\x08d\x7fe\x9b2Jf\u202eg\ud800h\ti\n"
HARMLESS = "a␛[31mb␛]0;title␇c␍␈d␡e\\x9b2Jf\\u202eg\ufffdh\ti\n"
STYLE = re.compile(r"\x1b\[[0-9;]*m")
TAGGED = "a<think>1<2 <b></think>\n<answer>3</answer>z"
SPANS = [
    StyledSpan("text", "a"),
    StyledSpan("tag", "<think>"),
    StyledSpan("thinking", "1<2 <b>"),
    StyledSpan("tag", "</think>"),
    StyledSpan("text", "\n"),
    StyledSpan("tag", "<answer>"),
    StyledSpan("answer", "3"),
    StyledSpan("tag", "</answer>"),
    StyledSpan("text", "z"),
]


class TerminalFile(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def out(monkeypatch: pytest.MonkeyPatch) -> TerminalFile:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "40")
    return TerminalFile()


def styled(out: TerminalFile, *pieces: str, thinking: bool = False) -> str:
    writer = TerminalScreen(Streams(out=out, err=io.StringIO())).answer(thinking=thinking)
    for piece in pieces:
        writer.write(piece)
    writer.close()
    return out.getvalue()


def test_one_line_has_no_line_break_and_no_control_character():
    assert one_line("a\n  b\x1b") == "a b␛"


def test_thinking_is_dim_and_the_answer_is_bold_and_green(out: TerminalFile):
    assert styled(out, "<thi", "nk>1</think><answer>", "2</answer>") == (
        "\x1b[2;34m<think>\x1b[0m\x1b[2;3m1\x1b[0m\x1b[2;34m</think>\x1b[0m"
        "\x1b[2;34m<answer>\x1b[0m\x1b[1;32m2\x1b[0m\x1b[2;34m</answer>\x1b[0m\n"
    )


def test_a_thought_that_the_prompt_opened_is_dim(out: TerminalFile):
    assert styled(out, "1", thinking=True) == "\x1b[2;3m1\x1b[0m\n"


def test_without_colours_no_colour_is_written(out: TerminalFile, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NO_COLOR", "1")
    shown = styled(out, "<think>1</think><answer>2</answer>")
    assert STYLE.sub("", shown) == "<think>1</think><answer>2</answer>\n"
    assert set(STYLE.findall(shown)) == {"\x1b[2m", "\x1b[2;3m", "\x1b[1m", "\x1b[0m"}


def test_what_a_model_writes_reaches_the_terminal_whole_and_harmless(out: TerminalFile):
    text = HOSTILE + "[bold]not markup[/bold] :smile: " + "long " * 30
    assert styled(out, *text) == HARMLESS + text.removeprefix(HOSTILE) + "\n"


def test_remarks_are_harmless_too(out: TerminalFile):
    screen = TerminalScreen(Streams(out=out, err=io.StringIO()))
    screen.say("\x1b[2J" + "x" * 60)
    screen.fail("no file \x1b[2J\nhere")
    screen.table([("\x1b[2J", "y " * 30)])
    lines = STYLE.sub("", out.getvalue()).splitlines()
    assert lines[:2] == ["␛[2J" + "x" * 60, "no file ␛[2J here"]
    assert all(len(line) <= 40 for line in lines[2:])
    assert lines[2].startswith("␛[2J  y y")


def test_a_plain_screen_puts_answers_on_stdout_with_an_empty_line_between_them():
    streams = Streams(out=io.StringIO(), err=io.StringIO())
    screen = PlainScreen(streams)
    for pieces in (["<think>1", "</think>2\n"], [], ["3\x1b"]):
        writer = screen.answer(thinking=False)
        for piece in pieces:
            writer.write(piece)
        writer.close()
    screen.say("4 tokens")
    screen.fail("no\nfile")
    screen.table([("a", "1"), ("long", "2")])
    assert streams.out.getvalue() == "<think>1</think>2\n\n3␛\n"
    assert streams.err.getvalue() == "4 tokens\nerror: no file\na     1\nlong  2\n"


def break_with(error: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    """Write in the three ways in which libraries do, then raise the error."""
    # In a program `sys.stdout` writes to descriptor 1; pytest's own would go past it.
    with monkeypatch.context() as patch, open(1, "w", closefd=False) as stdout:
        patch.setattr(sys, "stdout", stdout)
        with captured_output():
            sys.stdout.write("printed\n")
            os.write(2, b"native\n")
            subprocess.run([sys.executable, "-c", "print('child')"], check=True)
            raise error


def test_what_libraries_write_is_kept_off_the_screen(capfd):
    with captured_output() as streams:
        os.write(1, b"native\n")
        os.write(2, b"native\n")
        streams.out.write("Grüße\n")
        streams.err.write("status\n")
    os.write(1, b"afterwards\n")
    assert capfd.readouterr() == ("Grüße\nafterwards\n", "status\n")


def test_it_is_told_where_the_program_breaks(capfd, monkeypatch):
    with pytest.raises(RuntimeError):
        break_with(RuntimeError, monkeypatch)
    out, err = capfd.readouterr()
    assert out == ""
    assert sorted(err.split()) == ["child", "native", "printed"]


@pytest.mark.parametrize("error", [UserError, KeyboardInterrupt])
def test_it_is_not_told_where_the_user_ended_it(capfd, monkeypatch, error):
    with pytest.raises(error):
        break_with(error, monkeypatch)
    assert capfd.readouterr() == ("", "")


def spans_of(pieces: list[str], *, kind: str = "text") -> list[StyledSpan]:
    """What a reader makes of the pieces, neighbours of one kind joined."""
    reader = TagReader(kind=kind)
    spans = [span for piece in pieces for span in reader.feed(piece)] + reader.rest()
    grouped = itertools.groupby(spans, key=lambda span: (span.kind, span.text if span.kind == "tag" else None))
    return [StyledSpan(kind, "".join(span.text for span in group)) for (kind, _), group in grouped]


def test_the_spans_do_not_depend_on_where_the_stream_is_cut():
    for first, second in itertools.combinations(range(1, len(TAGGED)), 2):
        assert spans_of([TAGGED[:first], TAGGED[first:second], TAGGED[second:]]) == SPANS, (first, second)


@pytest.mark.parametrize(
    ("text", "spans"),
    [
        ("<think>1 and", [StyledSpan("tag", "<think>"), StyledSpan("thinking", "1 and")]),
        (
            "<think>1<answer>2",
            [
                StyledSpan("tag", "<think>"),
                StyledSpan("thinking", "1"),
                StyledSpan("tag", "<answer>"),
                StyledSpan("answer", "2"),
            ],
        ),
        ("1</think>2", [StyledSpan("text", "1"), StyledSpan("tag", "</think>"), StyledSpan("text", "2")]),
        ("no tags, <thi and <Think>", [StyledSpan("text", "no tags, <thi and <Think>")]),
        ("a<<think>b", [StyledSpan("text", "a<"), StyledSpan("tag", "<think>"), StyledSpan("thinking", "b")]),
        ("ends with <answe", [StyledSpan("text", "ends with <answe")]),
        ("", []),
    ],
)
def test_unclosed_stray_and_broken_tags(text, spans):
    assert spans_of(list(text)) == spans_of([text]) == spans


def test_text_is_held_back_only_while_it_may_become_a_tag():
    reader = TagReader()
    assert reader.feed("a <") == [StyledSpan("text", "a ")]
    assert reader.feed("thi") == []
    assert reader.feed("s") == [StyledSpan("text", "<this")]


@given(st.lists(st.sampled_from(["<", ">", "/", "think", "answer", "<think>", "</answer>", "x", "\n"])))
def test_the_spans_together_are_the_text(pieces):
    assert "".join(span.text for span in spans_of(pieces)) == "".join(pieces)
    assert spans_of(pieces) == spans_of(list("".join(pieces)))
