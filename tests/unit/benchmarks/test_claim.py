import numpy as np
import pytest
from claim import compared, figures, found, read_scores, student, table_of, verdict

from lmm_r1.records.responses import JudgedResponse, VerifierVerdict, write_responses


def scores(*seeds):
    """Rows of one family by seed."""
    return np.array(seeds, dtype=float)


def test_families_weigh_equally_and_seeds_give_students_interval():
    # Two seeds, two families, two rows: 75 and 50 % on average.
    values = np.array([[[1, 1], [1, 0]], [[1, 0], [0, 1]]], dtype=float)
    made = figures(values)
    assert (made["mean"], made["seeds"]) == (62.5, [75.0, 50.0])
    # The standard error is 12.5, and the 97.5 % point of Student's t with one degree of freedom 12.706.
    assert made["over_seeds"] == pytest.approx([62.5 - 158.83, 62.5 + 158.83], abs=0.01)
    assert made["bootstrap"][0] < 62.5 < made["bootstrap"][1]


def test_three_seeds_have_the_interval_of_the_tables():
    # Mean 2, standard deviation 1, and t = 4.303 with two degrees of freedom.
    assert student(np.array([1.0, 2.0, 3.0])) == pytest.approx([2 - 4.303 / 3**0.5, 2 + 4.303 / 3**0.5], abs=0.01)
    assert student(np.array([1.0])) is None


def test_the_bootstrap_of_equal_rows_and_seeds_is_a_point():
    assert figures(np.full((3, 2, 5), 0.5))["bootstrap"] == [50.0, 50.0]


@pytest.mark.parametrize(
    ("interval", "said"),
    [([0.1, 2.0], "held"), ([-3.0, -0.1], "refuted"), ([-1.0, 2.0], "undecided"), (None, "undecided")],
)
def test_the_interval_over_seeds_decides(interval, said):
    assert verdict(interval) == said


def test_an_advantage_is_taken_within_seeds_and_by_kind_of_family():
    arms = {
        "cold_start": {"count.image": scores([0, 0], [0, 0]), "cards.image": scores([0, 0], [0, 0])},
        "direct": {"count.image": scores([0, 1], [1, 1]), "cards.image": scores([1, 1], [1, 1])},
        "fre_text": {"count.image": scores([0.5, 1], [1, 1]), "cards.image": scores([0, 0], [1, 0])},
    }
    result = compared(arms, trained=["count"])
    groups = result["arms"]["fre_text"]
    assert groups["image, trained"]["advantage"]["seeds"] == [25.0, 0.0]
    assert groups["image, held out"]["advantage"]["seeds"] == [-100.0, -50.0]
    assert "advantage" not in result["arms"]["direct"]["image, trained"]
    table = table_of(result)
    assert table.startswith("FRE on text before MGT against direct RL, 2 seeds: undecided.")
    assert "| fre_text | image, trained | 87.5 | +12.5 | -146.3 to +171.3 |" in table


def test_a_large_effect_is_found_and_none_is_found_in_a_fortieth_of_the_studies():
    rng = np.random.default_rng(1)
    assert found(30.0, 2.0, 3, rng) > 0.99
    assert found(0.0, 2.0, 3, rng) == pytest.approx(0.025, abs=0.012)


def test_rows_of_each_checkpoint_and_file_are_read_by_seed(tmp_path):
    def judged(checkpoint, name, index, sample, right):
        verdict = VerifierVerdict(score=float(right), parts={"accuracy": float(right)})
        place = {"checkpoint": checkpoint, "file": name, "index": index, "row": str(index), "sample": sample}
        texts = {"datasource": "", "label": "1", "question": "", "response": "", "finish_reason": "stop"}
        return JudgedResponse(**place, **texts, response_tokens=1, verdicts={"math": verdict})

    for seed in (1, 2):
        # Row 1 is right in both samples, row 0 in one of them; in the other file, nothing.
        rights = [("a.text", 1, 1, 1), ("a.text", 0, 0, 1), ("b.image", 0, 0, 0)]
        rows = [
            judged("direct", name, index, n, bool(one)) for name, index, *both in rights for n, one in enumerate(both)
        ]
        write_responses(tmp_path / f"seed{seed}" / "evaluation.responses.jsonl", rows, append=False)
    read = read_scores(tmp_path)["direct"]
    assert {name: values.tolist() for name, values in read.items()} == {
        "a.text": [[0.5, 1.0]] * 2,
        "b.image": [[0.0]] * 2,
    }
