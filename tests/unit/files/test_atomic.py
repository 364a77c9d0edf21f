import pytest

from lmm_r1.errors import UserError
from lmm_r1.files.atomic import write_atomically

pytestmark = pytest.mark.unit


def test_a_file_is_written_completely_or_not_at_all(tmp_path):
    target = tmp_path / "new" / "page.html"
    write_atomically(target, text="half a pair: \ud800")

    assert target.read_text() == "half a pair: ?"
    assert list(target.parent.iterdir()) == [target]
    with pytest.raises(UserError, match="is a folder"):
        write_atomically(tmp_path, text="")
    with pytest.raises(UserError, match="cannot be written"):
        write_atomically(target / "below_a_file" / "page.html", text="")
