"""Which files hold what rows show, as far as tells whether it has changed."""

import os

from helpers.conversations import message, row

from lmm_r1.data.messages import ImagePart, VideoPart
from lmm_r1.data.training_rows import files_of_rows


def test_the_files_of_rows_are_named_once_with_size_and_time_and_without_their_folder(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.png").write_bytes(b"12345")
        os.utime(tmp_path / folder / "x.png", ns=(7, 7))
    clip = tmp_path / "clip.mp4"
    clip.write_bytes(b"1")
    os.utime(clip, ns=(9, 9))

    def rows(folder):
        path = str(tmp_path / folder / "x.png")
        shown = message("user", ImagePart(path), "?", ImagePart("https://example.org/y.png"), ImagePart(b"bytes"))
        films = message("user", VideoPart(str(clip)), VideoPart((path, str(tmp_path / "gone.png"))))
        return [row(shown), row(films)]

    found = files_of_rows(rows("a"))

    assert found == [("clip.mp4", 1, 9), ("gone.png", 0, 0), ("x.png", 5, 7)]
    assert files_of_rows(rows("b")) == found
    os.utime(tmp_path / "b" / "x.png", ns=(8, 8))
    assert files_of_rows(rows("b")) != found
