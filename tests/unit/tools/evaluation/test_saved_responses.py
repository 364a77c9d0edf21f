import json
from pathlib import Path

import pytest
from helpers.run_folders import judged, judged_rows, write_image
from helpers.tables import table

from lmm_r1.data.messages import images_of
from lmm_r1.errors import UserError
from lmm_r1.records.responses import VerifierVerdict, write_responses
from lmm_r1.tools.evaluation.rows import saved_checkpoints, saved_files

BOTH = {"math": VerifierVerdict(score=1.0, parts={}), "exact": VerifierVerdict(score=0.0, parts={})}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """`first` holds base and sft, `second` holds base with fewer samples and judged by math alone."""
    first = [
        *judged_rows([[True] * 4, [False] * 4], verdicts=BOTH),
        *judged_rows([[True] * 4], checkpoint="sft", verdicts=BOTH),
        judged(file="other", verdicts=BOTH),
    ]
    write_responses(tmp_path / "first.responses.jsonl", first, append=False)
    write_responses(tmp_path / "second.responses.jsonl", judged_rows([[True, False, True]]), append=False)
    return tmp_path


def test_a_file_brings_all_its_checkpoints_or_the_named_one(folder):
    assert [own.name for own in saved_checkpoints([str(folder / "first.responses.jsonl")])] == ["base", "sft"]
    # Beside second.json, which need not be there.
    taken = saved_checkpoints([f"sft={folder / 'first.responses.jsonl'}", str(folder / "second.json")])
    assert [own.name for own in taken] == ["sft", "base"]
    assert len(taken[1].files["held_out"]) == 3


def test_checkpoints_of_one_name_are_told_apart_by_their_files(folder):
    taken = saved_checkpoints([f"base={folder / 'first.json'}", f"base={folder / 'second.json'}"])
    assert [own.name for own in taken] == ["base (first)", "base (second)"]
    assert {response.checkpoint for response in taken[0].files["held_out"]} == {"base (first)"}


def test_files_are_measured_by_what_all_checkpoints_have(folder):
    files = saved_files(saved_checkpoints([str(folder / "first.json")]))
    assert [(file.name, file.verifiers, file.ks) for file in files] == [
        ("held_out", ("math", "exact"), (1, 2, 4)),
        ("other", ("math", "exact"), (1,)),
    ]
    assert files[0].source == "rows.jsonl"
    held_out, _ = saved_files(saved_checkpoints([f"{folder / 'first.json'}", f"{folder / 'second.json'}"]))
    assert (held_out.verifiers, held_out.ks) == (("math",), (1, 2))


@pytest.mark.parametrize(
    ("entries", "sentence"), table("evaluation/saved_responses", "test_what_cannot_be_compared_is_refused")
)
def test_what_cannot_be_compared_is_refused(entries, sentence, folder):
    with pytest.raises(UserError, match=sentence):
        saved_checkpoints([entry.format(folder) for entry in entries])


def test_a_k_beyond_the_samples_and_verifiers_that_do_not_meet_are_refused(folder):
    taken = saved_checkpoints([str(folder / "first.json"), f"base={folder / 'second.json'}"])
    with pytest.raises(UserError, match="--k 4: held_out has rows with 3 samples, so k must be from 1 to 3"):
        saved_files(taken, ks=(1, 4))
    exact = judged_rows([[True]], checkpoint="x", verdicts={"exact": BOTH["exact"]})
    write_responses(folder / "exact.responses.jsonl", exact, append=False)
    taken = saved_checkpoints([f"base={folder / 'second.json'}", str(folder / "exact.json")])
    with pytest.raises(UserError, match="held_out: no verifier judged it for all checkpoints"):
        saved_files(taken)


def test_rows_are_found_again_for_their_images_where_they_lie_with_the_same_question(tmp_path):
    shown = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "What is 2 + 2?"}]
    line = json.dumps({"message": json.dumps([{"role": "user", "content": shown}]), "answer": "4"})
    write_image(tmp_path / "a.png", number=4)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(f"{line}\n{line.replace('2 + 2', '3 + 3')}\n")
    places = [f"{rows} line 1", f"{rows} line 2", f"{tmp_path / 'gone.jsonl'} line 1"]
    responses = [judged(index=index, row=place, images=1) for index, place in enumerate(places)]
    # Of the second line another question was answered.
    other = judged(checkpoint="sft", row=places[0])
    write_responses(tmp_path / "a.responses.jsonl", [*responses, other], append=False)
    checkpoint, _ = saved_checkpoints([str(tmp_path / "a.responses.jsonl")])
    (file,) = saved_files([checkpoint])
    assert list(file.rows) == [0]
    assert images_of(file.rows[0].messages)[0].source == str(tmp_path / "a.png")
    assert [one.images for one in checkpoint.files["held_out"]] == [1, 1, 1]
