import pytest
from helpers.episodes import image_row, play, text_of

from lmm_r1.agents.environment import load_environment
from lmm_r1.agents.tool_environment import CropEnvironment, ToolEnvironment
from lmm_r1.errors import UserError

HEAD = """
from lmm_r1.agents.tool_environment import CropEnvironment
from lmm_r1.agents.environment import Answered, Environment, Episode
from lmm_r1.data.messages import TextPart

class Echo(Environment):
    name = "echo"

    def __init__(self, times=1):
        self.times = int(times)

    def begin(self, row, *, seed):
        return Echoes(self.times)

class Echoes(Episode):
    def __init__(self, times):
        self.times = times

    async def answer(self, turn):
        return Answered(shown=(TextPart(turn.text * self.times),))
"""


@pytest.fixture
def file(tmp_path):
    """A function that writes an agent file and returns its path."""

    def write(code):
        path = tmp_path / "agent.py"
        path.write_text(code)
        return str(path)

    return write


def test_environments_are_found_by_their_names():
    assert isinstance(load_environment("crop"), CropEnvironment)
    assert type(load_environment("tool")) is ToolEnvironment


@pytest.mark.parametrize(
    ("code", "name"),
    [
        (HEAD, ""),
        (HEAD, ":Echo"),
        (HEAD + "made = Echo()\n", ""),
        (HEAD + "class Loud(Echo):\n    name = 'loud'\n", ":Echo"),
    ],
)
def test_a_file_gives_an_environment(file, code, name):
    (answered,) = play(load_environment(file(code) + name), image_row(), "hello")
    assert text_of(answered) == "hello"


def test_a_file_may_hold_tools_only(file):
    code = 'def shout(words: str) -> str:\n    """Shout."""\n    return words.upper()\n\nTOOLS = [shout]\n'
    environment = load_environment(file(code), options={"prefill": "<think>"})
    (answered,) = play(
        environment, image_row(), '<tool_call>{"name": "shout", "arguments": {"words": "a"}}</tool_call>'
    )
    assert text_of(answered) == "<tool_response>\nA\n</tool_response>"
    assert answered.prefill == "<think>"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("corp", "no environment 'corp'; did you mean crop. Known are crop, tool"),
        ("/nowhere/agent.py", "environment /nowhere/agent.py: no such file"),
    ],
)
def test_what_is_not_there_is_told(source, said):
    with pytest.raises(UserError, match=said):
        load_environment(source)


@pytest.mark.parametrize(
    ("code", "name", "options", "said"),
    [
        ("1 / 0", "", {}, r"the file cannot be imported \(ZeroDivisionError"),
        ("x = 1", "", {}, "the file defines no Environment, and no list TOOLS of functions; subclass"),
        (HEAD + "class Loud(Echo):\n    name = 'loud'\n", "", {}, "defines Echo, Loud; say which: .*agent.py:Echo"),
        (HEAD, ":Echoes", {}, "Echoes is not an Environment"),
        (HEAD, ":Nothing", {}, "Nothing is not an Environment"),
        (HEAD, "", {"many": 1}, "no option 'many'; known are times"),
        (HEAD, "", {"times": "x"}, r"the options {'times': 'x'} \(ValueError: invalid literal"),
        (HEAD + "made = Echo()\n", "", {"times": 1}, "made is an instance and takes no options"),
        ("TOOLS = [lambda: 1]", "", {}, "a name has only letters, digits, _ and -"),
    ],
)
def test_what_is_wrong_with_a_file_is_told(file, code, name, options, said):
    with pytest.raises(UserError, match=said):
        load_environment(file(code) + name, options=options)


def test_wrong_options_of_a_name_are_told():
    with pytest.raises(UserError, match="environment crop: no option 'pixels'; known are coordinates, edges"):
        load_environment("crop", options={"pixels": 3})
    with pytest.raises(UserError, match="environment crop: crop: coordinates 'pixels' must be one of"):
        load_environment("crop", options={"coordinates": "pixels"})
