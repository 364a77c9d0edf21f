"""The report in a real browser."""

import re
import shutil
import subprocess

import pytest
from helpers.run_folders import write_curriculum

from lmm_r1.cli.report import main

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome on PATH"),
]

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --virtual-time-budget=3000 --dump-dom"
).split()
USE_THE_FILTERS = """
const form = document.getElementById("filters");
form.elements.stage.value = "mgt";
form.elements.verdict.value = "wrong";
form.elements.low.value = "5";
form.elements.text.value = "THE CARD SHOWS";
form.elements.sort.value = "-step";
form.dispatchEvent(new Event("input"));
"""
POINT_AT_A_CHART = """
const svg = document.querySelector("#stage-2 svg.chart");
const box = svg.getBoundingClientRect();
svg.dispatchEvent(new PointerEvent("pointermove", { clientX: box.right - 1, clientY: box.top + 40 }));
"""


@pytest.fixture
def page(tmp_path):
    write_curriculum(tmp_path / "demo", steps=12)
    main([str(tmp_path / "demo"), "--max-rollouts", "120"])
    return tmp_path / "demo" / "report.html"


def rendered(page, *, profile, script=""):
    """Return the document after its scripts, and then `script`, have run."""
    if script:
        html = page.read_text(encoding="utf-8").replace("</body>", f"<script>{script}</script></body>")
        page = page.with_name("used.html")
        page.write_text(html, encoding="utf-8")
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=True)
    return done.stdout


def cards(dom):
    return re.findall(r'<article class="card">.*?</article>', dom, re.S)


def test_the_first_fifty_rollouts_are_shown_and_the_rest_wait(page, tmp_path):
    dom = rendered(page, profile=tmp_path / "profile")

    assert len(cards(dom)) == 50
    assert "Showing 50 of 120 that match." in dom
    assert '<button id="more" type="button">Show 50 more</button>' in dom
    first = cards(dom)[0]
    assert '<span class="tag">&lt;think&gt;</span><span class="think">The tens give' in first
    assert re.search(r'<span class="answer">\d+</span>', first)


def test_filters_search_and_order_change_which_rollouts_are_shown(page, tmp_path):
    dom = rendered(page, profile=tmp_path / "profile", script=USE_THE_FILTERS)

    shown = cards(dom)
    steps = [int(step) for step in re.findall(r"<b>mgt</b> step (\d+)", dom)]
    assert 0 < len(shown) == len(steps)
    assert all('<span class="badge wrong">wrong</span>' in card for card in shown)
    assert all('<img alt="image of the prompt" src="data:image/png;base64,' in card for card in shown)
    assert steps == sorted(steps, reverse=True)
    assert min(steps) >= 5


def test_pointing_at_a_chart_tells_the_values_of_the_nearest_step(page, tmp_path):
    dom = rendered(page, profile=tmp_path / "profile", script=POINT_AT_A_CHART)

    assert re.search(r'<div id="tip" style="[^"]*">step 12\nreward  1\.\d+</div>', dom)
