"""Print the tests marked `full` that a change asks for; `.ci/run` runs them after `make test`.

`python .ci/full_tests.py` prints files and folders, one per line: those of the rooms and the test files that changed
since the commit in `.ci/full_suite`. Whoever runs `make test-full` writes the commit there, and how far it passed.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[1]
# What every kit must keep to changes with these rooms.
OF_ALL_KITS = ("lmm_kits", "models")


def main() -> None:
    """Compare the checkout with that commit; without it, as in a shallow clone, everything is asked for."""
    passed = (ROOT / ".ci" / "full_suite").read_text(encoding="utf-8").split()[0]
    command = ["git", "diff", "--name-only", passed]
    changed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    chosen = ["tests"] if changed.returncode else asked_for(changed.stdout.splitlines())
    sys.stdout.writelines(f"{path}\n" for path in chosen if (ROOT / path).exists())


def asked_for(changed: Iterable[str]) -> list[str]:
    """Return the files and folders of tests for changed files, each once."""
    chosen = set()
    for path in map(PurePosixPath, changed):
        package, *rest = path.parts
        if package == "remote_rm":
            chosen.add("tests/unit/remote_rm")
        elif package == "lmm_r1" and len(rest) > 1:
            chosen.add("tests/contracts" if rest[0] in OF_ALL_KITS else f"tests/unit/{rest[0]}")
        elif package == "tests" and path.name.startswith("test_"):
            chosen.add(str(path))
    folders = {path for path in chosen if not path.endswith(".py")}
    return sorted(path for path in chosen if path in folders or not any(path.startswith(f"{one}/") for one in folders))


if __name__ == "__main__":
    main()
