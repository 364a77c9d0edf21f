"""Print pip's settings as the environment variables of uv, a NAME=VALUE per line: `pip config list | uv_settings.py`.

Ends with code 1, and the setting's name, where uv has no counterpart: pip has to install then.
"""

import ast
import sys

VARIABLES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "constraint": "UV_CONSTRAINT",
    "cert": "SSL_CERT_FILE",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "timeout": "UV_HTTP_TIMEOUT",
}
# They change what pip prints and keeps, not what it installs.
WITHOUT_EFFECT = {
    "cache-dir",
    "disable-pip-version-check",
    "no-cache-dir",
    "no-input",
    "progress-bar",
    "root-user-action",
}
# pip's order: what comes later has precedence.
SECTIONS = ("global", "install", ":env:")


def main() -> None:
    """Translate the settings on standard input."""
    settings: dict[str, dict[str, str]] = {section: {} for section in SECTIONS}
    for line in sys.stdin.read().splitlines():
        place, _, value = line.partition("=")
        section, _, name = place.rpartition(".")
        if section in settings and name not in WITHOUT_EFFECT:
            settings[section][name] = " ".join(str(ast.literal_eval(value)).split())
    # As pip does: the first index is no better than the others.
    variables = {"UV_INDEX_STRATEGY": "unsafe-best-match"}
    for section in SECTIONS:
        for name, value in settings[section].items():
            if name not in VARIABLES:
                raise SystemExit(f"install: uv has no counterpart of pip's setting {name}")
            variables[VARIABLES[name]] = value.replace(" ", ",") if name == "find-links" else value
    sys.stdout.writelines(f"{name}={value}\n" for name, value in variables.items())


if __name__ == "__main__":
    main()
