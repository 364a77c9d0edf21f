import math

import pytest

from lmm_r1.evaluation.clustered_mean import clustered_mean

pytestmark = pytest.mark.unit


def test_samples_of_one_row_do_not_count_as_independent():
    estimate = clustered_mean([[1, 0], [1, 1], [0, 0]])
    assert estimate.mean == 0.5
    # The rows' means are 1/2, 1 and 0: their standard deviation is 1/2. Six independent samples would give 0.224.
    assert estimate.standard_error == pytest.approx(0.5 / math.sqrt(3))


def test_one_sample_per_row_gives_the_usual_standard_error():
    # Variance of 1, 0, 0, 0 around 1/4: (9/16 + 3/16) / 3 = 1/4.
    assert clustered_mean([[1], [0], [0], [0]]).standard_error == pytest.approx(math.sqrt(1 / 4 / 4))


def test_rows_with_more_samples_weigh_more():
    estimate = clustered_mean([[1], [0, 0, 0]])
    # Deviations add up to 3/4 and -3/4; sqrt(2 * 9/16 * 2/1) / 4 = 1.5 / 4.
    assert (estimate.mean, estimate.standard_error) == (0.25, pytest.approx(0.375))


def test_a_single_row_has_no_standard_error():
    assert clustered_mean([[1, 0, 1, 1]]).standard_error is None
