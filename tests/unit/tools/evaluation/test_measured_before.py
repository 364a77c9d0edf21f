"""Which checkpoints and files are measured again, and what is written down after each."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.run_folders import judged_rows

from lmm_r1.data.messages import SkippedRow
from lmm_r1.records.responses import read_responses
from lmm_r1.tools.evaluation import measurement
from lmm_r1.tools.evaluation.board import MeasuredFile
from lmm_r1.tools.evaluation.measurement import Measured

LEFT_OUT = SkippedRow(index=7, reason="rows.jsonl line 8: no image")


class Evaluation:
    """Evaluations of a folder; what a checkpoint on a file depends on is given as a text."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.output = folder / "scores.json"
        self.responses = folder / "scores.responses.jsonl"
        self.asked: list[tuple[str, tuple[str, ...]]] = []
        self.fails = ""
        monkeypatch.setattr(measurement, "_measured", self._measured)

    def run(self, keys: dict[str, dict[str, str]], *, overwrite: bool = False) -> dict:
        self.asked.clear()
        files = dict.fromkeys(name for own in keys.values() for name in own)
        measured = [MeasuredFile(name=name, source=name, verifiers=("math",), ks=(1,)) for name in files]
        subjects = [
            SimpleNamespace(name=name, said=name, key=lambda file, own=own: own[file.name] or None)
            for name, own in keys.items()
        ]
        config = SimpleNamespace(output=self.output, overwrite=overwrite, agent=None, checkpoints=tuple(keys))
        return measurement._measure_all(config, subjects, measured, judges={}, report=lambda line: None)

    def _measured(self, config, subject, files, *, keys, judges, report):
        if subject.name == self.fails:
            raise MemoryError
        self.asked.append((subject.name, tuple(file.name for file in files)))
        return {
            (subject.name, file.name): Measured(
                key=keys[subject.name, file.name] or "",
                responses=tuple(judged_rows([[True], [False]], checkpoint=subject.name, file=file.name)),
                skipped=(LEFT_OUT,),
                seconds=2.5,
            )
            for file in files
        }

    def places(self) -> list[tuple[str, str]]:
        return list(dict.fromkeys((one.checkpoint, one.file) for one in read_responses(self.responses)))


@pytest.fixture
def evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Evaluation:
    return Evaluation(tmp_path, monkeypatch)


BOTH = {"base": {"text": "1", "image": "2"}, "grpo": {"text": "3", "image": "4"}}


def test_what_has_not_changed_is_read_again_and_only_what_has_is_measured(evaluation):
    first = evaluation.run(BOTH)
    assert evaluation.asked == [("base", ("text", "image")), ("grpo", ("text", "image"))]
    assert evaluation.run(BOTH) == first
    assert evaluation.asked == []
    changed = {"base": {"text": "1", "image": "new"}, "grpo": {"text": "3", "image": "4"}}
    assert evaluation.run(changed)["base", "text"] == first["base", "text"]
    assert evaluation.asked == [("base", ("image",))]
    order = [("base", "text"), ("base", "image"), ("grpo", "text"), ("grpo", "image")]
    assert evaluation.places() == order, "in the order of the command, whatever was measured last"
    assert evaluation.run(changed)["base", "image"].skipped == (LEFT_OUT,)
    assert evaluation.asked == []
    evaluation.run(changed, overwrite=True)
    assert evaluation.asked == [("base", ("text", "image")), ("grpo", ("text", "image"))]


def test_an_evaluation_that_ended_goes_on_with_the_checkpoint_that_it_was_at(evaluation):
    evaluation.fails = "grpo"
    with pytest.raises(MemoryError):
        evaluation.run(BOTH)
    evaluation.fails = ""
    evaluation.run(BOTH)
    assert evaluation.asked == [("grpo", ("text", "image"))]


def test_an_engine_that_cannot_be_had_costs_no_earlier_responses(evaluation):
    evaluation.run(BOTH)
    before = evaluation.responses.read_bytes()
    evaluation.fails = "base"
    with pytest.raises(MemoryError):
        evaluation.run({"base": {"text": "5"}})
    assert evaluation.responses.read_bytes() == before


def test_what_cannot_be_told_is_always_measured(evaluation):
    for _ in range(2):
        evaluation.run({"hub": {"text": ""}})
        assert evaluation.asked == [("hub", ("text",))]
