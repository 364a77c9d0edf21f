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
from lmm_r1.evaluation.page_parts import number
from lmm_r1.report.charts import nice_axis

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome on PATH")

HOSTILE = (
    "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>",
    "half a pair \ud800, a bell \x07, a null \x00, reversed \u202etxet",
    "x" * 100_000,
    "<think>" * 20_000,
    "",
)
SHOWN = "[...document.querySelectorAll('.row')].map((row) => row.innerText)"
DETAIL = "document.getElementById('detail').innerText"
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


def test_only_the_rows_in_sight_are_in_the_document(page):
    assert page.evaluate(COUNT).startswith("192 of 192 · ")
    assert 5 < page.evaluate("document.querySelectorAll('.row').length") < 40
    assert [rollout["step"] for rollout in matching(page)] == [
        step for _ in "ab" for step in range(1, 13) for _ in range(8)
    ]
    assert page.evaluate("document.querySelectorAll('.row').length") < 40


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


def test_rewards_are_ranges_and_an_order(page):
    choose(page, reward_low="0.5", reward_high="1", sort="-tokens")
    lengths = [rollout["tokens"] for rollout in matching(page)]
    assert lengths == sorted(lengths, reverse=True)
    assert {rollout["reward"] for rollout in matching(page)} == {0.5}
    choose(page, reward_low="", reward_high="", verdict="truncated", sort="reward")
    assert {rollout["truncated"] for rollout in matching(page)} == {True}


def test_the_keyboard_walks_through_the_list_and_the_address_keeps_the_place(browser, page, demo):
    page.evaluate("document.getElementById('rollouts').scrollIntoView({ behavior: 'instant' })")
    for key in ("j", "j", "j", "k"):
        page.press(key)
    assert page.evaluate("document.querySelector('[aria-selected=true]').id") == "row-2"
    page.press("/")
    for key in "ones 8":
        page.press(key)
    page.until("document.getElementById('count').textContent.includes(' of 192') && location.hash.includes('text=')")
    found = page.evaluate(COUNT)
    assert not found.startswith("192")
    page.press("Escape", code=27)
    page.press("j")
    page.until("location.hash.includes('at=')")
    chosen = page.evaluate("document.querySelector('[aria-selected=true]').id")
    page.until(f"location.hash.endsWith('at={chosen[4:]}')")
    again = browser.open(page.evaluate("location.href"))
    assert again.evaluate(COUNT) == found
    assert again.evaluate("document.getElementById('filters').elements.text.value") == "ones 8"
    assert again.evaluate("document.querySelector('[aria-selected=true]').id") == chosen
    assert again.evaluate("CSS.highlights.get('found').size") > 0
    page.press("Escape", code=27)
    page.until(f"{COUNT}.startsWith('192 of 192')")


def test_all_responses_to_a_prompt_stand_together(page):
    page.evaluate("document.getElementById('rollouts').scrollIntoView({ behavior: 'instant' })")
    assert page.evaluate("document.querySelectorAll('.reply').length") == 1
    page.press("a")
    indices = page.evaluate("[...document.querySelectorAll('.reply')].map((reply) => Number(reply.dataset.index))")
    data = json.loads(page.evaluate("document.getElementById('rollout-data').textContent"))
    same = [index for index, rollout in enumerate(data["rollouts"]) if rollout["prompt"] == 0]
    assert sorted(indices) == same
    assert len(same) >= 4
    assert page.evaluate(DETAIL).count("What is 7 + 11?") == 1
    page.click(".tools button:nth-child(3)")
    assert page.evaluate(COUNT).startswith(f"{len(same)} of 192")


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


def test_pointing_at_a_chart_tells_the_values_of_the_nearest_step(page):
    point = """(() => {
      const svg = document.querySelector("#stage-2 svg.chart");
      const box = svg.getBoundingClientRect();
      svg.dispatchEvent(new PointerEvent("pointermove", { clientX: box.right - 1, clientY: box.top + 40 }));
      return document.getElementById("tip").textContent;
    })()"""
    assert page.evaluate(point).startswith("step 12\nreward  1.")


def test_a_run_can_be_switched_off_and_on(comparison):
    visible = "[...document.querySelectorAll('#curves-2 .lines > g')].map((line) => getComputedStyle(line).display)"
    colors = "[...document.querySelectorAll('#curves-2 .lines > g')].map((line) => getComputedStyle(line).color)"
    assert comparison.evaluate(visible)[:2] == ["inline", "inline"]
    assert len(set(comparison.evaluate(colors))) == 2
    comparison.click("[data-switch='1']")
    assert comparison.evaluate(visible)[:2] == ["inline", "none"]
    assert comparison.evaluate("document.querySelector('[data-switch=\"1\"]').ariaPressed") == "false"
    comparison.click("[data-switch='1']")
    assert comparison.evaluate(visible)[:2] == ["inline", "inline"]


