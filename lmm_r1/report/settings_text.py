"""A stage's run_config.yaml as it may be shown: without credentials, since a report is made to be passed on."""

import re

HIDDEN = "(hidden)"
SETTING = re.compile(r"^(?P<before>\s*(?:-\s+)?(?P<name>[\w.\-\"']+)\s*:\s+)(?P<value>\S.*)$")
SECRET_NAME = re.compile(
    r"^(key|token|password|secret|credentials)$|(api_key|hf_token|access_token|auth_token)$|(_password|_secret)$"
)
EMPTY_VALUES = ("null", "~", "''", '""', "false", "true")


def without_secrets(text: str) -> str:
    """Return settings with the value of every key, token and password replaced, `key: ab12` as `key: (hidden)`."""
    return "\n".join(_shown(line) for line in text.splitlines())


def _shown(line: str) -> str:
    setting = SETTING.match(line)
    if not setting or setting["value"].strip().lower() in EMPTY_VALUES:
        return line
    return f"{setting['before']}{HIDDEN}" if is_secret(setting["name"].strip("\"'")) else line


def is_secret(name: str) -> bool:
    """Return whether a setting of this dotted name holds a credential."""
    return bool(SECRET_NAME.search(name.rpartition(".")[2].lower().replace("-", "_")))
