"""docs/performance.md: one page, and its figures are those of the result files."""

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.contract

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
MOST_WORDS = 900


def result(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / name).read_text(encoding="utf-8"))


def test_the_page_is_short():
    assert len(PAGE.split()) <= MOST_WORDS


@pytest.mark.parametrize(("kind", "samples"), [("text", 16), ("image", 16)])
def test_the_update_took_what_its_file_says(kind, samples):
    [batch] = [one for one in result("train_step.json")["batches"] if (one["kind"], one["samples"]) == (kind, samples)]
    ways, speedups = batch["ways"], batch["speedup_of_shared"]
    seconds = " | ".join(f"{ways[way]['update_seconds']:.2f}" for way in ("openrlhf", "packed", "shared"))
    over = " | ".join(f"{speedups[f'update_over_{way}']:.1f} ×" for way in ("openrlhf", "packed"))
    peaks = " / ".join(f"{ways[way]['update_peak_mib']:,}" for way in ("openrlhf", "shared"))
    assert f"| {kind} | {samples} | {seconds} | {over} | {peaks} |" in PAGE


@pytest.mark.parametrize("name", ["rl_step.json", "rl_step_fp32.json"])
def test_a_step_of_rl_took_what_its_file_says(name):
    step = result(name)
    phases = [step["phases"][phase] for phase in ("generation", "make_experience", "ppo_train")]
    shown = " | ".join(f"{seconds:.1f}" for seconds in (*phases, step["seconds_per_step"]))
    assert f"| {step['dtype']} ([file](../benchmarks/results/{name})) | {shown} |" in PAGE


def test_the_other_figures_are_those_of_their_files():
    assert f"| {result('trl_step_fp32.json')['seconds_per_step']:.1f} |" in PAGE
    demo, step = result("gpu/demo_h200_summary.json"), result("gpu/rl3b.json")
    first, *_, last = demo["stages"]
    for name, label in (("text_accuracy", "text"), ("image_accuracy", "images")):
        assert f"{label} {100 * first[name]:.1f} → {100 * last[name]:.1f} %" in PAGE
    assert f"{demo['seconds']:.0f} s |" in PAGE
    assert f"{step['seconds_per_step']:.1f} s: generation {step['phases']['generation']:.1f}" in PAGE
