"""The report in a real browser."""

import json

import pytest
from helpers.chromium import CHROMIUM, Browser
from helpers.run_folders import cropped, rollout, write_curriculum, write_image, write_lines, write_stage

from lmm_r1.cli.report import main

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome on PATH")

HOSTILE = (
    "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>",
    "half a pair \ud800, a bell \x07, a null \x00, reversed \u202etxet",
    "x" * 100_000,
    "<think>" * 20_000,
    "",
)
COUNT = "document.getElementById('count').textContent"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """Two curricula of 12 steps, 192 rollouts each; the second learned less."""
    folder = tmp_path_factory.mktemp("runs")
    for name in ("one", "two"):
        write_curriculum(folder / name / "demo", steps=12)
    metrics = folder / "two" / "demo" / "fre" / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    write_lines(metrics, [row | {"reward": row["reward"] / 2} for row in rows])
    main([str(folder / "one" / "demo"), "--output", str(folder / "page.html")])
    main([str(folder / "one" / "demo"), str(folder / "two" / "demo"), "--output", str(folder / "comparison.html")])
    return folder


@pytest.fixture
def page(browser, demo):
    tab = browser.open((demo / "page.html").as_uri())
    yield tab
    tab.close()


@pytest.fixture
def comparison(browser, demo):
    tab = browser.open((demo / "comparison.html").as_uri())
    yield tab
    tab.close()


def choose(tab, **values):
    """Set fields of the filter and wait until the list follows."""
    tab.evaluate(f"""new Promise((done) => {{
          const form = document.getElementById("filters");
          for (const [name, value] of Object.entries({json.dumps(values)})) form.elements[name].value = value;
          form.elements.text.dispatchEvent(new Event("input", {{ bubbles: true }}));
          setTimeout(done, 150);
        }})""")


def matching(tab):
    """Return the data of every rollout in the list, in its order, read from the rows while scrolling through."""
    indices = tab.evaluate("""(async () => {
          const list = document.getElementById("list");
          const found = new Map();
          for (let top = 0; top <= list.scrollHeight; top += 300) {
            list.scrollTop = top;
            await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
            for (const row of document.querySelectorAll(".row")) found.set(Number(row.ariaPosInSet), row.id);
          }
          return [...found].sort((a, b) => a[0] - b[0]).map(([, id]) => Number(id.slice(4)));
        })()""")
    data = json.loads(tab.evaluate("document.getElementById('rollout-data').textContent"))
    return [data["rollouts"][index] for index in indices]


def test_the_page_loads_nothing_but_itself_and_complains_of_nothing(page, comparison, demo):
    for tab, name in ((page, "page.html"), (comparison, "comparison.html")):
        tab.until("document.querySelectorAll('.row').length > 0")
        loaded = [address for address in tab.requests() if not address.startswith("data:image/")]
        assert loaded == [(demo / name).as_uri()]
        assert tab.complaints() == []


def test_ranges_verdict_stage_and_search_narrow_the_list_together(page):
    choose(page, stage="mgt", verdict="wrong", step_low="5", step_high="9", tokens_low="20", text="THE CARD SHOWS")
    found = matching(page)
    assert found
    assert {rollout["series"] for rollout in found} == {2}
    assert {rollout["verdict"] for rollout in found} == {"wrong"}
    assert 5 <= min(rollout["step"] for rollout in found)
    assert max(rollout["step"] for rollout in found) <= 9
    assert min(rollout["tokens"] for rollout in found) >= 20
    assert page.evaluate(COUNT).startswith(f"{len(found)} of 192 · 0.0 % right · ")
    assert page.evaluate("document.querySelector('.row img').src").startswith("data:image/png;base64,")
    choose(page, text="no response says this")
    assert page.evaluate(COUNT) == "No rollout matches these filters."
    page.click("[form='filters']")
    page.until(f"{COUNT}.startsWith('192 of 192')")


