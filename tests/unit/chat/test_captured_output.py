import os
import subprocess
import sys

import pytest

from lmm_r1.chat.captured_output import captured_output
from lmm_r1.errors import UserError

pytestmark = pytest.mark.unit


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
