"""Prepare a release: release.py VERSION [--root FOLDER].

Writes the version over the unreleased changes in CHANGELOG.md and into every file of WITH_VERSION. `make release` then builds
and checks.
"""

import argparse
import re
import sys
from datetime import date
from pathlib import Path

UNRELEASED = "## Unreleased"
WITH_VERSION = {
    "pyproject.toml": 'version = "{}"',
    "remote_rm/pyproject.toml": 'version = "{}"',
    "docs/installation.md": "lmm_r1-{}-py3",
}
"""Files with the line that has the version in each."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("version")
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1])
    args = parser.parse_args()
    try:
        prepare(args.root, version=args.version)
    except ValueError as error:
        sys.exit(f"release: {error}")


def prepare(root: Path, *, version: str) -> None:
    """Write the files; raises ValueError, and writes nothing, if the version or a file is not usable."""
    changes = root / "CHANGELOG.md"
    log = changes.read_text(encoding="utf-8")
    project = (root / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(r'^version = "(\d+\.\d+\.\d+)"$', project, flags=re.MULTILINE)
    if found is None:
        raise ValueError(f'{root / "pyproject.toml"} has no line version = "X.Y.Z"')
    if not re.fullmatch(r"\d+\.\d+\.\d+", version) or _numbers(version) <= _numbers(found[1]):
        raise ValueError(f"VERSION {version} must be three numbers, X.Y.Z, above {found[1]}")
    if log.count(f"{UNRELEASED}\n") != 1:
        raise ValueError(f"{changes} must have one heading {UNRELEASED!r} with the changes of this release")
    written = {changes: log.replace(f"{UNRELEASED}\n", f"## {version} ({date.today().isoformat()})\n")}
    for name, pattern in WITH_VERSION.items():
        text, before = (root / name).read_text(encoding="utf-8"), pattern.format(found[1])
        if text.count(before) != 1:
            raise ValueError(f"{root / name} must have {before} once")
        written[root / name] = text.replace(before, pattern.format(version))
    for path, text in written.items():
        path.write_text(text, encoding="utf-8")


def _numbers(version: str) -> list[int]:
    return [int(number) for number in version.split(".")]


if __name__ == "__main__":
    main()
