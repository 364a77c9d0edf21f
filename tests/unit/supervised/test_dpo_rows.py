"""Pairs of a preference run: the columns that they are read from, and which of their texts are plain."""

import pytest
from helpers.conversations import write_rows
from helpers.sessions import configured
from PIL import Image

from lmm_r1.config import DPOConfig
from lmm_r1.data.messages import PreferenceRow, TextPart, images_of
from lmm_r1.data.training_rows import rows_digest
from lmm_r1.errors import UserError
from lmm_r1.supervised.pairs import DPORun

PROMPT = [{"role": "user", "content": "1?"}]
ROW = {"prompt": PROMPT, "chosen": "2", "rejected": "3"}


def config(**flags: object) -> DPOConfig:
    return configured(DPOConfig, **{"train__batch_size": 1} | flags)


def said(row: PreferenceRow) -> list[str]:
    """The texts of a pair: of its prompt, its chosen and its rejected side."""
    parts = [side[-1].parts[-1] for side in (row.messages, row.chosen, row.rejected)]
    return [part.text for part in parts if isinstance(part, TextPart)]


def test_pairs_are_read_from_the_columns_that_the_flags_name(tmp_path):
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    question = [{"role": "user", "content": "<image>1?"}]
    path = write_rows(
        tmp_path / "rows.jsonl", {"q": question, "good": "2", "bad": "3", "pictures": ["a.png"], "margin": 0.5}
    )
    flags = {"data__chosen_key": "good", "data__rejected_key": "bad", "data__image_key": "pictures"}
    (row,) = DPORun.training_rows(config(data__dataset=path, data__prompt_key="q", **flags))
    assert said(row) == ["1?", "2", "3"]
    assert [part.source for part in images_of(row.messages)] == [str(tmp_path / "a.png")]
    assert (row.margin, row.plain) == (0.5, False)
    with pytest.raises(UserError, match="rows.jsonl line 1: "):
        DPORun.training_rows(config(data__dataset=path, data__prompt_key="q", data__image_key="pictures"))


def test_rows_that_are_no_pairs_are_refused_with_their_place(tmp_path):
    same = write_rows(tmp_path / "same.jsonl", ROW, ROW | {"rejected": "2"})
    with pytest.raises(UserError, match="same.jsonl line 2: "):
        DPORun.training_rows(config(data__dataset=same))
    with pytest.raises(UserError, match="gives 1 rows, fewer than --train.batch_size 2"):
        DPORun.training_rows(config(data__dataset=write_rows(tmp_path / "few.jsonl", ROW), train__batch_size=2))


def test_the_digest_of_pairs_tells_their_sides_apart(tmp_path):
    scored = ROW | {"margin": 1.0, "chosen_score": 2.0, "rejected_score": 1.0}
    path = write_rows(
        tmp_path / "rows.jsonl", ROW, ROW | {"chosen": "3", "rejected": "2"}, ROW | {"margin": 1.0}, scored
    )
    digests = {rows_digest([row]) for row in DPORun.training_rows(config(data__dataset=path))}
    assert len(digests) == 4
