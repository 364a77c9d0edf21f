"""Which stages of several runs are compared with each other."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from lmm_r1.records.run import Run
from lmm_r1.report.stage_table import StageRow, stage_rows


@dataclass(frozen=True, kw_only=True)
class StageMatch:
    """One stage, in each run that has it."""

    name: str
    rows: dict[int, StageRow]
    """By the place of the run among those compared."""


def match_stages(runs: Sequence[Run]) -> list[StageMatch]:
    """Return the stages of all runs, those of the same name together; of runs with one stage each, all together.

    They keep the order of the first run; what only later runs have follows.
    """
    tables = [stage_rows(run) for run in runs]
    if all(len(table) == 1 for table in tables):
        names = dict.fromkeys(table[0].name for table in tables)
        return [StageMatch(name=", ".join(names), rows={run: table[0] for run, table in enumerate(tables)})]
    matches: dict[tuple[str, int], dict[int, StageRow]] = {}
    for run, table in enumerate(tables):
        # Two stages of a run may carry one name; the first of them meets the first of another run.
        seen: Counter[str] = Counter()
        for row in table:
            matches.setdefault((row.name, seen[row.name]), {})[run] = row
            seen[row.name] += 1
    return [StageMatch(name=name, rows=rows) for (name, _), rows in matches.items()]
