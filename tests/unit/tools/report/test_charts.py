import json

import pytest

from lmm_r1.records.metrics import MetricLog, MetricRow
from lmm_r1.tools.evaluation.page_parts import duration, number, percent, points
from lmm_r1.tools.report.charts import BOTTOM, TOP, difference_interval, line_chart, nice_axis, wilson_interval
from lmm_r1.tools.report.curves import moving_average, other_panels, panels, thinned


def log(**series):
    """Return metrics from one list per metric, the first value at step 1."""
    count = max(map(len, series.values()))
    rows = [
        MetricRow(step=at + 1, seconds=None, values={name: values[at] for name, values in series.items()})
        for at in range(count)
    ]
    return MetricLog(rows=tuple(rows))


def labels(axis):
    return [tick.label for tick in axis.ticks(number)]


def test_an_axis_ends_at_round_numbers_and_its_ticks_carry_no_rounding_error():
    axis = nice_axis(0.0, 0.31, start=100, end=0)
    assert labels(axis) == ["0", "0.1", "0.2", "0.3", "0.4"]
    assert [tick.place for tick in axis.ticks(number)] == [100.0, 75.0, 50.0, 25.0, 0.0]


def test_a_moving_average_is_centred_cut_off_at_the_ends_and_passes_over_gaps():
    averaged = moving_average([(1, 1.0), (2, 4.0), (3, None), (4, 6.0), (5, 8.0)], window=3)
    assert averaged == [(1, 2.5), (2, 2.5), (3, 5.0), (4, 7.0), (5, 7.0)]


def test_a_long_line_is_thinned_to_means_of_neighbours():
    assert thinned([(1, 1.0), (2, 3.0), (3, None), (4, 5.0)], limit=2) == [(1.5, 2.0), (3.5, 5.0)]
    assert thinned([(1, None), (2, None), (3, 1.0)], limit=3) == [(1, None), (2, None), (3, 1.0)]


def test_metrics_that_belong_together_share_a_panel_and_unknown_ones_stand_alone():
    metrics = log(format=[0.9], odd=[1.0], accuracy=[0.5], **{"timing/broadcast": [0.1], "timing/generation": [3.0]})
    shown = {panel.spec.title: [line.name for line in panel.lines] for panel in panels(metrics)}
    assert shown == {"Accuracy and format": ["accuracy", "format"], "Time per phase": ["broadcast", "generation"]}
    assert [panel.spec.title for panel in other_panels(metrics)] == ["odd"]


def test_the_weights_of_reward_parts_are_drawn_together():
    metrics = log(**{"part_weight/format": [0.5, 0.5], "part_weight/accuracy x used_tool": [0.0, -0.1]})
    (panel,) = panels(metrics)
    assert panel.spec.title == "Weights of reward parts"
    assert [line.name for line in panel.lines] == ["format", "accuracy x used_tool"]
    assert line_chart(panel).show(panel.lines[1].last) == "−0.1"


def test_a_divergence_that_nothing_measured_stands_with_the_other_metrics():
    assert [panel.spec.title for panel in panels(log(kl=[0.0, 0.0], reward=[1.0, 2.0]))] == ["Reward"]
    assert [panel.spec.title for panel in other_panels(log(kl=[0.0, 0.0]))] == ["kl"]
    assert [panel.spec.title for panel in panels(log(kl=[0.0, 0.1]))] == ["KL divergence"]


def test_a_line_is_broken_at_missing_values_and_a_lonely_value_is_a_dot():
    chart = line_chart(panels(log(accuracy=[0.0, 1.0, None, 0.5]))[0])
    (line,) = chart.panel.lines
    assert chart.path(line.points) == "M54.0 162.00L146.0 10.00"
    assert chart.dots(line.points) == [(330.0, 86.0)]
    assert chart.show(line.last) == "50.0\N{NO-BREAK SPACE}%"
    assert json.loads(chart.hover)[0]["points"][2] == [330.0, 86.0, "4", "50.0\N{NO-BREAK SPACE}%"]


@pytest.mark.parametrize("values", [[0.06, 0.01], [0.0, 0.0], [0.4, 0.9], [0.99, 1.0]])
@pytest.mark.parametrize("metric", ["truncated_rate", "accuracy", "eval_geo_pass1", "rows/image"])
def test_a_share_has_an_axis_from_0_to_100_percent(metric, values):
    (panel,) = [*panels(log(**{metric: values})), *other_panels(log(**{metric: values}))]
    chart = line_chart(panel)
    assert [tick.label for tick in chart.y_ticks] == ["0%", "25%", "50%", "75%", "100%"]
    assert (chart.y_ticks[0].place, chart.y_ticks[-1].place) == (BOTTOM, TOP)


def test_held_out_shares_of_a_run_are_drawn_together_by_their_data_source():
    (panel,) = panels(log(eval_geo_pass1=[0.25, 0.5], eval_geo_pass4=[0.5, 0.75]))
    assert panel.spec.title == "Held-out rows"
    assert [line.name for line in panel.lines] == ["geo, pass@1", "geo, pass@4"]


def test_the_wilson_interval_of_eight_in_ten():
    low, high = wilson_interval(0.8, count=10)
    assert (round(low, 3), round(high, 3)) == (0.490, 0.943)
    assert wilson_interval(0.0, count=0) == (0.0, 1.0)


def test_the_interval_of_a_difference_is_that_of_newcombes_tenth_method():
    # Newcombe (1998), table II, case (a): 56/70 and 48/80.
    low, high = difference_interval(56 / 70, count=70, reference=48 / 80, reference_count=80)
    assert (round(low, 4), round(high, 4)) == (0.0524, 0.3339)
    low, high = difference_interval(1.0, count=10, reference=1.0, reference_count=10)
    assert (round(low, 3), round(high, 3)) == (-0.278, 0.278)


def test_numbers_spans_and_changes_read_well():
    assert [number(value) for value in (0, 31.24, -0.0123, 1.5e-4, 1234.4, 12_400, 3e6, None)] == [
        "0",
        "31.2",
        "−0.0123",
        "1.5e-4",
        "1234",
        "12.4k",
        "3M",
        "–",
    ]
    spans = [duration(seconds).replace("\N{NO-BREAK SPACE}", " ") for seconds in (41.23, 59.97, 200, 3599.6, 3840)]
    assert spans == ["41.2 s", "1 min 00 s", "3 min 20 s", "1 h 00 min", "1 h 04 min"]
    assert [points(change) for change in (0.241, -0.05, 0.0, None)] == ["+24.1", "−5.0", "0.0", ""]
    assert percent(0.5344) == "53.4\N{NO-BREAK SPACE}%"