def test_an_axis_fits_the_runs_that_are_left(comparison, demo):
    ticks = "[...document.querySelectorAll('#curves-2 .chart')[0].querySelectorAll('.scale text')].map((tick) => tick.textContent)"
    both = comparison.evaluate(ticks)
    rows = (demo / "one" / "demo" / "fre" / "metrics.jsonl").read_text().splitlines()
    rewards = [json.loads(row)["reward"] for row in rows]
    axis = nice_axis(min(rewards), max(rewards), start=0, end=1)
    comparison.click("[data-switch='1']")
    # The second run has half the reward of the first, so the axis of both starts lower.
    assert float(both[0]) < axis.low
    assert comparison.evaluate(ticks) == [tick.label for tick in axis.ticks(number)]
    boxes = comparison.evaluate("""(() => {
          const chart = document.querySelectorAll("#curves-2 .chart")[0];
          const line = chart.querySelector(".lines g path").getBoundingClientRect();
          const ticks = [...chart.querySelectorAll(".scale line")].map((tick) => tick.getBoundingClientRect().y);
          return [line.top, line.bottom, Math.min(...ticks), Math.max(...ticks)];
        })()""")
    top, bottom, highest, lowest = boxes
    assert highest - 2 < top < bottom < lowest + 2
    assert bottom - top > 0.6 * (lowest - highest)
    comparison.click("[data-switch='1']")
    assert comparison.evaluate(ticks) == both


def test_rollouts_of_one_run_can_be_listed_and_both_answer_the_same_prompt(comparison):
    choose(comparison, run="two/demo", stage="fre")
    assert {rollout["series"] for rollout in matching(comparison)} == {4}
    comparison.press("a")
    assert {"one/demo", "two/demo"} <= set(comparison.evaluate(DETAIL).replace(" / ", "\n").split("\n"))


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


def test_best_rows_begin_where_the_others_do_and_rows_show_their_images(browser, evaluation):
    for dark in (False, True):
        tab = browser.open(evaluation.as_uri(), dark=dark)
        left = "[...document.querySelectorAll('tbody tr:not(.group) th')].map((cell) => {const range = new Range(); range.selectNodeContents(cell); return range.getBoundingClientRect().left})"
        assert tab.evaluate("document.querySelectorAll('tr.best').length") == 1
        assert len(set(tab.evaluate(left))) == 1
        tab.evaluate("document.querySelector('details.rows').open = true")
        tab.until(
            "[...document.querySelectorAll('article > img')].every((image) => image.complete && image.naturalWidth === 56)"
        )
        assert tab.evaluate("document.querySelectorAll('article > img').length") == 3
        colors = tab.evaluate(
            "['.think', '.answer'].map((part) => getComputedStyle(document.querySelector(part)).color)"
        )
        assert len(set(colors)) == 2
        lines = tab.evaluate(
            "['.think', '.answer'].map((part) => document.querySelector(part).getBoundingClientRect().top)"
        )
        assert lines[0] < lines[1]
        assert [text for text in tab.complaints() if "favicon" not in text] == []
        tab.close()


def test_a_response_stands_with_its_group_and_with_all_to_its_prompt(browser, tmp_path):
    write_stage(tmp_path, name="fre", steps=2, seconds=1.0, hour=9)
    rewards = [(step, reward) for step in (1, 2) for reward in (1.0, 0.0, 1.0)]
    lines = [rollout(step=step, reward=reward, scores={"accuracy": reward}) for step, reward in rewards]
    write_lines(tmp_path / "rollouts.jsonl", lines)
    main([str(tmp_path)])
    tab = browser.open((tmp_path / "report.html").as_uri())
    tab.evaluate("document.getElementById('rollouts').scrollIntoView({ behavior: 'instant' })")
    shown = "[...document.querySelectorAll('.reply')].map((reply) => Number(reply.dataset.index))"
    buttons = "[...document.querySelectorAll('.tools button')].map((button) => button.textContent)"
    assert tab.evaluate(shown) == [0]
    assert tab.evaluate(buttons)[:3] == ["This response", "Its group of 3", "All 6 responses to this prompt"]
    tab.click(".tools button:nth-child(2)")
    assert tab.evaluate(shown) == [0, 1, 2]
    assert "66.7 % right" in tab.evaluate("document.querySelector('.tools').innerText")
    edges = "(() => { const [tools, sides] = ['.tools', '.sides'].map((name) => document.querySelector(name).getBoundingClientRect()); return [tools.bottom, sides.top, document.querySelector('.tools .quiet').getBoundingClientRect().bottom] })()"
    bottom, top, words = tab.evaluate(edges)
    assert words <= bottom <= top + 1, "nothing lies on something else"
    tab.press("j")
    assert tab.evaluate(shown) == [1, 0, 2], "the chosen one first"
    tab.press("a")
    assert sorted(tab.evaluate(shown)) == [0, 1, 2, 3, 4, 5]
    tab.press("g")
    tab.press("g")
    assert tab.evaluate(shown) == [1]
    tab.close()
