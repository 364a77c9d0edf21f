"""The exceptions that a command turns into a sentence and an exit code instead of a traceback."""


class UserError(ValueError):
    """Something the user gave is wrong; the message says what, where (file and line, flag and value) and what to do."""


class RunStopped(Exception):
    """A run was ended from outside; the message says where it stopped, what is saved and how to go on."""

    def __init__(self, message: str, *, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code
