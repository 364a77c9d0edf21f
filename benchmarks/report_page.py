"""How a report with thousands of rollouts with images behaves in headless Chromium; JSON on the last line.

python benchmarks/report_page.py [--rollouts 5000] [--repeats 5] [--output benchmarks/results/report_page.json]
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import PIL.Image
from machine import machine_name

ROLLOUTS_PER_STEP = 8
ROLLOUTS_PER_PROMPT = 4
IMAGE_SIDE = 224
RESPONSE_WORDS = 400
WORDS = (
    "so the number of sides is then we add each angle and find that it equals the base times height over two".split()
)
# One change of the filters each: what is set, from no filter.
CHANGES = {
    "verdict": {"verdict": "wrong"},
    "step range": {"step_low": "100", "step_high": "400"},
    "reward range": {"reward_low": "1"},
    "tokens range": {"tokens_high": "600"},
    "sort by length": {"sort": "-tokens"},
    "search, found in all": {"text": "the angle"},
    "search, found in one": {"text": "needle 17"},
    "search, found in none": {"text": "no response says this"},
    "all at once": {
        "verdict": "right",
        "step_low": "50",
        "tokens_high": "900",
        "text": "the angle",
        "sort": "-reward",
    },
}
# From setting the fields to the frame that shows what matches.
CHANGE = """new Promise((done) => {
  const form = document.getElementById("filters");
  const settle = () => requestAnimationFrame(() => setTimeout(() => done(performance.now() - began)));
  new MutationObserver((_, observer) => { observer.disconnect(); settle(); })
    .observe(document.getElementById("rows"), { childList: true, attributes: true });
  const began = performance.now();
  for (const [name, value] of Object.entries(WANTED)) form.elements[name].value = value;
  form.elements.NAME.dispatchEvent(new Event("input", { bubbles: true }));
})"""
CLEAR = """new Promise((done) => {
  new MutationObserver((_, observer) => { observer.disconnect(); setTimeout(done, 50); })
    .observe(document.getElementById("rows"), { childList: true, attributes: true });
  document.querySelector("[form=filters]").click();
})"""
SCROLL = """new Promise((done) => {
  const list = document.getElementById("list");
  const began = performance.now();
  list.scrollTop = list.scrollHeight * Math.random();
  requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(() => done(performance.now() - began))));
})"""
NEXT = """new Promise((done) => {
  const began = performance.now();
  document.body.dispatchEvent(new KeyboardEvent("keydown", { key: "j", bubbles: true }));
  requestAnimationFrame(() => setTimeout(() => done(performance.now() - began)));
})"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=5000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(Path(folder), count=arguments.rollouts, repeats=arguments.repeats)
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


def measure(folder: Path, *, count: int, repeats: int) -> dict:
    """Write a run of `count` rollouts, report on it, and return sizes and times."""
    # The driver of the browser belongs to the tests.
    sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
    chromium = importlib.import_module("helpers.chromium")
    run = folder / "run"
    write_run(run, count=count)
    page = folder / "page.html"
    began = time.perf_counter()
    report = [sys.executable, "-m", "lmm_r1.cli.report", str(run), "--output", str(page), "--max_rollouts", str(count)]
    subprocess.run(report, check=True, stdout=subprocess.DEVNULL)
    seconds = time.perf_counter() - began
    version = subprocess.run([chromium.CHROMIUM, "--version"], check=True, capture_output=True, text=True).stdout
    with chromium.Browser(folder / "profile") as browser:
        return {
            "benchmark": "report_page",
            "machine": machine_name(),
            "browser": version.split(" built")[0].strip(),
            "rollouts": count,
            "images": len(list((run / "images").iterdir())),
            "page_megabytes": round(page.stat().st_size / 1e6, 1),
            "seconds_to_write": round(seconds, 1),
            **in_browser(browser, page, repeats=repeats),
        }


