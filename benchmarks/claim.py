"""The arms of examples/scripts/lmm_r1/reproduce_small.sh compared as docs/claim.md says; JSON on the last line.

python benchmarks/claim.py runs/claim --trained count relations dice bar_chart
python benchmarks/claim.py runs/shares runs/wide --trained count relations dice bar_chart --output shares.json
python benchmarks/claim.py --power [--output benchmarks/results/claim_power.json]

The first form reads seed*/evaluation.responses.jsonl and writes claim.json, claim.md and claim.svg into the folder. Of
several folders, the arms are compared within each, and the files are shares.json, shares.md and shares.svg. The last form
simulates studies and prints the smallest effects that they detect.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from measuring import parser_of, publish
from numpy.typing import NDArray
from scipy import stats

Array = NDArray[np.float64]
REFERENCE = "direct"
START = "cold_start"
DRAWS = 2000
"""Of the bootstrap, and simulated studies of each size of effect."""
SPREADS = (2.0, 4.0, 6.0)
"""Standard deviations of an arm's true advantage over seeds, in points, that --power assumes."""
RESPONSES = 800
"""Judged responses of an arm and seed: four families, 100 rows each, two samples of each row."""


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("roots", type=Path, nargs="*", help="folders of reproduce_small.sh")
    parser.add_argument("--trained", nargs="+", default=[], help="families that RL trains on; the others are held out")
    parser.add_argument("--power", action="store_true", help="simulate what sizes of effects can be detected")
    arguments = parser.parse_args()
    if arguments.power:
        publish({"benchmark": "claim", "detectable_points": detectable()}, arguments.output)
        return
    if not arguments.roots or not arguments.trained:
        parser.error("give the folder of a study and --trained, or --power")
    studies = {root.name: compared(read_scores(root), trained=arguments.trained) for root in arguments.roots}
    result = next(iter(studies.values()))
    if len(studies) > 1:
        result["arms"] = {
            f"{name} {arm}": one for name, study in studies.items() for arm, one in study["arms"].items()
        }
    file = arguments.output or arguments.roots[0] / "claim.json"
    file.with_suffix(".md").write_text(table_of(result))
    file.with_suffix(".svg").write_text(picture_of(result))
    publish({"benchmark": "claim", **result}, file)


def read_scores(root: Path) -> dict[str, dict[str, Array]]:
    """Return the share of right samples by checkpoint and file, each (seeds, rows)."""
    from lmm_r1.records.responses import read_responses

    found: dict[str, dict[str, list[list[float]]]] = {}
    for file in sorted(root.glob("seed*/evaluation.responses.jsonl")):
        rows: dict[tuple[str, str], dict[int, list[bool]]] = {}
        for one in read_responses(file):
            samples = rows.setdefault((one.checkpoint, one.file), {}).setdefault(one.index, [])
            samples.append(one.verdicts["math"].right)
        for (checkpoint, name), samples_of in rows.items():
            shares = [sum(samples_of[index]) / len(samples_of[index]) for index in sorted(samples_of)]
            found.setdefault(checkpoint, {}).setdefault(name, []).append(shares)
    if not found:
        raise SystemExit(f"{root} has no seed*/evaluation.responses.jsonl; run reproduce_small.sh into it")
    return {arm: {name: np.array(rows) for name, rows in files.items()} for arm, files in found.items()}


def compared(scores: Mapping[str, Mapping[str, Array]], *, trained: Sequence[str]) -> dict:
    """Return each arm's accuracy and its advantage over `direct`, in points, by group of files and by file."""
    names = list(scores[START])
    groups = {f"{modality}, {kind}": [
        name for name in names
        if name.endswith(f".{modality}") and (name.partition(".")[0] in trained) == (kind == "trained")
    ] for modality in ("image", "text") for kind in ("trained", "held out")}  # fmt: skip
    groups |= {name: [name] for name in names}
    arms: dict[str, dict[str, dict[str, object]]] = {}
    for arm, files in scores.items():
        arms[arm] = {}
        for group, members in groups.items():
            if not members:
                continue
            own = np.stack([files[name] for name in members], axis=1)
            entry: dict[str, object] = {"accuracy": figures(own)}
            if arm not in (START, REFERENCE):
                entry["advantage"] = figures(own - np.stack([scores[REFERENCE][name] for name in members], axis=1))
            arms[arm][group] = entry
    return {"seeds": len(own), "rows": own.shape[2], "arms": arms}


def figures(values: Array) -> dict[str, object]:
    """Return mean and 95 % intervals, in points, of values by (seed, family, row).

    The mean weighs all families equally. `over_seeds` is Student's interval of the seeds' means, None for one seed;
    `bootstrap` draws seeds and, in each family, rows anew, the same rows for all seeds.
    """
    seeds = 100 * values.mean(axis=(1, 2))
    count, families, rows = values.shape
    rng = np.random.default_rng(0)
    means = []
    for _ in range(DRAWS):
        by_seed = rng.multinomial(count, np.full(count, 1 / count)) / count
        by_row = rng.multinomial(rows, np.full(rows, 1 / rows), size=families) / rows
        means.append(100 * np.einsum("s,fr,sfr->", by_seed, by_row, values) / families)
    return {
        "mean": round(float(seeds.mean()), 2),
        "seeds": [round(float(seed), 2) for seed in seeds],
        "over_seeds": student(seeds),
        "bootstrap": [round(float(edge), 2) for edge in np.percentile(means, [2.5, 97.5])],
    }


