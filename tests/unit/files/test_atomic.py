import os

import pytest
import torch
from safetensors.torch import save_file

from lmm_r1.errors import UserError
from lmm_r1.files.atomic import write_atomically, written_folder, written_into


def test_a_file_is_written_completely_or_not_at_all(tmp_path):
    target = tmp_path / "new" / "page.html"
    write_atomically(target, text="half a pair: \ud800")

    assert target.read_text() == "half a pair: ?"
    assert list(target.parent.iterdir()) == [target]
    with pytest.raises(UserError, match="is a folder"):
        write_atomically(tmp_path, text="")
    with pytest.raises(UserError, match="cannot be written"):
        write_atomically(target / "below_a_file" / "page.html", text="")


def test_files_get_their_places_in_a_folder_only_when_all_of_them_are_written(tmp_path):
    (tmp_path / "old.txt").write_text("old")

    def write(text: str, *, to: str) -> None:
        with written_into(tmp_path) as folder:
            (folder / "sub").mkdir(parents=True)
            (folder / "old.txt").write_text(text)
            with open(folder / "sub" / "new.txt" if to == "file" else to, "w") as stream:
                stream.write(text)

    with pytest.raises(UserError) as raised:
        write("half", to="/dev/full")
    assert str(raised.value) == (
        f"{tmp_path}: cannot be written (No space left on device); free space on its disk, or choose another place"
    )
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"old.txt": "old"}
    write("whole", to="file")
    found = {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.rglob("*.txt")}
    assert found == {"old.txt": "whole", "sub/new.txt": "whole"}
    assert not (tmp_path / ".partial").exists()


def test_a_folder_on_a_full_disk_is_not_there_and_told_with_its_name(tmp_path):
    def write() -> None:
        with written_folder(tmp_path / "out") as folder:
            (folder / "whole.txt").write_text("whole")
            with open("/dev/full", "w") as stream:
                stream.write("x")

    with pytest.raises(UserError, match=r"out: cannot be written \(No space left on device\); free space"):
        write()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("umask", "mode", "folder_mode"), [(0o022, 0o644, 0o755), (0o002, 0o664, 0o775), (0o077, 0o600, 0o700)]
)
def test_weights_get_the_modes_that_the_umask_gives(umask, mode, folder_mode, tmp_path):
    before = os.umask(umask)
    try:
        with written_folder(tmp_path / "merged") as folder:
            save_file({"weight": torch.zeros(1)}, folder / "model.safetensors")
        with written_into(tmp_path / "run") as folder:
            (folder / "adapter").mkdir(parents=True)
            for place in (folder, folder / "adapter"):
                save_file({"weight": torch.zeros(1)}, place / "model.safetensors")
    finally:
        os.umask(before)
    files = list(tmp_path.rglob("*.safetensors"))
    assert [file.stat().st_mode & 0o777 for file in files] == [mode] * 3
    assert {file.parent.stat().st_mode & 0o777 for file in files} == {folder_mode}
