"""`lmm-r1 interactive_chat` as a user has it: in a terminal of 40 columns, and through pipes with both backends."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pexpect
import pytest
from helpers.commands import flags, one_sentence
from helpers.conversations import load_rows
from helpers.processes import warm_python
from helpers.tiny_models import with_longrope
from PIL import Image

from lmm_r1.chat.chat_model import load_model
from lmm_r1.config.generation import ChatConfig
from lmm_r1.data.messages import ImagePart, TextPart
from lmm_r1.errors import UserError
from remote_rm.redaction import neutral

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ["-m", "lmm_r1.cli.interactive_chat"]
# prompt_toolkit asks for bracketed paste when it begins to read and ends it when a line is entered.
READS, ENTERED = "\x1b[?2004h", "\x1b[?2004l"
ESCAPE_SEQUENCE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
SPEED = re.compile(r"(\d+) tokens?, [\d.]+ tokens/s(.*)")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The current folder of the program, with two images and a file that is none."""
    folder = tmp_path_factory.mktemp("chat")
    Image.new("RGB", (56, 84), "red").save(folder / "a.png")
    Image.new("RGB", (84, 56), "blue").save(folder / "my picture.png")
    (folder / "broken.png").write_bytes((folder / "a.png").read_bytes()[:60])
    return folder