def student(seeds: Array) -> list[float] | None:
    """Return the 95 % interval of the mean of independent figures."""
    if len(seeds) < 2:
        return None
    half = stats.t.ppf(0.975, len(seeds) - 1) * seeds.std(ddof=1) / math.sqrt(len(seeds))
    return [round(float(seeds.mean() - half), 2), round(float(seeds.mean() + half), 2)]


def verdict(interval: Sequence[float] | None) -> str:
    """Say what an interval of an advantage means for the claim that it is above 0."""
    if interval is None or interval[0] <= 0 <= interval[1]:
        return "undecided"
    return "held" if interval[0] > 0 else "refuted"


def table_of(result: Mapping) -> str:
    """Return the figures of the groups as a table in Markdown, with the verdict on the claim."""
    lines = [
        "| arm | group | accuracy | advantage over direct | over seeds | bootstrap |",
        "|---|---|---|---|---|---|",
    ]
    for arm, groups in result["arms"].items():
        for group, entry in groups.items():
            one = entry.get("advantage")
            cells = (
                (f"{one['mean']:+.1f}", _edges(one["over_seeds"]), _edges(one["bootstrap"])) if one else ("", "", "")
            )
            lines.append(f"| {arm} | {group} | {entry['accuracy']['mean']:.1f} | {' | '.join(cells)} |")
    claims = [one["image, trained"]["advantage"] for arm, one in result["arms"].items() if arm.endswith("fre_text")]
    said = ", ".join(verdict(claim["over_seeds"]) for claim in claims) or "not tested"
    return "\n".join([f"FRE on text before MGT against direct RL, {result['seeds']} seeds: {said}.", "", *lines, ""])


def _edges(interval: Sequence[float] | None) -> str:
    return f"{interval[0]:+.1f} to {interval[1]:+.1f}" if interval else ""


def picture_of(result: Mapping) -> str:
    """Return an SVG with the accuracy of each arm on images of trained families: mean, bootstrap interval, seeds."""
    arms = result["arms"]
    size = f'width="660" height="{40 * len(arms) + 72}"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">']
    for tick in range(0, 101, 20):
        x = 120 + 5 * tick
        parts.append(
            f'<path d="M{x} 20V{40 * len(arms) + 20}" stroke="#ccc"/><text x="{x}" y="{40 * len(arms) + 40}" text-anchor="middle">{tick} %</text>'
        )
    for place, (arm, groups) in enumerate(arms.items()):
        one, y = groups["image, trained"]["accuracy"], 40 * place + 40
        low, high = (120 + 5 * edge for edge in one["bootstrap"])
        parts.append(
            f'<text x="110" y="{y + 4}" text-anchor="end">{arm}</text><path d="M{low} {y}H{high}" stroke="#06c" stroke-width="4"/>'
        )
        parts.append(f'<path d="M{120 + 5 * one["mean"]} {y - 9}V{y + 9}" stroke="#06c" stroke-width="3"/>')
        parts += [f'<circle cx="{120 + 5 * seed}" cy="{y}" r="3" fill="#fff" stroke="#000"/>' for seed in one["seeds"]]
    what = "test images of the trained families: mean, 95 % bootstrap interval, seeds"
    parts.append(f'<text x="120" y="{40 * len(arms) + 62}">{what}</text>')
    return "\n".join([*parts, "</svg>", ""])


def detectable() -> dict[str, dict[str, float | None]]:
    """Return, by seeds and spread, the smallest advantage that is found in 80 % of simulated studies; None above 60."""
    rng = np.random.default_rng(0)
    return {
        f"{seeds} seeds": {
            f"spread {spread:g}": next(
                (points for points in np.arange(1.0, 60.5, 0.5).tolist() if found(points, spread, seeds, rng) >= 0.8),
                None,
            )
            for spread in SPREADS
        }
        for seeds in (3, 5, 10)
    }


def found(points: float, spread: float, seeds: int, rng: np.random.Generator) -> float:
    """Return the share of studies whose interval over seeds lies above 0; the reference is right half of the time."""
    shape = (DRAWS, seeds)
    true = np.clip(0.5 + (points + rng.normal(0, spread, shape)) / 100, 0, 1)
    seen = 100 * (rng.binomial(RESPONSES, true) - rng.binomial(RESPONSES, 0.5, shape)) / RESPONSES
    half = stats.t.ppf(0.975, seeds - 1) * seen.std(axis=1, ddof=1) / math.sqrt(seeds)
    return float((seen.mean(axis=1) > half).mean())


if __name__ == "__main__":
    main()
