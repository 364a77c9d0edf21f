"""Every ready-made recipe parses and makes of a record in its published columns the row that it should."""

from pathlib import Path

import pytest
from helpers.recipe_samples import SAMPLES, RecipeSample, png

from lmm_r1.config.rewards import verifier_from
from lmm_r1.data.messages import Row, TextPart, images_of
from lmm_r1.tools.recipes import get_recipe, recipe_names
from lmm_r1.tools.recipes.preparation import RecordView, check_embedded_images
from remote_rm.verifier import Item


def mapped(name: str, sample: RecipeSample, folder: Path) -> Row:
    for file in sample.files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(png())
    return RecordView((dict(sample.record), "rows line 1", folder), recipe=get_recipe(name)).row()


def user_text(row: Row) -> str:
    (user,) = (message for message in row.messages if message.role == "user")
    return "".join(part.text for part in user.parts if isinstance(part, TextPart))


def test_every_recipe_has_a_sample_and_every_sample_a_recipe():
    assert set(recipe_names()) == set(SAMPLES)


@pytest.mark.parametrize("name", SAMPLES)
def test_a_recipe_makes_a_valid_row_of_a_record_in_its_published_columns(name, tmp_path):
    recipe, sample = get_recipe(name), SAMPLES[name]
    assert recipe.name == name
    row = mapped(name, sample, tmp_path)
    check_embedded_images(row)
    assert len(images_of(row.messages)) == sample.images
    assert {image.max_pixels for image in images_of(row.messages)} <= {recipe.max_pixels}
    assert sample.says in user_text(row)
    assert row.datasource == (f"{name}/{sample.group}" if sample.group else name)
    if sample.answer != "?":
        assert row.answer == sample.answer
    view = RecordView((dict(sample.record), "rows line 1", tmp_path), recipe=recipe)
    assert view.failed_filter() is None
    assert bool(sample.filtered) == bool(recipe.where)
    if sample.filtered:
        view = RecordView(({**sample.record, **sample.filtered}, "rows line 1", tmp_path), recipe=recipe)
        assert view.failed_filter() in sample.filtered


@pytest.mark.parametrize("name", SAMPLES)
def test_the_verifiers_of_a_recipe_know_its_answer_from_another(name, tmp_path):
    row = mapped(name, SAMPLES[name], tmp_path)
    for spec in get_recipe(name).verifiers:
        verifier = verifier_from(spec)
        verifier.check_label(row.answer)
        right, wrong = (
            verifier.score(Item(prompt="", response=f"<think>.</think><answer>{answer}</answer>", label=row.answer))
            for answer in (row.answer, "J" if row.answer != "J" else "A")
        )
        assert (right.parts["accuracy"], wrong.parts["accuracy"]) == (1.0, 0.0), spec


def test_choices_are_put_in_an_order_that_is_always_the_same_and_not_always_the_first(tmp_path):
    letters = []
    for number in range(12):
        record = dict(SAMPLES["gpqa_diamond"].record) | {"Correct Answer": f"right {number}"}
        rows = [RecordView((record, "l", tmp_path), recipe=get_recipe("gpqa_diamond")).row() for _ in range(2)]
        assert rows[0] == rows[1]
        line = next(line for line in user_text(rows[0]).splitlines() if f"right {number}" in line)
        assert line == f"({rows[0].answer}) right {number}"
        letters.append(rows[0].answer)
    assert len(set(letters)) == 4


def test_images_stand_where_the_question_has_its_tags(tmp_path):
    row = mapped("journeybench_multi_image", SAMPLES["journeybench_multi_image"], tmp_path)
    kinds = [part.text if isinstance(part, TextPart) else "image" for part in row.messages[0].parts]
    assert kinds[:3] == ["image", "and", "image"]
    assert kinds[3].startswith(": how many cats?")


def test_ready_made_messages_keep_their_system_turn_and_find_their_image(tmp_path):
    row = mapped("vermulti", SAMPLES["vermulti"], tmp_path)
    assert [message.role for message in row.messages] == ["system", "user"]
    (image,) = images_of(row.messages)
    assert image.source == str(tmp_path / "img/1.png")


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_says_what_is_known_of_its_licence(name):
    recipe = get_recipe(name)
    assert recipe.licence != "unknown" or "licence" in recipe.unchecked
