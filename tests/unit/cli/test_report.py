import json

import pytest
from helpers.run_folders import write_curriculum, write_stage

from lmm_r1.cli.report import main


def test_a_curriculum_gets_a_page_a_summary_and_a_table(tmp_path, capsys):
    write_curriculum(tmp_path, steps=3)

    main([str(tmp_path), "--seconds", "99.5", "--max-rollouts", "10"])

    assert "8 of the 48 logged rollouts" in (tmp_path / "report.html").read_text(encoding="utf-8")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["seconds"] == 99.5
    assert [stage["image_accuracy"] for stage in summary["stages"]] == [0.31, 0.36, 0.815]
    printed = capsys.readouterr().out
    assert "81.5\N{NO-BREAK SPACE}% (+45.5)" in printed
    assert f"report: {tmp_path / 'report.html'}" in printed.replace("\n", "")


def test_a_run_folder_gets_its_page_where_asked_and_no_summary(tmp_path, capsys):
    write_stage(tmp_path / "fre", name="[bold]fre", steps=1, seconds=1.0, hour=9)

    main([str(tmp_path / "fre"), "--output", str(tmp_path / "out" / "page.html")])

    assert "[bold]fre" in (tmp_path / "out" / "page.html").read_text(encoding="utf-8")
    assert not (tmp_path / "fre" / "summary.json").exists()
    assert not (tmp_path / "fre" / "report.html").exists()
    assert "[bold]fre" in capsys.readouterr().out


def test_several_runs_are_compared_in_one_page_in_the_current_folder(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        write_curriculum(tmp_path / name / "demo", steps=2)

    main(["a/demo", "b/demo", "--max-rollouts", "10"])

    assert "8 of the 64 logged rollouts" in (tmp_path / "comparison.html").read_text(encoding="utf-8")
    assert not (tmp_path / "a" / "demo" / "report.html").exists()
    assert not (tmp_path / "a" / "demo" / "summary.json").exists()
    printed = capsys.readouterr().out
    assert "differences to a/demo" in printed
    assert "b/demo" in printed
    assert "report: comparison.html" in printed
    main(["a/demo", "b/demo", "--output", "out/page.html"])
    assert (tmp_path / "out" / "page.html").is_file()


@pytest.mark.parametrize(
    ("runs", "flags", "complaint"),
    [
        (["."], [], "holds no stage"),
        (["a"], ["--seconds", "-1"], "--seconds must be a number from 0 up, got -1.0"),
        (["a"], ["--max-rollouts", "-1"], "--max_rollouts must be 0 or more, got -1"),
        (["a", "link"], [], "link: this run is given twice"),
        (["a", "b"], ["--seconds", "5"], "--seconds says how long one run took"),
        (["a", "b"], ["--output", "a"], "a: is a folder; give the name of a file"),
    ],
)
def test_a_mistake_is_one_sentence_and_code_1(tmp_path, capsys, monkeypatch, runs, flags, complaint):
    for name in ("a", "b"):
        write_stage(tmp_path / "runs" / name, name=name, steps=1, seconds=1.0, hour=9)
    (tmp_path / "runs" / "link").symlink_to(tmp_path / "runs" / "a")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / ("empty" if runs == ["."] else "runs"))
    with pytest.raises(SystemExit) as caught:
        main([*runs, *flags])

    assert caught.value.code == 1
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("lmm-r1 report: error: ")
    assert complaint in error


def test_a_name_that_no_terminal_can_show_is_printed_all_the_same(tmp_path, capsys):
    write_stage(tmp_path, name="half \ud800", steps=1, seconds=1.0, hour=9)

    main([str(tmp_path)])

    assert "half ?" in capsys.readouterr().out


def test_a_missing_run_and_an_unknown_flag_end_with_code_2(tmp_path):
    for flags in ([], [str(tmp_path), "--rollouts", "3"]):
        with pytest.raises(SystemExit) as caught:
            main(flags)
        assert caught.value.code == 2
