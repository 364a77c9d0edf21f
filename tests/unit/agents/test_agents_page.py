"""The examples of docs/environments.md, docs/tools.md and docs/crop.md run as they stand there."""

import re
from pathlib import Path

import pytest
from helpers.conversations import message, row
from helpers.episodes import coordinates_image, image_row, images_in, play, text_of

from lmm_r1.agents.environment import load_environment
from lmm_r1.agents.tool_environment import CropEnvironment
from lmm_r1.agents.tools import HttpTool

DOCS = Path(__file__).resolve().parents[3] / "docs"
PAGE = "".join((DOCS / f"{name}.md").read_text(encoding="utf-8") for name in ("environments", "tools", "crop"))
CODE = {name: code for code, name in re.findall(r"```python\n(# (\w+\.py).*?)```", PAGE, re.DOTALL)}


@pytest.fixture
def written(tmp_path):
    """A function from an example's name to the environment that it makes."""

    def load(name):
        (tmp_path / name).write_text(CODE[name])
        return load_environment(str(tmp_path / name))

    return load


def test_an_environment_in_30_lines(written):
    assert len(CODE["hotter.py"].splitlines()) <= 30
    asked = row(message("user", "Which number do I think of?"), answer="7")
    answers = play(written("hotter.py"), asked, "<guess>3</guess>", "ten", "<guess> 9 </guess>", "<guess>7</guess>")
    assert [text_of(one) for one in answers] == ["Too low.", "Write a number: <guess>5</guess>", "Too high.", ""]
    assert [dict(one.counts) for one in answers] == [{"guesses": 1}, {"malformed_guesses": 1}, {"guesses": 1}, {}]
    assert answers[-1].is_over
    assert answers[-1].rewards == {"found": 0.25}


def test_a_tool_in_10_lines(written):
    lines = [line for line in CODE["turning.py"].splitlines() if line.strip() and not line.startswith("#")]
    assert len(lines) <= 10
    call = '<tool_call>{"name": "turn_image", "arguments": {"image": "original_image", "degrees": 90}}</tool_call>'
    (answered,) = play(written("turning.py"), image_row(coordinates_image(30, 20)), call)
    (image,) = images_in(answered)
    # Counter-clockwise: what was at the right edge is on top.
    assert (image.size, image.getpixel((0, 0))) == ((20, 30), (29, 0, 7))


def test_a_tool_that_is_a_service(written):
    tool = written("detector.py").tools["detect"]
    assert isinstance(tool, HttpTool)
    assert tool.schema["function"]["parameters"]["required"] == ["image", "label"]
    assert tool.deadline_s == 10


def test_the_call_that_the_page_shows_is_carried_out():
    (call,) = re.findall(r"```\n(<grounding>.*?</grounding>)\n```", PAGE)
    (answered,) = play(CropEnvironment(), image_row(coordinates_image(40, 20)), call)
    assert images_in(answered)[0].size == (20, 10)
