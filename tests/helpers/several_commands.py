"""One rank that runs several `lmm-r1 train_sft` commands, one after another: its libraries are loaded once.

`python -m helpers.several_commands FILE`: the file has for each command a free port, for the ranks to meet at, and its arguments;
what each prints, and its exit code, are written beside it.
"""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from helpers.commands_here import Ended, run_here
from helpers.launched_ranks import free_ports, launch


def run_in_ranks(commands: Sequence[Sequence[str]], *, count: int, folder: Path) -> list[list[Ended]]:
    """How each command ended, on each of so many ranks; `folder` is made."""
    folder.mkdir()
    # The store of one meeting may still stand when the next one begins.
    listed = [(port, list(map(str, argv))) for port, argv in zip(free_ports(len(commands)), commands, strict=True)]
    (folder / "commands.json").write_text(json.dumps(listed))
    launch("helpers.several_commands", str(folder / "commands.json"), count=count, folder=folder / "logs").wait()
    ranks = [json.loads((folder / f"ended{rank}.json").read_text()) for rank in range(count)]
    return [[Ended(**ended) for ended in of_ranks] for of_ranks in zip(*ranks, strict=True)]


def main() -> None:
    file = Path(sys.argv[1])
    ended = []
    for port, argv in json.loads(file.read_text()):
        os.environ["MASTER_PORT"] = str(port)
        ended.append(run_here("train_sft", argv, folder=file.parent))
    (file.parent / f"ended{os.environ['RANK']}.json").write_text(json.dumps([vars(one) for one in ended]))


if __name__ == "__main__":
    main()
