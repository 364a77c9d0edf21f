"""Rows made of local copies in published layouts, jobs that are killed anywhere, and what stands in the manifest."""

import hashlib
import io
import json
import os
import tarfile
import zipfile
from pathlib import Path

import pytest
from helpers.interrupted_writes import Interrupter, killed_at
from helpers.recipe_samples import SAMPLES, png

from lmm_r1.data.files import read_row_file
from lmm_r1.data.messages import images_of
from lmm_r1.errors import UserError
from lmm_r1.tools.recipes import Recipe, get_recipe, preparation
from lmm_r1.tools.recipes.preparation import Preparation, Prepared


def recipe(**changes: object) -> Recipe:
    """A recipe for rows of question, answer, image and kind."""
    fields = {
        "name": "own",
        "description": "d",
        "source": {"dataset": "a/b", "split": "train", "media": ["*.zip", "*.tar.gz"]},
        "licence": "MIT",
        "images": ["image"],
        "answer": ["answer"],
        "prompt": "{question}",
        "verifiers": ["math"],
    }
    return Recipe.model_validate(fields | changes)


def records(count: int = 6) -> list[dict[str, object]]:
    """Rows of which every third is of another kind, row 1 has no answer, and two share an image."""
    return [
        {
            "question": f"q{number}",
            "answer": "" if number == 1 else str(number),
            "image": f"images/{min(number, 4)}.png",
            "kind": "b" if number % 3 == 2 else "a",
        }
        for number in range(count)
    ]


def zipped(folder: Path, *, count: int = 6) -> Path:
    """An annotation file beside a zip of its images."""
    folder.mkdir(parents=True)
    (folder / "rows.json").write_text(json.dumps(records(count)))
    with zipfile.ZipFile(folder / "images.zip", "w") as archive:
        for number in range(5):
            archive.writestr(f"images/{number}.png", png(size=(8 + number, 8)))
    return folder


def prepared(
    folder: Path, output: Path, *, made: Recipe | None = None, overwrite: bool = False, **settings
) -> Prepared:
    job = Preparation(recipe=made or recipe(), output=output, source=folder, **settings)
    return job.run(overwrite=overwrite)


def content(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_a_zip_of_images_beside_its_annotations_becomes_rows_and_a_manifest(tmp_path):
    made = prepared(zipped(tmp_path / "copy"), tmp_path / "out", made=recipe(where={"kind": "a"}))
    rows = read_row_file(str(tmp_path / "out")).rows.values()
    assert [(row.messages[0].parts[-1].text, row.answer) for row in rows] == [("q0", "0"), ("q3", "3"), ("q4", "4")]
    for row, number in zip(rows, (0, 3, 4), strict=True):
        data = png(size=(8 + number, 8))
        (image,) = images_of(row.messages)
        assert Path(image.source).name == f"{hashlib.sha256(data).hexdigest()[:24]}.png"
        assert Path(image.source).read_bytes() == data
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    copy = tmp_path / "copy"
    counts = ("read", "kept", "filtered", "left_out", "images")
    assert [manifest[key] for key in counts] == [6, 3, {"kind": 2}, 1, 3]
    assert (manifest["licence"], manifest["revision"], manifest["dataset"]) == ("MIT", None, "a/b")
    assert manifest["rows_sha256"] == hashlib.sha256((tmp_path / "out/rows.jsonl").read_bytes()).hexdigest()
    (left_out,) = made.left_out
    assert left_out.index == 1
    assert left_out.reason.startswith(f'{copy / "rows.json"} row 2: no column "answer", or it is empty')
    assert json.loads((tmp_path / "out/left_out.jsonl").read_text())["reason"] == left_out.reason
    assert {path.name for path in tmp_path.iterdir()} == {"copy", "out"}


def test_an_image_of_several_questions_is_stored_once(tmp_path):
    made = prepared(zipped(tmp_path / "copy"), tmp_path / "out")
    assert (made.manifest.kept, made.manifest.images) == (5, 4)


@pytest.mark.parametrize("layout", ["folder", "file", "unpacked", "tar", "flat"])
def test_a_copy_may_be_given_in_several_ways(layout, tmp_path):
    copy = zipped(tmp_path / "copy")
    given = copy / "rows.json" if layout == "file" else copy
    if layout in ("unpacked", "flat", "tar"):
        with zipfile.ZipFile(copy / "images.zip") as archive:
            archive.extractall(copy)
        (copy / "images.zip").unlink()
    if layout == "flat":
        for file in (copy / "images").iterdir():
            file.rename(copy / file.name)
    if layout == "tar":
        with tarfile.open(copy / "images.tar.gz", "w:gz") as archive:
            archive.add(copy / "images", arcname="top/images")
        for file in (copy / "images").iterdir():
            file.unlink()
    prepared(given, tmp_path / "out")
    prepared(zipped(tmp_path / "other"), tmp_path / "expected")
    assert (tmp_path / "out/rows.jsonl").read_bytes() == (tmp_path / "expected/rows.jsonl").read_bytes()
    assert {name for name in content(tmp_path / "out") if "unpacked" in name} == set()


def write_parquet(folder: Path, name: str, rows: list[dict]) -> None:
    import pyarrow
    import pyarrow.parquet

    folder.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / name)


