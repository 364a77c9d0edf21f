"""The exceptions that a command turns into a sentence and an exit code instead of a traceback."""

from collections.abc import Sequence

from remote_rm.redaction import safe_message


class UserError(ValueError):
    """The user's input is wrong; the message says what, where (file and line, flag and value) and what to do.

    Messages reach terminals, records and logs: secrets in them are hidden, and control characters of rows made visible.
    """

    def __init__(self, message: object = "") -> None:
        super().__init__(safe_message(str(message)))


class ListedError(UserError):
    """Several inputs are wrong; each has its own line below the sentence."""

    def __init__(self, sentence: str, lines: Sequence[str]) -> None:
        super().__init__("\n  ".join((sentence, *lines)))
        self.sentence = sentence
        self.lines = lines


class RunStopped(Exception):
    """A run was stopped from outside; the message says where it stopped, what is saved and how to resume."""

    def __init__(self, message: str, *, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code
