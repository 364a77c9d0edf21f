import io
import re
import unicodedata

import pytest

from lmm_r1.chat.captured_output import Streams
from lmm_r1.chat.screen import PlainScreen, neutral, one_line
from lmm_r1.chat.terminal_screen import TerminalScreen

pytestmark = pytest.mark.unit

HOSTILE = "a\x1b[31mb\x1b]0;title\x07c\r\x08d\x7fe\x9b2Jf\u202eg\ud800h\ti\n"
HARMLESS = "a␛[31mb␛]0;title␇c␍␈d␡e\\x9b2Jf\\u202eg\ufffdh\ti\n"
STYLE = re.compile(r"\x1b\[[0-9;]*m")


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


def test_control_characters_are_shown_and_not_obeyed():
    assert neutral(HOSTILE) == HARMLESS
    left = [
        character for character in map(chr, (*range(0x300), *range(0xD700, 0xE100))) if neutral(character) == character
    ]
    assert [character for character in left if unicodedata.category(character) in ("Cc", "Cs")] == ["\t", "\n"]
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