def test_parquet_files_are_read_in_order_and_only_those_of_the_split(tmp_path):
    row = dict(SAMPLES["geometry3k_train"].record)
    for place, name in enumerate(("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001")):
        write_parquet(tmp_path / "copy/data", f"{name}.parquet", [row | {"answer": str(place)}])
    prepared(tmp_path / "copy", tmp_path / "out", made=get_recipe("geometry3k_train"))
    assert [row.answer for row in read_row_file(str(tmp_path / "out")).rows.values()] == ["0", "1"]


def test_a_killed_job_leaves_no_folder_and_the_next_one_starts_over(tmp_path):
    copy = zipped(tmp_path / "copy")
    prepared(copy, tmp_path / "whole")
    interrupter = Interrupter()
    for at in (0, 3, 9, 20, 30):
        assert killed_at(interrupter, lambda: prepared(copy, tmp_path / "out"), at=at)
        assert not (tmp_path / "out").exists()
    prepared(copy, tmp_path / "out")
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    assert {path.name for path in tmp_path.iterdir()} == {"copy", "whole", "out"}


def test_a_complete_folder_is_left_as_it_is_and_tells_its_rows_again(tmp_path):
    copy = zipped(tmp_path / "copy")
    first = prepared(copy, tmp_path / "out")
    before = {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in content(tmp_path / "out")}
    again = prepared(copy, tmp_path / "out")
    assert (first.was_complete, again.was_complete) == (False, True)
    assert again.manifest == first.manifest
    assert again.left_out == first.left_out
    assert {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in before} == before


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"made": recipe(prompt="{question}!")}, "another version of the recipe own; name another"),
        ({"max_rows": 2}, "another max_rows (None, now 2); name another"),
    ],
)
def test_a_folder_of_another_job_is_not_taken(change, said, tmp_path):
    copy = zipped(tmp_path / "copy")
    prepared(copy, tmp_path / "out")
    with pytest.raises(UserError) as refused:
        prepared(copy, tmp_path / "out", **change)
    assert said in str(refused.value)
    made = prepared(copy, tmp_path / "out", overwrite=True, **change)
    assert made.manifest.kept == (1 if "max_rows" in change else 5)


