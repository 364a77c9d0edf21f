"""The Python API as a notebook uses it: one call after another in a process whose event loop runs."""

import asyncio
import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from helpers.commands import ANSWERED, QUESTION
from helpers.http_servers import hub_server

import lmm_r1
from lmm_r1.supervised import sft

pytestmark = pytest.mark.slow

ROWS = [QUESTION, {**QUESTION, "answer": "3"}]
SIZES = {
    "train.batch_size": 2,
    "train.micro_batch_size": 2,
    "train.max_epochs": 1,
    "ds.param_dtype": "fp32",
    "adam.lr": 1e-3,
}
TOLD: list[tuple[int, object]] = []
"""What `on_evaluation` was told."""
SHORT = {"max_new_tokens": 4, "max_model_len": 128, "system_prompt": "none"}


def in_a_cell(work: Any) -> Any:
    """What a function returns that is called where an event loop runs."""

    async def cell() -> Any:
        return work()

    return asyncio.run(cell())


@pytest.fixture(scope="module")
def runs(tiny_checkpoint, tmp_path_factory) -> list[lmm_r1.TrainedRun]:
    """Two supervised stages, the second of which starts from the first one's model."""
    folder = tmp_path_factory.mktemp("runs")

    def trained() -> list[lmm_r1.TrainedRun]:
        first = {"model.model_name_or_path": tiny_checkpoint("llm"), "ckpt.output_dir": folder / "first", **SIZES}
        one = lmm_r1.train_sft(first, rows=[ANSWERED] * 4)
        return [
            one,
            lmm_r1.train_sft(
                first | {"eval.steps": 1},
                rows=(row for row in [ANSWERED] * 6),
                eval_rows=[ANSWERED],
                model=one,
                output=folder / "second",
                on_step=lambda step, metrics: step < 2,
                on_evaluation=lambda step, metrics: TOLD.append((step, metrics["eval_loss"])),
            ),
        ]

    environment, thresholds = dict(os.environ), gc.get_threshold()
    found = in_a_cell(trained)
    assert (dict(os.environ), gc.get_threshold(), dist.is_initialized()) == (environment, thresholds, False)
    return found


def test_two_stages_are_trained_one_after_the_other_and_tell_what_they_logged(runs):
    first, second = runs
    assert [(run.name, run.steps, run.folder.name) for run in runs] == [("sft", 2, "first"), ("sft", 2, "second")]
    assert [step for step, _ in second.metrics.series("loss")] == [1, 2]
    assert "eval_loss" in second.metrics.names
    assert TOLD == second.metrics.series("eval_loss"), "of its three steps, a callback ended the last one"
    assert sum(weight.numel() for weight in second.model().parameters()) > 0
    assert second.metrics.series("loss")[0][1] < first.metrics.series("loss")[0][1], "it goes on where the first ended"
    assert len(list(first.folder.glob("rows-*.jsonl"))) == 1


def test_a_finished_stage_and_too_few_rows_are_told_in_the_words_of_the_call(runs, tiny_checkpoint, tmp_path):
    settings = {"model.model_name_or_path": tiny_checkpoint("llm"), "ckpt.output_dir": runs[0].folder, **SIZES}
    before = sorted(path.name for path in runs[0].folder.iterdir())
    with pytest.raises(lmm_r1.UserError, match="^ckpt.output_dir .*first: this stage is finished"):
        lmm_r1.train_sft(settings, rows=[{**ANSWERED, "answer": "5"}])
    assert sorted(path.name for path in runs[0].folder.iterdir()) == before
    few = r"^data.dataset .*/few/rows-\w+.jsonl gives 1 rows, fewer than train.batch_size 2; lower it or add rows$"
    with pytest.raises(lmm_r1.UserError, match=few):
        lmm_r1.train_sft(settings, {"ckpt.output_dir": tmp_path / "few"}, rows=[ANSWERED])


def test_a_run_that_failed_in_its_first_step_is_made_by_the_same_call_and_its_model_uploaded(
    tiny_checkpoint, tmp_path, monkeypatch
):
    settings = {"model.model_name_or_path": tiny_checkpoint("llm"), "ckpt.output_dir": tmp_path / "run", **SIZES}
    encode, encoded = sft.encode_sample, iter([True])
    # The disk breaks behind the first row, which is encoded to see whether one fits.
    monkeypatch.setattr(sft, "encode_sample", lambda *row, **given: next(encoded) and encode(*row, **given))
    with pytest.raises(lmm_r1.UserError, match="the same call starts anew$"):
        lmm_r1.train_sft(settings, rows=[ANSWERED, ANSWERED])
    assert not dist.is_initialized()
    monkeypatch.setattr(sft, "encode_sample", encode)
    with hub_server() as uploads:
        again = lmm_r1.train_sft(settings, {"ckpt.push_to_hub": "me/model"}, rows=[ANSWERED, ANSWERED])
    assert again.steps == 1
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(uploads.files)


def test_responses_to_rows_and_to_one_conversation_come_back_with_their_scores(runs, tmp_path):
    settings = {**SHORT, "n_samples": 2, "temperature": 1.0, "eval_task": "generate"}
    made = in_a_cell(lambda: lmm_r1.generate(runs[1], ROWS, reward="math", output=tmp_path / "r.jsonl", **settings))
    assert [row.answer for row in made.rows] == ["2", "3"]
    assert all(len(row.responses) == 2 for row in made.rows)
    assert all({"accuracy", "format"} <= response.scores.keys() for row in made.rows for response in row.responses)
    assert (made.output, made.skipped) == (tmp_path / "r.jsonl", ())
    asked = in_a_cell(lambda: lmm_r1.generate(runs[1], QUESTION["messages"], **SHORT, eval_task="generate"))
    assert len(asked.texts) == 1
    assert (asked.rows[0].responses[0].reward, asked.output) == (None, None)
    with pytest.raises(lmm_r1.UserError, match="^config: unknown key n_sample; did you mean n_samples?"):
        lmm_r1.generate(runs[1], ROWS, n_sample=2)


def test_checkpoints_are_measured_by_name_with_the_responses_at_hand(runs, tmp_path, capsys):
    named = {"cold": runs[0], "warm": runs[1]}
    found = in_a_cell(
        lambda: lmm_r1.evaluate(
            named, {"sums": ROWS}, reward="exact", output=tmp_path / "scores.json", backend="transformers", **SHORT
        )
    )
    cells = found.board.cells
    assert list(cells) == [("cold", "sums"), ("warm", "sums")]
    assert found.accuracy("warm", "sums") == cells["warm", "sums"].all.verifiers["exact"].accuracy.mean
    assert len(found.board.checkpoints[0].files["sums"]) == 2
    assert Path(found.page).is_file()
    assert (tmp_path / "scores.responses.jsonl").is_file()
    with pytest.raises(lmm_r1.UserError, match="^hot on sums was not measured; there are cold, warm on sums"):
        found.accuracy("hot", "sums")
    assert f"scores: {tmp_path}/scores.json" in capsys.readouterr().out
    asked = {"reward": "exact", "backend": "transformers", **SHORT}
    unkept = in_a_cell(lambda: lmm_r1.evaluate(runs[1], ROWS, **asked))
    told = capsys.readouterr().out
    assert (unkept.output, unkept.page, len(unkept.board.cells)) == (None, None, 1)
    assert "exact" in told
    assert "scores:" not in told, "a file that is not kept is not told"
