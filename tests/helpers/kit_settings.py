"""Which settings a contract is asked in of which kits: all of three that differ in kind, and of each other a share by turns."""

from collections.abc import Iterable, Sequence

from lmm_r1.cli.kits import COLUMNS, kit_rows

# One without images, one with bidirectional attention to them, one with M-RoPE and videos.
SOME = frozenset({"llm", "gemma3", "qwen2_5_vl"})


def by_turns(names: Iterable[str], settings: Sequence[tuple], *, turns: int) -> list[tuple]:
    """Return cases (name, *setting): all settings for the kits of `SOME`, and every `turns`-th for each of the others.

    Kits that follow each other begin with other settings, so that `turns` of them have them all between them.
    """
    return [
        (name, *setting)
        for turn, name in enumerate(names)
        for number, setting in enumerate(settings)
        if name in SOME or number % turns == turn % turns
    ]


def kits_with(column: str) -> list[str]:
    """Return the kits that have a `yes` in a column of `lmm-r1 kits`: the contracts that show it are asked of all of them."""
    place = COLUMNS.index(column)
    return [row[0] for row in kit_rows(vllm_version="") if row[place] == "yes"]