def test_rows_that_cannot_be_used_are_told_by_file_and_line(tmp_path):
    copy = tmp_path / "copy"
    copy.mkdir()
    good = {"question": "q", "answer": "1", "image": "a.png"}
    (copy / "a.png").write_bytes(png())
    (copy / "cut.png").write_bytes(png(size=(64, 64))[:60])
    bad = [{"image": "no.png"}, {"image": "cut.png"}, {"question": ""}, {"image": "data:image/png;base64,AAAA"}]
    (copy / "rows.jsonl").write_text("".join(json.dumps(good | change) + "\n" for change in [*bad, {}]))
    made = prepared(copy / "rows.jsonl", tmp_path / "out")
    assert (made.manifest.kept, made.manifest.left_out) == (1, 4)
    expected = ("no image file", "cannot read the image", 'no column "question"', "cannot read the image")
    for number, (row, said) in enumerate(zip(made.left_out, expected, strict=True), start=1):
        assert row.reason.startswith(f"{copy / 'rows.jsonl'} line {number}: {said}")
    (copy / "rows.jsonl").write_text(json.dumps(good | bad[0]))
    with pytest.raises(UserError, match="recipe own: none of 1 rows can be used; the first: .* line 1: no image file"):
        prepared(copy / "rows.jsonl", tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_an_image_that_may_be_one_of_two_files_is_not_guessed(tmp_path):
    copy = zipped(tmp_path / "copy")
    for part in ("train", "test"):
        (copy / part / "images").mkdir(parents=True)
        (copy / part / "images/0.png").write_bytes(png())
    (copy / "images.zip").unlink()
    with pytest.raises(UserError, match="the image images/0.png may be any of 2 files, such as .*test/images/0.png"):
        prepared(copy, tmp_path / "out", max_rows=1)


def test_a_full_disk_ends_the_job_and_blames_no_row(tmp_path, monkeypatch):
    copy = zipped(tmp_path / "copy")
    monkeypatch.setattr(preparation, "append_json_lines", full_disk)
    with pytest.raises(UserError, match=r"out: cannot be written \(No space left"):
        prepared(copy, tmp_path / "out")
    monkeypatch.undo()
    made = prepared(copy, tmp_path / "out")
    assert (made.manifest.kept, made.manifest.left_out) == (5, 1)


def full_disk(*_: object, **__: object) -> None:
    raise OSError(28, os.strerror(28))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: None, "copy: no such file or folder; check the path"),
        (
            lambda path: path.mkdir(),
            "copy: this folder cannot be loaded as a dataset",
        ),
        (
            lambda path: zipfile.ZipFile(path.with_suffix(".zip"), "w").close(),
            "copy.zip: an archive alone has no rows",
        ),
    ],
)
def test_a_copy_that_cannot_be_read_is_told(make, said, tmp_path):
    make(tmp_path / "copy")
    given = next(iter(tmp_path.iterdir()), tmp_path / "copy")
    with pytest.raises(UserError) as refused:
        prepared(given, tmp_path / "out")
    assert said in str(refused.value)


def test_a_damaged_archive_is_told(tmp_path):
    copy = zipped(tmp_path / "copy")
    (copy / "images.zip").write_bytes(b"PK" + bytes(100))
    with pytest.raises(UserError, match="images.zip: not a readable zip archive .*; fetch it again"):
        prepared(copy, tmp_path / "out")


def test_an_archive_that_unpacks_to_more_than_an_image_may_have_is_told(tmp_path, monkeypatch):
    copy = zipped(tmp_path / "copy")
    monkeypatch.setattr("lmm_r1.tools.recipes.MAX_BYTES", 60)
    with pytest.raises(UserError, match="images.zip:images/0.png is larger than 0 MiB; remove it from the archive"):
        prepared(copy, tmp_path / "out")


def test_without_network_the_dataset_and_the_way_to_local_files_are_named(tmp_path):
    with pytest.raises(UserError) as refused:
        Preparation(recipe=get_recipe("mmk12"), output=tmp_path / "out").run()
    said = str(refused.value)
    assert said.startswith("recipe mmk12: FanqingM/MMK12: cannot be downloaded from the Hugging Face hub (")
    assert "hf download FanqingM/MMK12 --repo-type dataset --local-dir FOLDER" in said
    assert said.endswith("give that folder here with --source FOLDER")
    with pytest.raises(
        UserError, match="recipe geoqa_test: the hub has no dataset .* --source PATH: put geoqa_test_prom"
    ):
        Preparation(recipe=get_recipe("geoqa_test"), output=tmp_path / "out").run()
    assert not list(tmp_path.iterdir())


