import pytest

from lmm_r1.cli.init import main


@pytest.mark.parametrize(
    ("folder", "said"),
    [(".", "next: the commands of README.md"), ("new", "next: cd new, and the commands of README.md")],
)
def test_the_way_into_the_project_is_told_where_it_is_another_folder(folder, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    main([folder])
    assert capsys.readouterr().out.splitlines()[-1] == said
    assert (tmp_path / folder / "README.md").is_file()
