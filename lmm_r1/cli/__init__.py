"""The `lmm-r1` command: `lmm-r1 NAME ...` runs `lmm_r1.cli.NAME`, imported only when asked for."""

from __future__ import annotations

import contextlib
import importlib
import os
import select
import shutil
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NoReturn

from lmm_r1 import cpu, quiet
from lmm_r1.dotted import nearest
from lmm_r1.errors import ListedError, RunStopped, UserError
from lmm_r1.files.atomic import in_worker, sentence_of
from remote_rm.redaction import hide_in_logs

if TYPE_CHECKING:
    from lmm_r1.data.messages import SkippedRow
    from lmm_r1.tools.batch import JobTotals

# Set here, because a command may load torch before it knows what it does.
cpu.choose_waiting()
quiet.hide_warnings()

GROUPS = {
    "start and plan": {
        "init": "write a first project: rows with images, settings, a reward function, and a README with its commands",
        "plan": "estimate GPU and host memory before loading anything: a dry run of a training command",
    },
    "data": {
        "check_data": "statistics of a row file and problems that training would have with it; a page with its images",
        "prepare_data": "write rows of a public dataset by its recipe, from the hub or a local copy",
        "make_task": "write row files of a procedural task, with images",
    },
    "train": {
        "train_ppo_ray": "reinforcement learning with Ray, DeepSpeed and vLLM: GRPO, RLOO, REINFORCE++, PPO, DAPO, GSPO",
        "train_sft": "supervised fine-tuning (the cold start)",
        "train_dpo": "direct preference optimization on pairs of responses: DPO, cDPO, IPO, SimPO",
        "train_rm": "a reward model from pairs of responses, for serve_rm and RL",
        "train_kd": "distillation: a student learns the token distributions of a teacher",
    },
    "evaluate and use": {
        "evaluate": "measure accuracy, pass@k, majority@k, format and length on row files and benchmark suites",
        "report": "write an HTML page about a run or a curriculum, or compare several: curves, scores, rollouts",
        "batch_inference": "generate responses to a file of rows, score and select them; resumable",
        "interactive_chat": "chat with a checkpoint in the terminal, with images",
    },
    "serve": {
        "serve_verifier": "serve rewards over HTTP: answers by rules, a composition of rules, or a model as judge",
        "serve_rm": "serve the rewards of a trained reward model over HTTP, for text and images",
        "serve_chat": "serve a checkpoint with the OpenAI chat API, for text and images",
    },
    "convert and look up": {
        "merge": "write a checkpoint in Hugging Face format from a LoRA adapter or a DeepSpeed checkpoint",
        "convert_config": "convert settings of other trainers to a file for --config, with a list of what has no counterpart",
        "convert_checkpoint": "make a checkpoint of a GGUF file",
        "make_vlm": "put a vision-language model together of a released language model and a vision tower",
        "make_tiny_model": "build a small random multimodal model and its processor, to try commands on any machine",
        "kits": "list the supported architectures and what each supports",
    },
}
COMMANDS = {name: what for group in GROUPS.values() for name, what in group.items()}
HELP = ("-h", "--help", "help")
EXTRA_PACKAGES = frozenset(
    ("torch", "vllm", "openrlhf", "ray", "deepspeed", "transformers", "peft", "accelerate", "huggingface_hub", "cv2")
)
"""What the extras `gpu` and `cpu` install."""
SERVER_PACKAGES = frozenset(("fastapi", "pebble", "starlette", "uvicorn"))
"""What the extra `serve` installs."""
EXTRA_MISSING = (
    "this command needs {}, which an extra installs: pip install 'lmm-r1[gpu]', or 'lmm-r1[cpu]' on a machine without "
    "GPUs; docs/installation.md shows it for a wheel"
)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command named by the first argument; an unknown name ends the process with code 2."""
    run_command(lambda: _run(list(sys.argv[1:] if argv is None else argv)))


def run_command(main: Callable[[], None]) -> None:
    """Run a command. If nobody reads its output any more, as with `| head`, it ends as if by SIGPIPE.

    If its standard output is a file on a full disk, or a package of an extra is missing, it ends with a sentence and
    exit code 1.
    """
    hide_in_logs()
    try:
        try:
            main()
        finally:
            # Otherwise the buffer would fail when the interpreter exits.
            sys.stdout.flush()
    except BrokenPipeError:
        if not _reader_has_gone():
            raise
        _let_go_of_stdout()
        raise SystemExit(128 + signal.SIGPIPE) from None
    except OSError as error:
        sentence = sentence_of(error)
        if sentence is None:
            raise
        _let_go_of_stdout()
        # A command that has reported the error fails once more when its buffer is flushed.
        if not (isinstance(error.__context__, SystemExit) and error.__context__.code):
            print(f"lmm-r1: error: {sentence}", file=sys.stderr)
        raise SystemExit(1) from None
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in SERVER_PACKAGES:
            missing = f"this command needs {package}: pip install 'lmm-r1[serve]'"
        elif package in EXTRA_PACKAGES:
            missing = EXTRA_MISSING.format(package)
        else:
            raise
        print(f"lmm-r1: error: {missing}", file=sys.stderr)
        raise SystemExit(1) from None
    except SystemExit as end:
        # rich turns it into an exit code of its own.
        if isinstance(end.__context__, BrokenPipeError):
            raise SystemExit(128 + signal.SIGPIPE) from None
        raise


@contextlib.contextmanager
def user_errors(prog: str) -> Iterator[None]:
    """Turn errors that a user can fix into one line on stderr and exit code 1, and a stop into one with its own code.

    These are UserError, and whatever Python or a library raises when a disk is full.
    """
    try:
        yield
    except RunStopped as stop:
        print(f"{prog}: {stop}", file=sys.stderr)
        raise SystemExit(stop.exit_code) from None
    except KeyboardInterrupt:
        print(f"{prog}: stopped by Ctrl-C", file=sys.stderr)
        raise SystemExit(128 + signal.SIGINT) from None
    except ListedError as error:
        # Every rank reads the same rows, and one lists what is wrong with them.
        lines = error.lines if os.environ.get("RANK", "0") == "0" else ()
        print(f"{prog}: error: {error.sentence}", *lines, sep="\n  ", file=sys.stderr)
        raise SystemExit(1) from None
    except UserError as error:
        message = str(in_worker(error))
        # What a library said, as part of a message, may hold line breaks.
        print(f"{prog}: error: {' '.join(line.strip() for line in message.splitlines())}", file=sys.stderr)
        raise SystemExit(1) from None
    except Exception as error:  # each library has an error of its own for a full disk
        sentence = sentence_of(error)
        if sentence is None:
            raise
        print(f"{prog}: error: {sentence}", file=sys.stderr)
        raise SystemExit(1) from None


def _let_go_of_stdout() -> None:
    """Discard what is left in the buffer, which the interpreter would flush at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _reader_has_gone() -> bool:
    """Return whether standard output is broken, and not a connection of the command."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))


def _run(arguments: list[str]) -> None:
    if arguments[:1] == ["--kit"]:
        _use_kit(arguments[1:2])
        arguments = arguments[2:]
    name = arguments[0] if arguments else "--help"
    if name in HELP and arguments[1:]:
        _run([arguments[1], "--help"])
    elif name in HELP:
        print(_usage())
    elif name == "--version":
        from importlib.metadata import version

        print(f"lmm-r1 {version('lmm-r1')}")
    elif name in COMMANDS:
        importlib.import_module(f"lmm_r1.cli.{name}").main(arguments[1:])
    else:
        typed = name.lower().replace("-", "_")
        begun = [command for command in COMMANDS if command.startswith(f"{typed}_") or command == f"train_{typed}"]
        meant = begun or [near for near in [nearest(typed, known=COMMANDS)] if near]
        hint = f"did you mean {', '.join(meant)}?" if meant else "`lmm-r1 --help` lists the commands"
        print(f"lmm-r1: error: unknown command {name}; {hint}", file=sys.stderr)
        raise SystemExit(2)


def _use_kit(given: list[str]) -> None:
    """Register the kit of a file for the command and all that it starts; exits with code 2 if it cannot be used."""
    from lmm_r1.errors import UserError
    from lmm_r1.lmm_kits.registry import register_kit

    cpu.prepare_process()
    try:
        if not given:
            raise UserError("--kit needs the file of a kit: FILE.py:NAME, or what lmm-r1 kits --derive has written")
        register_kit(given[0])
    except UserError as error:
        print(f"lmm-r1: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def _usage() -> str:
    width = max(map(len, COMMANDS))
    columns, indent = shutil.get_terminal_size().columns, " " * (width + 4)
    listed = ""
    for title, group in GROUPS.items():
        lines = (
            textwrap.fill(f"  {name:<{width}}  {what}", columns, subsequent_indent=indent)
            for name, what in group.items()
        )
        listed += "\n".join((f"{title}:", *lines, "\n"))
    return f"usage: lmm-r1 COMMAND [FLAGS]\n\n{listed}lmm-r1 help COMMAND shows examples and flags of a command.\nlmm-r1 --kit FILE COMMAND takes a kit: FILE.py, or one of lmm-r1 kits --derive."


LINE_SECONDS = 10.0
SKIPPED_ROWS_CODE = 3


class ProgressLines:
    """Prints a line on stderr, at most one every few seconds."""

    def __init__(self) -> None:
        self._shown = time.perf_counter()

    def __call__(self, line: str, *, is_last: bool = False) -> None:
        """Args: is_last: print it in any case."""
        now = time.perf_counter()
        if is_last or now - self._shown >= LINE_SECONDS:
            self._shown = now
            print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def job_progress(what: str, *, total: int, done: int) -> Iterator[Callable[[JobTotals], None]]:
    """Yield the function that shows the totals of this session.

    Args:
        total: rows of the whole job.
        done: rows that earlier sessions finished.
    """
    began, show_line = time.perf_counter(), ProgressLines()

    def show(totals: JobTotals) -> None:
        finished, seconds = totals.rows + totals.skipped, time.perf_counter() - began
        left = (total - done - finished) * seconds / finished
        show_line(
            f"{what}: {done + finished}/{total} rows  {totals.tokens / seconds:,.0f} tokens/s  "
            f"{totals.skipped} skipped  {left:,.0f} s left",
            is_last=done + finished == total,
        )

    yield show


def report_skipped(prog: str, skipped: Sequence[SkippedRow], *, listed_in: str | None = None) -> NoReturn:
    """List rows that were left out on stderr and end the process with `SKIPPED_ROWS_CODE`.

    Args:
        listed_in: file that lists all of them, if only some are printed.
    """
    from lmm_r1.data.reading import reasons

    assert skipped, "a command without skipped rows ends as it is"
    rows = "1 row was" if len(skipped) == 1 else f"{len(skipped):,} rows were"
    print(f"{prog}: {rows} left out, and everything else was done:", file=sys.stderr)
    for line in reasons(skipped, listed_in=listed_in):
        print(f"  {line}", file=sys.stderr)
    raise SystemExit(SKIPPED_ROWS_CODE)
