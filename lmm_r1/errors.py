"""The one exception that a command turns into a sentence and an exit code instead of a traceback."""


class UserError(ValueError):
    """Something the user gave is wrong; the message says what, where (file and line, flag and value) and what to do."""
