"""The report in a real browser."""

import json

import pytest
from helpers.chromium import CHROMIUM, Browser
from helpers.conversations import message, row
from helpers.run_folders import cropped, judged_rows, rollout, write_curriculum, write_image, write_lines, write_stage

from lmm_r1.cli.report import main
from lmm_r1.data.messages import ImagePart
from lmm_r1.evaluation.board import CheckpointResponses, MeasuredFile, build_board
from lmm_r1.evaluation.page import build_page

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


def test_an_image_is_shown_large_and_closed_again(page):
    choose(page, stage="mgt")
    page.evaluate("document.getElementById('rollouts').scrollIntoView({ behavior: 'instant' })")
    page.click("#detail .picture")
    page.until("document.querySelector('#lightbox p').textContent === '56 × 56 pixels'")
    assert page.evaluate("document.getElementById('lightbox').open")
    assert page.evaluate("document.querySelector('#lightbox img').width") == 56 * 12
    page.press("Escape", code=27)
    assert not page.evaluate("document.getElementById('lightbox').open")
    page.press("i")
    assert page.evaluate("document.getElementById('lightbox').open")


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


@pytest.fixture(scope="module")
def evaluation(tmp_path_factory):
    """The page of an evaluation: two checkpoints, three verifiers' worth of columns, rows with an image."""
    folder = tmp_path_factory.mktemp("evaluation")
    write_image(folder / "card.png", number=3)
    asked = row(message("user", ImagePart(str(folder / "card.png")), "What is on the card?"))
    file = MeasuredFile(
        name="cards", source="cards.jsonl", verifiers=("math",), ks=(1, 2), rows={0: asked, 1: asked, 2: asked}
    )
    checkpoints = [
        CheckpointResponses(name=name, path=name, files={"cards": judged_rows(rights, checkpoint=name, file="cards")})
        for name, rights in (("cold_start", [[True, False]] * 3), ("after_reinforcement", [[True, True]] * 3))
    ]
    board = build_board(
        files=[file], checkpoints=checkpoints, baseline="cold_start", resamples=10, seed=0, settings={}
    )
    (folder / "evaluation.html").write_text(build_page(board))
    return folder / "evaluation.html"


@pytest.mark.parametrize("width", [1280, 390])
def test_tables_are_read_without_scrolling_sideways_on_a_desk_and_on_a_phone(browser, demo, evaluation, width):
    for page in (demo / "page.html", demo / "comparison.html", evaluation):
        tab = browser.open(page.as_uri(), width=width)
        tables = tab.evaluate("""[...document.querySelectorAll("table.stacked")].map((table) => {
              const cells = [...table.querySelectorAll("tbody td, tbody th")].map((cell) => cell.getBoundingClientRect());
              return [table.parentElement.scrollWidth - table.parentElement.clientWidth, Math.max(...cells.map((box) => box.right))];
            })""")
        assert tables
        for beyond, right in tables:
            assert beyond <= 0
            assert right <= width
        named = tab.evaluate("getComputedStyle(document.querySelector('td[data-head]'), '::before').content")
        assert (named == "none") == (width > 760)
        heads = "[...document.querySelectorAll('table.stacked td')].filter((cell) => !cell.dataset.head && !cell.querySelector('.swatch'))"
        assert tab.evaluate(f"{heads}.length") == 0, "on a phone each cell says what it is"
        tab.close()
