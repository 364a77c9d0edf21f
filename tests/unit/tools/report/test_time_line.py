from lmm_r1.records.metrics import MetricLog, MetricRow
from lmm_r1.tools.report.charts import MAX_STEPS, TIME_LEFT, TIME_RIGHT, time_line


def row(step: int, *, generation: tuple[float, float], update: tuple[float, float]) -> MetricRow:
    spans = {"generation": generation, "update": update}
    values = {
        f"span/{name}_{end}": at
        for name, span in spans.items()
        for end, at in zip(("began", "ended"), span, strict=True)
    }
    return MetricRow(step=step, seconds=update[1], values={"reward": 1.0, **values})


ROWS = (row(1, generation=(10.0, 14.0), update=(14.0, 18.0)), row(2, generation=(14.0, 17.0), update=(18.0, 20.0)))


def test_two_bars_of_each_step_stand_where_they_were_made():
    drawn = time_line(MetricLog(rows=ROWS))
    pixels = (TIME_RIGHT - TIME_LEFT) / 10
    places = [
        (bar.step, bar.title.split()[0], round((bar.x - TIME_LEFT) / pixels, 6), bar.width) for bar in drawn.bars
    ]
    assert places == [
        (1, "generation", 0, 4 * pixels),
        (1, "update", 4, 4 * pixels),
        (2, "generation", 4, 3 * pixels),
        (2, "update", 8, 2 * pixels),
    ]
    assert [bar.color for bar in drawn.bars] == [2, 2, 3, 3]
    assert {bar.y for bar in drawn.bars if bar.title.startswith("update")} == {46.0}
    assert drawn.bars[2].title == "generation of step 2: 3.0 s"
    assert all(bar.is_named for bar in drawn.bars)
    assert drawn.label.replace("\N{NO-BREAK SPACE}", " ") == "Steps 1 to 2 in 10.0 s: generation 7.0 s, update 6.0 s"
    # The axis has the seconds since the stage began.
    assert [tick.label.replace("\N{NO-BREAK SPACE}", " ") for tick in drawn.ticks][0] == "10.0 s"


def test_the_last_steps_are_drawn_and_those_without_their_moments_left_out():
    assert time_line(MetricLog(rows=(MetricRow(step=1, seconds=1.0, values={"reward": 1.0}),))) is None
    rows = [row(step, generation=(step, step + 1.0), update=(step + 1.0, step + 2.0)) for step in range(1, 40)]
    rows.insert(20, MetricRow(step=100, seconds=None, values={"eval_digits_pass1": 0.5}))
    drawn = time_line(MetricLog(rows=tuple(rows)))
    assert sorted({bar.step for bar in drawn.bars}) == list(range(40 - MAX_STEPS, 40))
