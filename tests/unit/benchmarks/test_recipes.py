"""What the comparison of algorithms makes of its runs' records."""

import pytest
from recipes import ALGORITHMS, CONFIGS, OWN_FLAGS, gains, generated, table

pytestmark = pytest.mark.unit


def run(seed: int, text: float, image: float) -> dict:
    found = {"text": {"difference": text}, "image": {"difference": image}}
    return {"seed": seed, "algorithm": "grpo", "gain": found, "generated": 1000 * seed, "seconds": 60.0}


def test_what_is_compared_is_shipped():
    names = {path.stem for path in (CONFIGS / "algorithms").glob("*.yaml")}
    assert set(ALGORITHMS) <= names
    assert set(OWN_FLAGS) <= set(ALGORITHMS)


def test_responses_are_counted_that_nothing_was_learnt_from():
    # Of 8 prompts a step, with four responses each: all; one greedy one more each; three groups left out.
    assert generated([{"filtered_groups": 0}] * 2, prompts=8) == 64
    assert generated([{"filtered_groups": 0, "greedy_reward": 0.5}] * 2, prompts=8) == 80
    assert generated([{"filtered_groups": 3}, {"filtered_groups": 0}], prompts=8) == 76


def test_a_mean_over_seeds_has_students_interval():
    # Of 1, 2 and 3: the deviation is 1, and t with two degrees of freedom 4.303.
    found = gains([run(1, 1.0, 4.0), run(2, 2.0, 4.0), run(3, 3.0, 4.0)])
    assert found["text"] == {"mean": 2.0, "low": round(2 - 4.303 / 3**0.5, 2), "high": round(2 + 4.303 / 3**0.5, 2)}
    assert found["image"] == {"mean": 4.0, "low": 4.0, "high": 4.0}
    assert gains([run(1, 1.0, 4.0)])["text"] == {"mean": 1.0, "low": None, "high": None}


def test_the_table_has_a_line_for_each_algorithm():
    runs = [run(1, 1.0, -4.0), run(3, 1.0, -4.0)]
    lines = table({"runs": runs, "gains": {"grpo": gains(runs)}}).splitlines()
    assert lines[2:] == ["| grpo | +1.0 (+1.0 to +1.0) | -4.0 (-4.0 to -4.0) | 2,000 | 60 |"]