@pytest.fixture(scope="module")
def environment(folder: Path) -> dict[str, str]:
    settings = {
        "HOME": str(folder),
        "PYTHONPATH": str(ROOT),
        "TERM": "xterm-256color",
        # A real terminal says where its cursor is; the one of this test does not.
        "PROMPT_TOOLKIT_NO_CPR": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    return {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS")} | settings


def arguments(model: Path, **changes: object) -> list[str]:
    values = {"model": model, "dtype": "float32", "temperature": 0, "max_model_len": 4096, "max_new_tokens": 8}
    return [*PROGRAM, *flags(values | changes)]


class Terminal:
    """The program in a terminal of its own."""

    def __init__(self, child: pexpect.spawn) -> None:
        self.child = child

    def enter(self, line: str) -> str:
        """Type a line and return what is shown until the next prompt, with its colours."""
        self.begin(line)
        self.child.expect_exact(READS)
        return self.child.before

    def begin(self, line: str) -> None:
        self.child.send(f"{line}\r")
        self.child.expect_exact(ENTERED)


@pytest.fixture(scope="module")
def terminal(folder: Path, environment: dict[str, str], tiny_checkpoint: Callable[[str], Path]) -> Iterator[Terminal]:
    """A chat with an untrained model, which never stops by itself; plain transformers start sooner than vLLM."""
    argv = arguments(tiny_checkpoint("qwen2_5_vl"), max_images=2, backend="transformers")
    yield from started(argv, folder=folder, environment=environment)


def started(argv: list[str], *, folder: Path, environment: dict[str, str]) -> Iterator[Terminal]:
    child = pexpect.spawn(
        sys.executable, argv, cwd=str(folder), env=environment, dimensions=(24, 40), encoding="utf-8", timeout=180
    )
    # A process with an engine takes a while to end, and longer beside other tests.
    child.ptyproc.delayafterterminate = 5.0
    child.expect_exact("loading ")
    child.expect_exact("loaded in ")
    child.expect_exact(READS)
    assert "WARNING" not in child.before
    yield Terminal(child)
    child.close(force=True)


def plain(shown: str) -> str:
    return ESCAPE_SEQUENCE.sub("", shown).replace("\r\n", "\n")


def test_a_conversation_in_a_terminal(terminal: Terminal, folder: Path):
    """One program for many assertions, as it takes long to start."""
    first = plain(terminal.enter("What is 12 + 34?"))
    assert SPEED.search(first).groups() == ("8", ", cut off at max_new_tokens 8")
    assert "no image file nope.png; check the path" in plain(terminal.enter("/image nope.png"))
    assert "cannot read the image broken.png" in plain(terminal.enter("/image broken.png"))
    assert "attached a.png (56x84)" in plain(terminal.enter("/image a.png"))
    assert "attached my picture.png (84x56)" in plain(terminal.enter(f"'{folder}/my picture.png'"))
    assert re.search(r"a.png +56x84\s+my picture.png +84x56", plain(terminal.enter("/images")))
    assert "3 images in the conversation are more than --max_images 2" in plain(terminal.enter("/image a.png"))
    assert SPEED.search(plain(terminal.enter("Which digits do the pictures show?"))).group(1) == "8"
    assert "unknown command /imgae; did you mean /image?" in plain(terminal.enter("/imgae a.png"))
    assert "top_p 2: must be above 0 and at most 1" in plain(terminal.enter("/set top_p 2"))
    assert re.search(r"max_new_tokens +4\b", plain(terminal.enter("/set max_new_tokens 4")))
    assert "no system prompt" in plain(terminal.enter("/system"))
    assert "system prompt: You are a helpful assistant." in plain(
        terminal.enter("/system You are a helpful assistant.")
    )
    assert "saved to talk.json" in plain(terminal.enter("/save talk"))
    [row] = load_rows(str(folder / "talk.json"), answer_required=False)
    assert [message.role for message in row.messages] == ["system", "user", "assistant", "user", "assistant"]
    assert row.messages[3].parts == (
        ImagePart(str(folder / "a.png")),
        ImagePart(str(folder / "my picture.png")),
        TextPart("Which digits do the pictures show?"),
    )
    [record] = json.loads((folder / "talk.json").read_text())
    assert record["settings"] == {"temperature": 0.0, "top_p": 0.95, "max_new_tokens": 4}
    assert "took back: Which digits do the pictures show?" in plain(terminal.enter("/undo"))
    assert SPEED.search(plain(terminal.enter("/retry"))).group(1) == "4"
    assert "a new conversation; the system prompt stays" in plain(terminal.enter("/reset"))
    assert "there is no turn to take back" in plain(terminal.enter("/undo"))
    assert "loaded 2 turns from talk.json" in plain(terminal.enter("/load talk"))
    assert "no file nowhere.json" in plain(terminal.enter("/load nowhere"))


def test_ctrl_c_stops_the_answer_and_not_the_program(terminal: Terminal, folder: Path):
    terminal.enter("/reset")
    terminal.enter("/set max_new_tokens 3000")
    terminal.begin("What is 12 + 34?")
    terminal.child.expect(r"[^\x1b\r\n]")
    terminal.child.sendintr()
    terminal.child.expect_exact(READS)
    shown = plain(terminal.child.before)
    tokens, ending = SPEED.search(shown).groups()
    assert ending == ", stopped"
    assert 0 < int(tokens) < 3000
    assert "^C" not in shown
    terminal.enter("/save stopped.jsonl")
    record = json.loads((folder / "stopped.jsonl").read_text())
    assert record["stopped"] == [2]
    assert record["messages"][2]["role"] == "assistant"
    terminal.enter("/set max_new_tokens 4")
    assert SPEED.search(plain(terminal.enter("And 2 + 3?"))).group(1) == "4"


def test_a_prompt_that_leaves_no_room_costs_nothing_but_the_turn(terminal: Terminal):
    terminal.enter("/reset")
    refused = plain(terminal.enter("9 " * 4096))
    assert "leaves no room for a response in --max_model_len 4096" in refused
    assert "the turn is not added" in refused
    assert "there is no turn to take back" in plain(terminal.enter("/undo"))


def test_keys_at_the_prompt(terminal: Terminal, folder: Path):
    terminal.child.send("never sent")
    terminal.child.sendintr()
    terminal.child.expect_exact(READS)
    terminal.child.send("/sy\t")
    terminal.child.expect_exact("stem")
    terminal.enter("first\x1b\rsecond\\\rthird")
    assert "system prompt: first\nsecond\nthird" in plain(terminal.enter("/system"))
    assert "+/system first" in (folder / ".lmm_r1_history").read_text()
    assert (folder / ".lmm_r1_history").stat().st_mode & 0o077 == 0


def test_exit_leaves_with_code_0(terminal: Terminal):
    terminal.begin("/exit")
    terminal.child.expect(pexpect.EOF)
    assert plain(terminal.child.before).strip() == ""
    terminal.child.close()
    assert terminal.child.exitstatus == 0


def test_the_demos_model_thinks_dimly_and_answers_brightly(demo: Path, folder: Path, environment: dict[str, str]):
    argv = arguments(demo / "model", max_new_tokens=40, backend="transformers")
    chats = started(argv, folder=folder, environment=environment)
    chat = next(chats)
    shown = chat.enter("What is the sum of 7 and 3?")
    assert re.search(r"7 3\.", plain(shown))
    thought, answer = re.search(r"\x1b\[2;3m7", shown), re.search(r"\x1b\[1;32m\d", shown)
    assert thought is not None
    assert answer is not None
    assert thought.end() <= answer.start()
    chat.enter(f"/image {demo}/image/images/000001_1.png")
    assert SPEED.search(plain(chat.enter("Sort the digits."))).group(2).strip() == ""
    next(chats, None)


def piped(model: Path, lines: list[str], *, cwd: Path, env: dict[str, str], **changes: object) -> tuple[int, str, str]:
    """Return exit code, stdout and stderr of the program with the lines as its stdin."""
    ended = subprocess.run(
        [warm_python(), *arguments(model, **changes)],
        input="".join(f"{line}\n" for line in lines).encode(),
        cwd=cwd,
        env=env,
        capture_output=True,
        timeout=240,
    )
    return ended.returncode, ended.stdout.decode(), ended.stderr.decode()


def test_both_backends_answer_a_pipe_alike(folder: Path, environment: dict[str, str], demo: Path):
    lines = ["/image a.png", "Which digit does the picture show?", "/set max_new_tokens 12", "What is 12 + 34?"]
    model = demo / "model"
    code, answers, said = piped(model, [*lines, "/save piped"], cwd=folder, env=environment)
    assert (code, "\x1b" in answers + said) == (0, False)
    [row] = load_rows(str(folder / "piped.json"), answer_required=False)
    blocks = [neutral(message.parts[0].text) for message in row.messages if message.role == "assistant"]
    assert answers == "\n".join(block + "\n" * (not block.endswith("\n")) for block in blocks)
    assert "attached a.png (56x84)\n" in said
    counts = [int(match.group(1)) for match in SPEED.finditer(said)]
    assert counts[0] == 8
    assert counts[1] <= 12
    lines = [lines[0], "/image nowhere.png", *lines[1:]]
    code, same_answers, said = piped(model, lines, cwd=folder, env=environment, backend="transformers")
    assert same_answers == answers
    assert [int(match.group(1)) for match in SPEED.finditer(said)] == counts
    assert "error: no image file nowhere.png; check the path\n" in said
    assert code == 1


def test_unless_asked_otherwise_conversations_stay_within_the_short_factors_of_longrope(
    tiny_checkpoint, tmp_path, caplog
):
    plain, folder = tiny_checkpoint("llm"), with_longrope(tiny_checkpoint("llm"), 64, copy=tmp_path / "model")
    lengths = []
    for settings in ({"model": str(plain)}, {"model": str(folder)}, {"model": str(folder), "max_model_len": 100}):
        engine = load_model(ChatConfig(**settings, backend="transformers", dtype="float32")).engine
        lengths.append(engine.codec.max_len)
        engine.close()
    assert lengths == [8192, 64, 100]
    assert [message.partition(":")[0] for message in caplog.messages if "longrope" in message] == [
        "conversations may take 64 tokens",
        "--max_model_len 100",
    ]


def test_a_template_that_opens_the_thought_is_noticed(
    tmp_path: Path, tiny_checkpoint: Callable[[str], Path], own_environment: None
):
    shutil.copytree(tiny_checkpoint("llm"), tmp_path / "model")
    settings = {"model": str(tmp_path / "model"), "backend": "transformers", "dtype": "float32", "max_model_len": 512}
    assert not load_model(ChatConfig(**settings)).opens_thought
    template = tmp_path / "model" / "chat_template.jinja"
    template.write_text(template.read_text() + "{%- if add_generation_prompt %}{{- '<think>\\n' }}{% endif -%}")
    model = load_model(ChatConfig(**settings))
    assert model.opens_thought
    with pytest.raises(UserError, match="is a plain language model and takes no images"):
        model.check_media([], more_images=1)


def test_a_wrong_model_is_told_in_one_sentence(folder: Path, environment: dict[str, str]):
    code, answers, said = piped(folder / "nowhere", ["hello"], cwd=folder, env=environment)
    assert (code, answers) == (1, "")
    assert (
        one_sentence(said, prefix="lmm-r1 interactive_chat: error: ")
        == f"{folder}/nowhere: no such folder; check the path"
    )
