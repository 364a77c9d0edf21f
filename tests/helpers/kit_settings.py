"""Which settings a contract is asked in of which kits: all of three that differ in kind, and of each other a share by turns."""

from collections.abc import Iterable, Sequence

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