def test_a_dataset_in_the_hubs_cache_is_found_without_network(tmp_path, monkeypatch):
    from huggingface_hub import constants

    repo = tmp_path / "hub/datasets--hiyouga--math12k"
    write_parquet(
        repo / "snapshots/0123abc/data", "train-00000-of-00001.parquet", [{"problem": "1+1?", "answer": "2"}]
    )
    (repo / "refs").mkdir()
    (repo / "refs/main").write_text("0123abc")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    made = Preparation(recipe=get_recipe("math12k"), output=tmp_path / "out").run()
    assert (made.manifest.revision, made.manifest.kept) == ("0123abc", 1)
    assert made.manifest.origin == "hiyouga/math12k"


def test_a_csv_file_is_filtered_by_numbers_too_and_keeps_its_answers(tmp_path):
    (tmp_path / "rows.csv").write_text("question,answer,level\nq0,007,5\nq1,None,4\nq2,3.10,3\n")
    made = recipe(where={"level": [5, 4]}, images=[])
    assert prepared(tmp_path / "rows.csv", tmp_path / "out", made=made).manifest.filtered == {"level": 1}
    assert [row.answer for row in read_row_file(str(tmp_path / "out")).rows.values()] == ["007", "None"]


def test_a_choice_moves_with_its_letter_and_index(tmp_path):
    rows = [
        {"question": "q", "choices": ["dog", "cat", "bird"], "text": text, "letter": letter, "index": index}
        for index, (letter, text) in enumerate(zip("ABC", ("dog", "cat", "bird"), strict=True))
    ]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    labels = []
    for names in ("text", "letter", "index"):
        choices = {"choices": "choices", "choices_shuffled": True, "answer_names": names, "answer": [names]}
        made = recipe(**choices, images=[], prompt="{question} {choices}")
        prepared(tmp_path / "rows.json", tmp_path / names, made=made)
        found = read_row_file(str(tmp_path / names)).rows.values()
        labels.append([row.answer for row in found])
        assert [row.messages[0].parts[0].text for row in found] == ["q (A) cat\n(B) dog\n(C) bird"] * 3
    assert labels == [["B", "A", "C"]] * 3


@pytest.mark.parametrize("columns", [True, False])
def test_a_gap_among_choices_moves_no_letter(columns, tmp_path):
    given = (["dog", "cat", None, None], ["dog", None, "bird", None], ["dog", "cat", "bird", "fish"])
    rows = [
        {"question": "q", "answer": "B", **(dict(zip("ABCD", choices, strict=True)) if columns else {"all": choices})}
        for choices in given
    ]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    choices = {"choices": list("ABCD") if columns else "all", "answer_names": "letter"}
    made = recipe(**choices, images=[], prompt="{question} {choices}")
    done = prepared(tmp_path / "rows.json", tmp_path / "out", made=made)
    (gap,) = done.left_out
    assert gap.reason.startswith(
        f"{tmp_path / 'rows.json'} row 2: an empty choice is followed by others: ['dog', None"
    )
    rows = read_row_file(str(tmp_path / "out")).rows.values()
    assert [row.messages[0].parts[0].text for row in rows] == [
        "q (A) dog\n(B) cat",
        "q (A) dog\n(B) cat\n(C) bird\n(D) fish",
    ]


def test_bytes_in_the_row_are_stored_as_they_were_published(tmp_path):
    data = io.BytesIO()
    from PIL import Image

    Image.new("RGB", (9, 9), "red").save(data, format="JPEG")
    write_parquet(
        tmp_path / "copy", "train-0.parquet", [{"question": "q", "answer": "1", "image": {"bytes": data.getvalue()}}]
    )
    prepared(tmp_path / "copy", tmp_path / "out")
    (image,) = (tmp_path / "out/images").iterdir()
    assert (image.suffix, image.read_bytes()) == (".jpeg", data.getvalue())


def test_an_annotation_file_may_hold_its_rows_under_a_number_each(tmp_path):
    copy = tmp_path / "copy"
    (copy / "data/images").mkdir(parents=True)
    (copy / "data/images/0.png").write_bytes(png())
    record = dict(SAMPLES["logicvista"].record)
    (copy / "data/dataset.json").write_text(json.dumps({"0": record, "1": record | {"answer": "A"}}))
    prepared(copy, tmp_path / "out", made=get_recipe("logicvista"))
    assert [row.answer for row in read_row_file(str(tmp_path / "out")).rows.values()] == ["C", "A"]
