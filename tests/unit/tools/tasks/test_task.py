import pytest

from lmm_r1.errors import UserError
from lmm_r1.tools.tasks import TASKS, get_task


@pytest.mark.parametrize("name", TASKS)
def test_every_registered_task_makes_rows(name):
    rows = list(get_task(name).generate(split="test", modality="mixed", rows=2, seed=0))
    assert [row.messages[0]["role"] for row in rows] == ["user", "user"]


def test_an_unknown_task_is_an_error_that_lists_the_known_ones():
    with pytest.raises(UserError, match="unknown task 'chess'; known tasks are digits"):
        get_task("chess")
    with pytest.raises(UserError, match="unknown task 'digts'; did you mean digits"):
        get_task("digts")
