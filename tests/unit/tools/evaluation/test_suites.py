"""Each ready-made suite on a local copy in the published columns of its dataset; and recipes that are wrong."""

import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from PIL import Image

from lmm_r1.cli.prepare_data import main as prepare_data
from lmm_r1.config.rewards import verifier_from
from lmm_r1.data.messages import ImagePart
from lmm_r1.errors import UserError
from lmm_r1.tools.evaluation.rows import get_suite, load_suite


def png(color: str = "white") -> bytes:
    data = io.BytesIO()
    Image.new("RGB", (20, 10), color).save(data, format="PNG")
    return data.getvalue()


def geometry(folder: Path) -> Path:
    import datasets

    features = datasets.Features(
        {
            "images": datasets.Sequence(datasets.Image()),
            "problem": datasets.Value("string"),
            "answer": datasets.Value("string"),
        }
    )
    row = {"images": [{"bytes": png(), "path": None}], "problem": "<image>Find x.", "answer": r"2\sqrt{2}"}
    for split in ("train", "test"):
        (folder / "data").mkdir(exist_ok=True)
        problem = row["problem"].replace("x", "x in training") if split == "train" else row["problem"]
        datasets.Dataset.from_list([row | {"problem": problem}], features=features).to_parquet(
            folder / f"data/{split}-00000-of-00001.parquet"
        )
    return folder


def mathvista(folder: Path) -> Path:
    import datasets

    features = datasets.Features(
        {name: datasets.Value("string") for name in ("pid", "question", "image", "unit", "answer", "question_type")}
        | {"decoded_image": datasets.Image(), "choices": datasets.Sequence(datasets.Value("string"))}
    )
    shared = {"image": "images/1.jpg", "decoded_image": {"bytes": png(), "path": None}, "unit": None}
    free = shared | {
        "pid": "1",
        "question": "How far?",
        "choices": None,
        "answer": "1.2",
        "question_type": "free_form",
    }
    choice = shared | {
        "pid": "2",
        "question": "Is it red?",
        "choices": ["Yes", "No", "{unsure}"],
        "answer": "No",
        "question_type": "multi_choice",
    }
    (folder / "data").mkdir()
    datasets.Dataset.from_list([free, choice], features=features).to_parquet(
        folder / "data/testmini-00000-of-00001.parquet"
    )
    return folder


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.parametrize(
    ("name", "write", "index", "label", "prompt"),
    [
        ("geometry3k", geometry, 0, r"2\sqrt{2}", "Find x. First output the thinking process in <think> </think>"),
        ("mathvista_mc", mathvista, 1, "B", "Is it red?\n(A) Yes\n(B) No\n(C) {unsure}\nFirst output the thinking"),
    ],
)
def test_a_suite_reads_a_local_copy_of_its_dataset(
    name: str, write: Callable[[Path], Path], index: int, label: str, prompt: str, tmp_path: Path
):
    folder = tmp_path / "copy"
    folder.mkdir()
    recipe = get_suite(name)
    rows, skipped = load_suite(recipe, path=str(write(folder)))
    assert skipped == []
    row = rows[index]
    assert (row.answer, row.datasource) == (label, name)
    image, text = row.messages[0].parts
    assert isinstance(image, ImagePart)
    assert image.max_pixels == recipe.max_pixels
    assert text.text.startswith(prompt)
    assert text.text.endswith("</answer> tags.")
    for verifier in recipe.verifiers:
        verifier_from(verifier).check_label(row.answer)


def test_rows_that_do_not_count_are_neither_taken_nor_skipped(tmp_path):
    rows, skipped = load_suite(get_suite("mathvista_mc"), path=str(mathvista(tmp_path)), max_rows=1)
    assert (list(rows), skipped) == ([1], [])


def own_recipe(folder: Path, **changes: object) -> str:
    recipe = {
        "name": "own",
        "description": "d",
        "source": {"dataset": "a/b", "split": "train"},
        "licence": "unknown",
        "answer": ["answer"],
        "prompt": "{question}",
        "verifiers": ["math"],
        "sampling": {},
    }
    (folder / "own.yaml").write_text(yaml.safe_dump(recipe | changes))
    return str(folder / "own.yaml")


