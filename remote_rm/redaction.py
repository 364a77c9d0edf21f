"""Makes settings and messages safe to show: hides secrets, by the names of keys and in addresses, and control characters."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping

HIDDEN = "(hidden)"
"""What is written instead of a secret."""

_WHOLE = (
    r"key|token|auth|sig|pass|pwd|passwd|password|passphrase|secret|credentials?|authorization|cookie|bearer|signature"
)
# A part of a longer name, such as `my_api_key`; `input_key` and `image_token` name no secrets.
_END = (
    r"(?:api|access|secret|private|subscription|auth|account|encryption|master)[_-]?key|"
    r"(?:hf|access|auth|api|bearer|refresh|session|security|id|bot|rm)[_-]?token|"
    r"password|passwd|passphrase|secret|credentials?|authorization|cookies?|signature"
)
_SECRET_NAME = re.compile(rf"(?:{_WHOLE})|(?:.*_)?(?:{_END})")
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_NAME_IN_TEXT = rf"(?:[\w\-]*[_\-])?(?:{_END})"
# `"api_key": "abc"`, `api_key=abc`, `api-key: abc` and `Authorization: Bearer abc`. Hiding twice changes nothing, because
# errors are pickled, and made of one another.
_PAIR = re.compile(
    rf"(?P<before>\b{_NAME_IN_TEXT}\b\\?[\"']?\s*[:=]\s*)(?!\(hidden\))"
    r"(?P<value>(?:(?:Bearer|Basic|Token)\s+)?(?:\\?\"[^\"\\]*\\?\"|'[^']*'|[^\s,;&\"'}\])]+))",
    re.IGNORECASE,
)
_BEARER = re.compile(r"(?P<before>\b(?:Bearer|Basic)\s+)(?P<value>[A-Za-z0-9._~+/\-]{6,}=*)")
# The forms of keys that can be told from other words by themselves.
_KEY = re.compile(r"\b(?:sk|hf|ghp|gho|pk|xoxb|glpat)[-_][A-Za-z0-9_\-]{16,}|\bAKIA[A-Z0-9]{16}\b")
_USER = re.compile(r"(?P<before>\b[a-z][a-z0-9+.\-]*://)[^/?#\s\"'@]*@", re.IGNORECASE)
_QUERY = re.compile(
    r"(?P<before>\b[a-z][a-z0-9+.\-]*://[^\s\"'<>?#,]*[?#])(?!\(hidden\))[^\s\"'<>,)\]]+", re.IGNORECASE
)

# Line breaks and tabs are kept. C0 controls have pictures in Unicode (from U+2400); others are written as escapes.
_PICTURES = {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t"} | {0x7F: "\u2421"}
_C1_CONTROLS = range(0x80, 0xA0)
# They change the direction of the text after them.
_DIRECTION_CONTROLS = (*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F, 0x061C)
# Lone surrogates, which have no encoding.
_SURROGATES = range(0xD800, 0xE000)
_TABLE = (
    _PICTURES
    | {code: f"\\x{code:02x}" for code in _C1_CONTROLS}
    | {code: f"\\u{code:04x}" for code in _DIRECTION_CONTROLS}
    | dict.fromkeys(_SURROGATES, "\ufffd")
)
_OWN_LOGGERS = ("lmm_r1", "remote_rm")


def is_secret(name: str) -> bool:
    """Return whether the last part of a dotted name, such as `logger.wandb.key` or `apiKey`, is that of a secret."""
    last = _HUMP.sub("_", name.rpartition(".")[2]).lower().replace("-", "_")
    return _SECRET_NAME.fullmatch(last) is not None


def hidden_text(text: str) -> str:
    """Return a message without secrets: in addresses, after the name of a secret, and in headers."""
    if "://" in text:
        text = _QUERY.sub(rf"\g<before>{HIDDEN}", _USER.sub(rf"\g<before>{HIDDEN}@", text))
    text = _PAIR.sub(rf"\g<before>{HIDDEN}", text)
    return _KEY.sub(HIDDEN, _BEARER.sub(rf"\g<before>{HIDDEN}", text))


def neutral(text: str) -> str:
    """Return the text with control characters made visible, so they have no effect: an escape sequence begins with "␛"."""
    return text.translate(_TABLE)


def safe_message(text: str) -> str:
    """Return a message as terminals and logs may show it: without secrets, and neutral."""
    return neutral(hidden_text(text))


def hidden_settings(value: object, *, name: str = "") -> object:
    """Return settings without secrets: nested mappings and lists, and JSON and addresses in texts.

    A text of several words is not changed, because it may be a prompt.
    """
    if isinstance(value, Mapping):
        return {key: hidden_settings(inner, name=str(key)) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [hidden_settings(inner, name=name) for inner in value]
    if value in (None, "", HIDDEN) or isinstance(value, bool):
        return value
    if is_secret(name):
        return HIDDEN
    return _hidden_value(value) if isinstance(value, str) else value


def _hidden_value(text: str) -> str:
    if text.lstrip().startswith(("{", "[")):
        try:
            inner = json.loads(text)
        except (ValueError, RecursionError):
            return hidden_text(text)
        hidden = hidden_settings(inner)
        return text if hidden == inner else json.dumps(hidden, ensure_ascii=False)
    return text if any(map(str.isspace, text)) else hidden_text(text)


def hide_in_logs() -> None:
    """Let every logger of this process write without secrets, and those of this project without control characters."""
    if logging.getLogRecordFactory() is logging.LogRecord:
        logging.setLogRecordFactory(_Record)


class _Record(logging.LogRecord):
    def getMessage(self) -> str:
        message = super().getMessage()
        # Other libraries colour theirs.
        return safe_message(message) if self.name.partition(".")[0] in _OWN_LOGGERS else hidden_text(message)
