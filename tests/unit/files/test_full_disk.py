"""What Python and the libraries here raise on a disk that takes no more, and the sentence that is made of it."""

import errno
import os
import pickle
import sqlite3

import pyarrow
import pyarrow.parquet
import pytest
import safetensors.torch
import tokenizers
import torch
from PIL import Image
from ray.exceptions import RayTaskError

from lmm_r1.errors import UserError
from lmm_r1.files.atomic import sentence_of, writing
from lmm_r1.files.json_files import append_json_lines

FULL = "cannot be written (No space left on device); free space on its disk, or choose another place"
CUT = "cannot be written (only a part was written); free space on its disk, or choose another place"


def _text(file):
    with file.open("w") as stream:
        stream.write("x")


def _table(file):
    pyarrow.parquet.write_table(pyarrow.table({"a": range(10_000)}), file)


def _tokenizer(file):
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a")).save(str(file))


def _database(file):
    connection = sqlite3.connect(file)
    connection.execute("CREATE TABLE t (a)")


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (_text, FULL),
        (lambda file: Image.new("RGB", (900, 900)).save(file, format="PNG"), FULL),
        (_table, FULL),
        (_tokenizer, FULL),
        (_database, FULL),
        (lambda file: torch.save(torch.zeros(100), file), CUT),
        (lambda file: torch.save(torch.zeros(100), file, _use_new_zipfile_serialization=False), FULL),
    ],
    ids=["text", "PNG", "parquet", "tokenizer", "SQLite", "PyTorch", "PyTorch's old format"],
)
def test_each_librarys_error_for_a_full_disk_is_the_sentence_about_the_file(write, said, tmp_path):
    (tmp_path / "file").symlink_to("/dev/full")
    with pytest.raises(UserError) as raised, writing("out"):
        write(tmp_path / "file")
    assert str(raised.value) == f"out: {said}"


def test_an_error_of_safetensors_that_a_ray_worker_raised_is_told_with_its_reason():
    # As a worker raises it where files may have 100 bytes: see the contract test of the commands.
    told = safetensors.SafetensorError("Error while serializing: I/O error: Disk quota exceeded (os error 122)")
    error = RayTaskError("save", "Traceback ...", pickle.loads(pickle.dumps(told))).as_instanceof_cause()
    assert sentence_of(error, path="model") == (
        "model: cannot be written (Disk quota exceeded); free space within the quota of its disk, or choose another place"
    )


def test_what_may_not_be_opened_is_named_and_nothing_is_said_of_what_has_no_name():
    refused = PermissionError(errno.EACCES, os.strerror(errno.EACCES), "rows.jsonl")
    assert sentence_of(refused) == (
        "rows.jsonl: cannot be opened (Permission denied); change its permissions, or choose another place"
    )
    assert sentence_of(PermissionError(errno.EPERM, "kill")) is None


@pytest.mark.parametrize(
    "error", [ValueError("No space left on device"), FileNotFoundError(2, "no", "x"), OSError("?")]
)
def test_other_errors_pass(error):
    assert sentence_of(error) is None
    with pytest.raises(type(error)) as raised, writing("out"):
        raise error
    assert raised.value is error


def test_a_line_that_cannot_be_appended_leaves_an_error_that_names_the_file(tmp_path):
    file = tmp_path / "lines.jsonl"
    file.symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left") as raised:
        append_json_lines(file, [{"a": 1}])
    assert sentence_of(raised.value) == f"{file}: {FULL}"
