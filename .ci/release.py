"""Prepare a release: release.py VERSION [--root FOLDER].

Writes the version into pyproject.toml and over the unreleased changes in CHANGELOG.md. `make release` then builds and checks.
"""

import argparse
import re
import sys
from datetime import date
from pathlib import Path

UNRELEASED = "## Unreleased"


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
    """Write both files; raises ValueError, and writes nothing, if the version or the list of changes is not usable."""
    project, changes = root / "pyproject.toml", root / "CHANGELOG.md"
    settings, log = project.read_text(encoding="utf-8"), changes.read_text(encoding="utf-8")
    found = re.search(r'^version = "(\d+\.\d+\.\d+)"$', settings, flags=re.MULTILINE)
    if found is None:
        raise ValueError(f'{project} has no line version = "X.Y.Z"')
    if not re.fullmatch(r"\d+\.\d+\.\d+", version) or _numbers(version) <= _numbers(found[1]):
        raise ValueError(f"VERSION {version} must be three numbers, X.Y.Z, above {found[1]}")
    if log.count(f"{UNRELEASED}\n") != 1:
        raise ValueError(f"{changes} must have one heading {UNRELEASED!r} with the changes of this release")
    heading = f"## {version} ({date.today().isoformat()})"
    project.write_text(settings.replace(found[0], f'version = "{version}"'), encoding="utf-8")
    changes.write_text(log.replace(f"{UNRELEASED}\n", f"{heading}\n"), encoding="utf-8")


def _numbers(version: str) -> list[int]:
    return [int(number) for number in version.split(".")]


if __name__ == "__main__":
    main()
