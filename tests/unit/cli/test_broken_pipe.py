"""A command whose output nobody reads to its end."""

import os
import subprocess
import sys

import pytest

from lmm_r1 import cli


@pytest.mark.parametrize(
    "argv", [["cli", "--help"], ["cli", "evaluate", "--list_suites"], ["cli.train_ppo_ray", "--help"], ["cli.kits"]]
)
def test_a_command_ends_without_a_word_when_its_reader_has_gone(argv):
    module, *arguments = argv
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", f"lmm_r1.{module}", *arguments]
    ended = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (128 + 13, "")


def test_a_broken_connection_of_the_command_itself_is_no_reader_that_has_gone(monkeypatch):
    def broken(arguments):
        raise BrokenPipeError("a socket")

    monkeypatch.setattr(cli, "_run", broken)
    with open(os.devnull, "w") as stdout, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stdout)
        with pytest.raises(BrokenPipeError, match="a socket"):
            cli.main([])