def test_unknown_names_and_files_are_told():
    with pytest.raises(UserError, match="--suite geometry3: no such suite; did you mean geometry3k?"):
        get_suite("geometry3")
    with pytest.raises(UserError, match=r"^nowhere.yaml: No such file or directory; check the path"):
        get_suite("nowhere.yaml")


def test_a_suite_that_no_hub_holds_says_how_to_get_a_copy():
    with pytest.raises(
        UserError, match=r"suite geoqa_test: the hub has no dataset .* --suite_data geoqa_test=PATH: put"
    ):
        load_suite(get_suite("geoqa_test"))


def test_rows_that_cannot_be_used_are_left_out_with_their_reason(tmp_path):
    recipe = get_suite(own_recipe(tmp_path, images=["image"], choices="options", prompt="{question}\n{choices}"))
    good = {"question": "q", "options": ["a", "b"], "answer": "b", "image": "a.png"}
    (tmp_path / "a.png").write_bytes(png())
    bad = [
        {"answer": "c"},
        {"image": "no.png"},
        {"question": ""},
        {"options": ["a"]},
        {"image": "data:image/png;base64,AAAA"},
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(good | change) + "\n" for change in [*bad, {}]))
    rows, skipped = load_suite(recipe, path=str(file))
    assert {index: row.answer for index, row in rows.items()} == {5: "B"}
    assert [row.index for row in skipped] == [0, 1, 2, 3, 4]
    expected = [
        "line 1: the answer 'c' is not the text of any of the 2 choices",
        "line 2: no image file",
        'line 3: no column "question", or it is empty (found: question, options, answer, image)',
        "line 4: options must be a list of 2 to 10 choices, found ['a']",
        "line 5: ",
    ]
    for found, sentence in zip(skipped, expected, strict=True):
        assert found.reason.startswith(f"{file} {sentence}")
    file.write_text(json.dumps(good | bad[0]) + "\n")
    with pytest.raises(
        UserError, match="suite own, .*: none of its 1 rows can be used; the first: .* line 1: the answer"
    ):
        load_suite(recipe, path=str(file))


def test_a_folder_that_prepare_data_made_is_a_copy_of_its_suite_alone(tmp_path):
    copy, made = tmp_path / "copy", tmp_path / "made"
    copy.mkdir()
    prepare_data(["geometry3k", "--source", str(geometry(copy)), "--output", str(made)])
    rows, skipped = load_suite(get_suite("geometry3k"), path=str(made))
    assert skipped == []
    assert [(row.answer, row.datasource) for row in rows.values()] == [(r"2\sqrt{2}", "geometry3k")]
    with pytest.raises(
        UserError, match="suite mathvista: .*made was prepared with the recipe geometry3k; run `lmm-r1"
    ):
        load_suite(get_suite("mathvista"), path=str(made))


def test_a_suite_reads_images_out_of_an_archive(tmp_path):
    row = {"image_path": "./Geo170K/images/test/0.png", "question": "?", "ground_truth": "4"}
    (tmp_path / "geoqa_test_prompts.jsonl").write_text(json.dumps(row))
    with zipfile.ZipFile(tmp_path / "images.zip", "w") as archive:
        archive.writestr("images/test/0.png", png())
        archive.writestr("images/train/0.png", png("red"))
    rows, skipped = load_suite(get_suite("geoqa_test"), path=str(tmp_path))
    assert skipped == []
    assert rows[0].messages[0].parts[0] == ImagePart(png())


def test_a_recipe_without_sampling_is_no_suite(tmp_path):
    with pytest.raises(
        UserError, match="--suite math12k: this recipe is for training, because it has no field sampling"
    ):
        get_suite("math12k")
    with pytest.raises(UserError, match="own.yaml: the recipe has no field sampling; add it"):
        get_suite(own_recipe(tmp_path, sampling=None))
