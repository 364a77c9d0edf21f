"""`lmm-r1 interactive_chat` as a user has it: in a terminal, and through pipes with both backends."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pexpect
import pytest
from helpers.commands import flags
from helpers.processes import warm_python
from helpers.tiny_models import with_longrope
from PIL import Image

from lmm_r1.config.generation import ChatConfig
from lmm_r1.tools.chat import load_model

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ["-m", "lmm_r1.cli.interactive_chat"]
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
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    return {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS")} | settings


def arguments(model: Path, **changes: object) -> list[str]:
    values = {"model": model, "dtype": "float32", "temperature": 0, "max_model_len": 4096, "max_new_tokens": 8}
    return [*PROGRAM, *flags(values | changes)]


@pytest.fixture(scope="module")
def terminal(
    folder: Path, environment: dict[str, str], tiny_checkpoint: Callable[[str], Path]
) -> Iterator[pexpect.spawn]:
    """A chat with an untrained model, which never stops by itself; plain transformers start sooner than vLLM."""
    argv = arguments(tiny_checkpoint("qwen2_5_vl"), max_images=2, max_new_tokens=2000, backend="transformers")
    child = pexpect.spawn(
        sys.executable,
        argv,
        cwd=str(folder),
        env=environment,
        dimensions=(24, 80),
        encoding="utf-8",
        timeout=180,
        # A shell lets programs in the background ignore it, and they let theirs.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    # A process with an engine takes a while to end, and longer beside other tests.
    child.ptyproc.delayafterterminate = 5.0
    child.expect_exact("loaded in ")
    child.expect_exact("> ")
    assert "WARNING" not in child.before
    yield child
    child.close(force=True)


def enter(child: pexpect.spawn, line: str) -> str:
    """Type a line and return what is shown until the next prompt."""
    child.send(f"{line}\r")
    child.expect(r"\n(\x1b\[\?2004h)?> ")
    return ESCAPE_SEQUENCE.sub("", child.before).replace("\r\n", "\n")


def test_a_conversation_in_a_terminal(terminal: pexpect.spawn, folder: Path):
    """One program for many assertions, as it takes long to start."""
    assert "broken.png" in enter(terminal, "/image broken.png")
    assert "attached a.png" in enter(terminal, "/image a.png")
    assert "attached 'my picture.png'" in enter(terminal, "/image 'my picture.png'")
    assert "takes 2 here; see --max_images" in enter(terminal, "/image a.png")
    terminal.send("What is 12 + 34?\r")
    terminal.expect(r"34\?\r\n(\x1b\[\?2004l\r)?[^\x1b\r\n]")
    terminal.sendintr()
    terminal.expect_exact("> ")
    tokens, ending = SPEED.search(terminal.before).groups()
    assert ending.strip() == ", stopped"
    assert 0 < int(tokens) < 2000
    terminal.send("never sent")
    terminal.expect_exact("never sent")
    # Python's readline loses a signal that comes just before it waits for a key.
    for _ in range(20):
        terminal.sendintr()
        if terminal.expect_exact(["> ", pexpect.TIMEOUT], timeout=5) == 0:
            break
    terminal.send("/system first\\\r")
    terminal.expect_exact(". ")
    assert "system prompt: first\nsecond" in enter(terminal, "second")
    assert "a new conversation; the system prompt stays" in enter(terminal, "/reset")
    terminal.sendeof()
    terminal.expect(pexpect.EOF)
    terminal.close()
    assert terminal.exitstatus == 0


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


def test_both_backends_answer_a_pipe_alike(
    folder: Path, environment: dict[str, str], tiny_checkpoint: Callable[[str], Path]
):
    lines = ["/image a.png", "Which digit does the picture show?", "What is 12 + 34?"]
    code, answers, said = piped(tiny_checkpoint("qwen2_5_vl"), lines, cwd=folder, env=environment)
    assert (code, "\x1b" in answers + said) == (0, False)
    assert len(answers.split("\n\n")) == 2
    counts = [int(match.group(1)) for match in SPEED.finditer(said)]
    assert len(counts) == 2
    lines = [lines[0], "/image nowhere.png", *lines[1:]]
    code, same_answers, said = piped(
        tiny_checkpoint("qwen2_5_vl"), lines, cwd=folder, env=environment, backend="transformers"
    )
    assert same_answers == answers
    assert [int(match.group(1)) for match in SPEED.finditer(said)] == counts
    assert re.search(r"^error: .*nowhere\.png", said, re.MULTILINE)
    assert code == 1


def test_unless_asked_otherwise_conversations_stay_within_the_short_factors_of_longrope(tiny_checkpoint, tmp_path):
    plain, folder = tiny_checkpoint("llm"), with_longrope(tiny_checkpoint("llm"), 64, copy=tmp_path / "model")
    lengths = []
    for settings in ({"model": str(plain)}, {"model": str(folder)}, {"model": str(folder), "max_model_len": 100}):
        engine = load_model(ChatConfig(**settings, backend="transformers", dtype="float32")).engine
        lengths.append(engine.codec.max_len)
        engine.close()
    assert lengths == [8192, 64, 100]
