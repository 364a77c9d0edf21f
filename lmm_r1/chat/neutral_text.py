"""Text from a model, a file or a path, made safe for a terminal: it can move no cursor and change no colour."""

# Line breaks and tabs stay. C0 controls have pictures in Unicode (U+2400 on); the others are written as escapes.
_PICTURES = {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t"} | {0x7F: "\u2421"}
_C1_CONTROLS = range(0x80, 0xA0)
# They reverse what is shown behind them, or end what did.
_DIRECTION_CONTROLS = (*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F, 0x061C)
# Halves of a character, which have no encoding of their own.
_SURROGATES = range(0xD800, 0xE000)
_TABLE = (
    _PICTURES
    | {code: f"\\x{code:02x}" for code in _C1_CONTROLS}
    | {code: f"\\u{code:04x}" for code in _DIRECTION_CONTROLS}
    | dict.fromkeys(_SURROGATES, "\ufffd")
)


def neutral(text: str) -> str:
    """Return the text with control characters shown instead of obeyed: an escape sequence begins with "␛"."""
    return text.translate(_TABLE)


def one_line(text: str) -> str:
    """Return neutral text on a single line."""
    return " ".join(neutral(text).split())