def test_hostile_responses_are_shown_as_text(browser, tmp_path):
    write_stage(tmp_path, name="<img src=x onerror='window.hacked = 3'>", steps=1, seconds=1.0, hour=9)
    write_image(tmp_path / "a.png", number=1)
    asked = [
        {"role": "<b>user", "content": [{"type": "text", "text": "<i>prompt</i>"}, {"type": "image", "image": "gone"}]}
    ]
    lines = [rollout(step=1, group=group, response=text, messages=asked) for group, text in enumerate(HOSTILE)]
    write_lines(tmp_path / "rollouts.jsonl", lines)
    main([str(tmp_path)])
    tab = browser.open((tmp_path / "report.html").as_uri())
    shown = "document.querySelector('.response').textContent"
    expected = [
        HOSTILE[0],
        "half a pair \N{REPLACEMENT CHARACTER}, a bell \u2407, a null \u2400, reversed \u202etxet",
        *HOSTILE[2:],
    ]
    tab.evaluate("document.getElementById('rollouts').scrollIntoView({ behavior: 'instant' })")
    for text in expected:
        assert (
            tab.evaluate(shown).encode("utf-8", "replace").decode().replace("?", "\N{REPLACEMENT CHARACTER}") == text
        )
        tab.press("j")
    assert tab.evaluate("window.hacked ?? null") is None
    assert tab.evaluate("document.querySelectorAll('#rollouts b, #rollouts i').length > 0")
    assert tab.evaluate("document.querySelector('.prompt').innerText").startswith("<b>user\n<i>prompt</i>")
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert [text for text in tab.complaints() if "favicon" not in text] == []


def test_an_episode_is_shown_turn_by_turn_with_the_box_on_its_source(browser, tmp_path):
    write_stage(tmp_path, name="crop", steps=1, seconds=1.0, hour=9)
    last = "<img src=x onerror='window.hacked = 4'><answer>7</answer>"
    lines = [cropped(tmp_path, last=last, end="turns"), cropped(tmp_path, step=2), rollout(step=3)]
    write_lines(tmp_path / "rollouts.jsonl", lines)
    main([str(tmp_path)])
    for width in (1280, 400):
        tab = browser.open((tmp_path / "report.html").as_uri(), width=width)
        tab.until(
            "[...document.querySelectorAll('#detail .framed img')].every((image) => image.complete && image.naturalWidth)"
        )
        box = tab.evaluate("""(() => {
              const [box, source] = [".box", ".pair img"].map((name) => document.querySelector(name).getBoundingClientRect());
              const shares = [box.left - source.left, box.top - source.top, box.width, box.height];
              return shares.map((value, at) => value / (at % 2 ? source.height : source.width));
            })()""")
        # From (100, 60) to (180, 120) of 400 x 300 pixels.
        assert box == pytest.approx([0.25, 0.2, 0.2, 0.2], abs=0.005)
        assert tab.evaluate("document.querySelector('.box').style.left") == "25%"
        pair = tab.evaluate(
            "[...document.querySelectorAll('.pair img')].map((image) => image.getBoundingClientRect().x)"
        )
        assert pair[0] < pair[1], "the part stands beside its source"
        shown = tab.evaluate("document.querySelector('.reply').innerText")
        for words in (
            "Turn 1",
            "Where is the sign?",
            "crop · malformed: bbox_2d [0.45, 0.2, 0.25, 0.4] has swapped corners",
            "crop · carried out",
            "looked +0.25",
            "Environment, as user",
            "original_image, x 100 to 180, y 60 to 120 of 400 × 300 pixels",
            last,
            "Out of turns: it would have continued beyond the turns of --agent.max_turns.",
            "tool calls 2",
        ):
            assert words in shown
        assert tab.evaluate("document.querySelectorAll('.think').length") == 2
        assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert tab.evaluate("window.hacked ?? null") is None
        assert [text for text in tab.complaints() if "favicon" not in text] == []
        tab.close()
    tab = browser.open((tmp_path / "report.html").as_uri())
    choose(tab, ended="finished")
    assert [found["step"] for found in matching(tab)] == [2]
    tab.evaluate("document.getElementById('rollouts').scrollIntoView({ behavior: 'instant' })")
    tab.click(".pair .picture")
    tab.until("document.querySelector('#lightbox p').textContent === '1 of 2 · 400 × 300 pixels'")
    assert tab.evaluate("document.querySelector('#lightbox .box').style.top") == "20%"
    tab.press("ArrowRight")
    tab.until("document.querySelector('#lightbox p').textContent === '2 of 2 · 80 × 60 pixels'")
    assert tab.evaluate("document.querySelector('#lightbox .box')") is None
    tab.close()
