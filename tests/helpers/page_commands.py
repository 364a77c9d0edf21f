"""The commands of a page of the docs, as they stand in its blocks of bash."""

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def commands_of(page: str | Path) -> list[list[list[str]]]:
    """For each block of bash the commands in it, as lists of words; a page is named from the repository's root on."""
    blocks = re.findall(r"^```bash\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    joined = [block.replace("\\\n", " ").splitlines() for block in blocks]
    return [[words for line in lines if (words := shlex.split(line, comments=True))] for lines in joined]
