"""Print the tests marked `full` that a change asks for; `.ci/run` runs them after `make test`.

`python .ci/full_tests.py` prints files and folders, one per line: those of the packages and test files that changed since
the branch left `origin/main`, or since the commit in `.ci/full_suite`, which passed all tests, if that is nearer.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[1]
# What all kits must keep to after a change of these packages; the other contracts of all kits are left to `make nightly`.
OF_ALL_KITS = {"lmm_kits": "tests/contracts/test_kits.py", "models": "tests/contracts/test_kit_packing.py"}


def main() -> None:
    branched = git("merge-base", "HEAD", "origin/main")
    passed = (ROOT / ".ci" / "full_suite").read_text(encoding="utf-8").split()[0]
    passed_since = branched is not None and precedes(branched, passed) and precedes(passed, "HEAD")
    base = passed if branched in (None, git("rev-parse", "HEAD")) or passed_since else branched
    # None in a shallow clone that does not reach back so far: then everything is asked for.
    changed = git("diff", "--name-only", base)
    chosen = ["tests"] if changed is None else asked_for(changed.splitlines())
    sys.stdout.writelines(f"{path}\n" for path in chosen if (ROOT / path).exists())


def precedes(commit: str, later: str) -> bool:
    return git("merge-base", "--is-ancestor", commit, later) is not None


def git(*arguments: str) -> str | None:
    """Return what a command of git prints, or None if it fails."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return None if done.returncode else done.stdout.strip()


def asked_for(changed: Iterable[str]) -> list[str]:
    """Return the files and folders of tests for changed files, each once."""
    chosen = set()
    for path in map(PurePosixPath, changed):
        package, *rest = path.parts
        if package == "remote_rm":
            chosen.add("tests/unit/remote_rm")
        elif package == "lmm_r1" and len(rest) > 1:
            room = "/".join(rest[:2] if rest[0] == "tools" else rest[:1])
            chosen |= {f"tests/unit/{room}", OF_ALL_KITS.get(room, f"tests/unit/{room}")}
        elif package == "tests" and path.match("test_*.py"):
            chosen.add(str(path))
    return sorted(path for path in chosen if not any(str(folder) in chosen for folder in PurePosixPath(path).parents))


if __name__ == "__main__":
    main()
