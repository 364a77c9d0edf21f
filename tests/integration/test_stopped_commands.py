"""A run that its user or a launcher stops: in a terminal, by several signals, and with few files that it may open."""

import os
import resource
import signal
import sys
import time
from pathlib import Path

import pexpect
import pytest
from helpers.commands import ANSWERED, flags, write_rows

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
FEW_FILES = 256


def as_a_terminal_starts_it() -> None:
    """Nor does the shell of a background job, which may have started the tests, let a command take Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_NOFILE, (FEW_FILES, FEW_FILES))


def typed(child: pexpect.spawn) -> None:
    child.sendintr()


def sent_twice(child: pexpect.spawn) -> None:
    os.kill(child.pid, signal.SIGTERM)
    time.sleep(0.05)
    if child.isalive():
        os.kill(child.pid, signal.SIGTERM)


def started(folder: Path, model: Path, *, ranks: int) -> pexpect.spawn:
    values = {
        "model.model_name_or_path": model,
        "data.dataset": write_rows(folder, *[ANSWERED] * 2),
        "train.batch_size": 2,
        "train.max_epochs": 100_000,
        "ds.param_dtype": "fp32",
        "ckpt.output_dir": "run",
    }
    argv = ["-m", "lmm_r1.cli.train_sft", *flags(values)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1", "PET_NPROC_PER_NODE": str(ranks)}
    start = {"cwd": str(folder), "env": environment, "encoding": "utf-8", "timeout": 240, "dimensions": (50, 500)}
    return pexpect.spawn(sys.executable, argv, preexec_fn=as_a_terminal_starts_it, **start)


@pytest.mark.parametrize(
    ("stop", "name", "code", "ranks"),
    [(typed, "Ctrl-C", 130, 1), (typed, "Ctrl-C", 130, 2), (sent_twice, "SIGTERM", 143, 1)],
)
def test_a_run_ends_after_its_step_with_one_sentence_and_goes_on(stop, name, code, ranks, tiny_checkpoint, tmp_path):
    child = started(tmp_path, tiny_checkpoint("llm"), ranks=ranks)
    child.expect(r"sft step 3/")
    stop(child)
    child.expect(pexpect.EOF)
    child.close()
    assert (child.exitstatus if child.signalstatus is None else 128 + child.signalstatus) == code
    said = child.before.splitlines()
    assert [line for line in said if "once more ends it" in line] == [
        f"{'^C' * (stop is typed)}{name}: after this step; once more ends it at once"
    ]
    (ending,) = [line for line in said if "stopped at step" in line]
    step = int(ending.partition("stopped at step ")[2].partition("/")[0])
    assert ending.startswith(
        f"lmm-r1 train_sft: {name}: sft stopped at step {step}/100000; step {step} is saved in run/checkpoints"
    )
    assert not [line for line in said if "Traceback" in line]
    again = started(tmp_path, tiny_checkpoint("llm"), ranks=ranks)
    again.expect(rf"resumed at step {step}/100000")
    again.expect(rf"sft step {step + 1}/")
    typed(again)
    again.expect(pexpect.EOF)


def test_two_processes_that_are_stopped_while_they_start_say_one_sentence(tiny_checkpoint, tmp_path):
    child = started(tmp_path, tiny_checkpoint("llm"), ranks=2)
    child.expect("sets another number")
    time.sleep(1)
    typed(child)
    child.expect(pexpect.EOF)
    child.close()
    assert (child.exitstatus, child.before.split("\n", 1)[1].strip()) == (130, "^Clmm-r1 train_sft: stopped by Ctrl-C")