def in_browser(browser, page: Path, *, repeats: int) -> dict:
    """Return the milliseconds of loading, of each change of the filters, of a jump in the list and of the next row."""
    loads = []
    tab = None
    for _ in range(min(3, repeats)):
        if tab:
            tab.close()
        # Without a record of requests, each of which holds its image, so that watching costs no time.
        tab = browser.open(page.as_uri(), record=False)
        tab.until("document.querySelectorAll('.row').length > 0 && performance.getEntriesByType('paint').length > 1")
        loads.append(tab.evaluate("performance.getEntriesByType('navigation')[0].domInteractive"))
        paint = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
        loads[-1] = (tab.evaluate(paint), loads[-1])
    assert tab is not None, "loaded once at least"
    heap = tab.call("Runtime.getHeapUsage")["usedSize"]
    tab.call("Performance.enable", timeDomain="threadTicks")
    changes: dict[str, list[float]] = {name: [] for name in CHANGES}
    work: dict[str, list[float]] = {name: [] for name in CHANGES}
    for _ in range(repeats):
        for name, wanted in CHANGES.items():
            field = "text" if "text" in wanted else next(iter(wanted))
            script = CHANGE.replace("WANTED", json.dumps(wanted)).replace("NAME", field)
            busy = main_thread_milliseconds(tab)
            changes[name].append(tab.evaluate(script))
            work[name].append(main_thread_milliseconds(tab) - busy)
            tab.evaluate(CLEAR)
    tab.evaluate("document.getElementById('rollouts').scrollIntoView({ behavior: 'instant' })")
    return {
        "unit": "milliseconds, median",
        "first_contentful_paint": middle([paint for paint, _ in loads]),
        "list_drawn": middle([drawn for _, drawn in loads]),
        "change_of_filters_to_frame": {name: middle(times) for name, times in changes.items()},
        "of_it_work_of_the_main_thread": {name: middle(times) for name, times in work.items()},
        "slowest_change_of_filters": round(max(max(times) for times in changes.values()), 1),
        "jump_in_the_list_to_frame": middle([tab.evaluate(SCROLL) for _ in range(4 * repeats)]),
        "next_rollout_to_frame": middle([tab.evaluate(NEXT) for _ in range(4 * repeats)]),
        "rows_in_the_document": tab.evaluate("document.querySelectorAll('.row').length"),
        "script_heap_megabytes": round(heap / 1e6, 1),
    }


def main_thread_milliseconds(tab) -> float:
    """Return the processor time of the page's main thread so far, which other processes of the machine do not change."""
    metrics = {metric["name"]: metric["value"] for metric in tab.call("Performance.getMetrics")["metrics"]}
    return 1000 * metrics["TaskDuration"]


def middle(values: list[float]) -> float:
    return round(statistics.median(values), 1)


def write_run(folder: Path, *, count: int) -> None:
    """Write a run folder: an image for every four rollouts, responses of some 400 words."""
    chance = random.Random(1)
    (folder / "images").mkdir(parents=True)
    steps = -(-count // ROLLOUTS_PER_STEP)
    with (folder / "metrics.jsonl").open("w") as metrics:
        for step in range(1, steps + 1):
            metrics.write(json.dumps({"step": step, "seconds": 20.0 * step, "reward": chance.random()}) + "\n")
    with (folder / "rollouts.jsonl").open("w") as lines:
        for index in range(count):
            lines.write(json.dumps(one_rollout(chance, folder=folder, index=index)) + "\n")


def one_rollout(chance: random.Random, *, folder: Path, index: int) -> dict:
    """Return a rollout; the first of each prompt writes its image."""
    prompt = index // ROLLOUTS_PER_PROMPT
    name = f"images/{prompt}.png"
    if index % ROLLOUTS_PER_PROMPT == 0:
        # Smooth colours with some noise, as heavy as a small photograph.
        small = PIL.Image.frombytes("RGB", (28, 28), chance.randbytes(28 * 28 * 3))
        small.resize((IMAGE_SIDE, IMAGE_SIDE), PIL.Image.Resampling.BICUBIC).quantize(
            64, PIL.Image.Quantize.FASTOCTREE
        ).save(folder / name)
    words = chance.choices(WORDS, k=chance.randrange(RESPONSE_WORDS // 2, RESPONSE_WORDS * 3 // 2))
    right = chance.random() < 0.5
    truncated = chance.random() < 0.05
    content = [
        {"type": "image", "image": name},
        {"type": "text", "text": f"How large is angle {prompt} of the figure?"},
    ]
    return {
        "step": index // ROLLOUTS_PER_STEP + 1,
        "group": prompt % (ROLLOUTS_PER_STEP // ROLLOUTS_PER_PROMPT),
        "messages": [{"role": "user", "content": content}],
        "response": f"<think>needle {index}. the angle {' '.join(words)}</think><answer>{prompt % 180}</answer>",
        "label": str(prompt % 180),
        "reward": right + 0.5 * (not truncated),
        "scores": {"accuracy": float(right), "format": float(not truncated)},
        "response_tokens": int(1.5 * len(words)),
        "truncated": truncated,
    }


if __name__ == "__main__":
    main()
