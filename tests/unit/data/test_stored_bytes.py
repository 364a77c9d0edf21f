import copy
import os
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from helpers.conversations import load_rows
from PIL import Image

from lmm_r1.data import files
from lmm_r1.data.files import FEWEST_BYTES, all_records, read_records
from lmm_r1.data.images import load_image
from lmm_r1.data.messages import ImagePart, StoredBytes, describe, images_of, kind_of
from lmm_r1.data.row_parser import stored_messages
from lmm_r1.errors import UserError

BYTES = pyarrow.binary()
FEATURE = pyarrow.struct([("bytes", BYTES), ("path", pyarrow.string())])
PART = pyarrow.struct([("type", pyarrow.string()), ("text", pyarrow.string()), ("image", FEATURE)])
MESSAGES = pyarrow.list_(pyarrow.struct([("role", pyarrow.string()), ("content", pyarrow.list_(PART))]))


@pytest.fixture(autouse=True)
def _private_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def value(number, length=3000):
    """Bytes that differ from number to number and along their length."""
    return b"".join(b"%06d" % (number * 1000 + place) for place in range(length // 6 + 1))[:length]


def image(number, length=3000):
    return {"bytes": value(number, length), "path": f"{number}.png"}


COLUMNS = {
    "plain": ([value(1), None, b"", value(2, FEWEST_BYTES - 1), value(3, FEWEST_BYTES), value(4)], BYTES),
    "large_binary": ([None, *(value(number) for number in range(5))], pyarrow.large_binary()),
    "struct": ([image(1), None, {"bytes": None, "path": "a.png"}, image(2), image(3, 5), image(4)], FEATURE),
    "list": ([[image(1), image(2)], [], None, [None, image(3)], [image(4)], []], pyarrow.list_(FEATURE)),
    "large_list": ([[value(1)], [], None, [None, value(3)], [], [value(4)]], pyarrow.large_list(BYTES)),
    "pairs": ([[value(1), value(2)], None, [None, value(3)], *([[value(9), None]] * 3)], pyarrow.list_(BYTES, 2)),
    "dictionary": ([value(1), value(2), None, value(1), value(1), b""], pyarrow.dictionary(pyarrow.int32(), BYTES)),
    "messages": (
        [
            [{"role": "user", "content": [{"type": "image", "text": None, "image": image(number)}, None]}, None]
            for number in range(6)
        ],
        MESSAGES,
    ),
    "text": (["a", None, "c" * 2000, "d", "e", "f"], pyarrow.string()),
}


def table_of(names):
    return pyarrow.table({name: pyarrow.array(COLUMNS[name][0], COLUMNS[name][1]) for name in names})


def write(table, folder):
    pyarrow.parquet.write_table(table, folder / "rows.parquet", row_group_size=4)
    return folder / "rows.parquet"


def records(path):
    return [record for record, _, _ in read_records(str(path))]


def stored_in(item):
    """Every place in a record, at any depth."""
    if isinstance(item, StoredBytes):
        return [item]
    if isinstance(item, dict):
        item = list(item.values())
    return [place for entry in item for place in stored_in(entry)] if isinstance(item, list) else []


def read_again(item):
    """The record with the bytes in the place of places."""
    if isinstance(item, StoredBytes):
        return item.read()
    if isinstance(item, dict):
        return {name: read_again(entry) for name, entry in item.items()}
    return [read_again(entry) for entry in item] if isinstance(item, list) else item


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("names", [[name] for name in COLUMNS] + [list(COLUMNS)], ids=[*COLUMNS, "all"])
def test_records_hold_what_eager_reading_gives_with_long_binaries_left_in_the_file(
    copied, names, tmp_path, monkeypatch
):
    if copied:
        monkeypatch.setattr(files, "HELD_BYTES", 100)
    table = table_of(names)
    found = records(write(table, tmp_path))
    assert read_again(found) == table.to_pylist()
    for number, record in enumerate(found, start=1):
        assert all(place.length >= FEWEST_BYTES and place.row == number for place in stored_in(record))
    long = [name for name in names if name != "text"]
    assert all(stored_in([record[name] for record in found]) for name in long)
    copies = len(list((tmp_path / "cache").glob("**/*.arrow")))
    assert copies == (copied and names != ["text"])


def test_saved_datasets_keep_their_images_in_their_files_however_rows_were_chosen(tmp_path):
    rows = [{"image": image(number), "number": number} for number in range(600)]
    dataset = datasets.Dataset.from_list(rows)
    dataset.save_to_disk(tmp_path / "whole", num_shards=3)
    dataset.shuffle(seed=3).filter(lambda row: row["number"] % 2 == 0).save_to_disk(tmp_path / "chosen")
    whole = records(tmp_path / "whole")
    assert read_again(whole) == rows
    assert [(place.file, place.row) for place in stored_in(whole)] == [
        (str(tmp_path / "whole"), row) for row in range(1, 601)
    ]
    chosen = records(tmp_path / "chosen")
    assert len(stored_in(chosen)) == 300
    assert sorted(read_again(chosen), key=lambda row: row["number"]) == rows[::2]


MEASURED = """
import gc, os, sys
import pyarrow
from lmm_r1.data import files
from lmm_r1.data.files import read_records

def anonymous_bytes():
    "What this process holds in memory that is not that of a file."
    pyarrow.default_memory_pool().release_unused()
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

files.HELD_BYTES = 2**20
list(read_records(sys.argv[1]))  # imports what copies
gc.collect()
before = anonymous_bytes()
found = [record for record, _, _ in read_records(sys.argv[2])]
print(sum(len(record["image"].read()) for record in found), anonymous_bytes() - before)
"""


def test_the_images_of_a_large_file_are_not_held_in_memory(tmp_path):
    (tmp_path / "small").mkdir()
    small = write(pyarrow.table({"image": [os.urandom(2**21)]}), tmp_path / "small")
    large = write(pyarrow.table({"image": [os.urandom(100_000) for _ in range(640)]}), tmp_path)
    # `make test` lets the allocator keep what is freed.
    given = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    command = [sys.executable, "-c", MEASURED, small, large]
    done = subprocess.run(command, env=given, capture_output=True, text=True, check=True)
    size, held = map(int, done.stdout.split())
    assert size == 64_000_000
    assert held < 32_000_000


def test_a_copy_is_made_once_and_anew_when_the_file_changes(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "HELD_BYTES", 100)
    file = tmp_path / "rows.parquet"
    made = []
    for number in (1, 1, 2):
        pyarrow.parquet.write_table(pyarrow.table({"image": [value(number)]}), file)
        os.utime(file, ns=(number, number))
        made.append(records(file))
        assert read_again(made[-1]) == [{"image": value(number)}]
    assert read_again(made[0]) == [{"image": value(1)}], "the copy is mapped, though its name is gone"
    assert len(list((tmp_path / "cache").glob("**/*.arrow"))) == 2


def test_threads_that_need_a_copy_at_once_share_one(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "HELD_BYTES", 100)
    table = pyarrow.table({"image": [value(number) for number in range(300)]})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: records(tmp_path / "rows.parquet"), range(4)))
    assert all(read_again(rows) == table.to_pylist() for rows in found)
    assert len(list((tmp_path / "cache").glob("**/*.arrow"))) == 1


def test_a_copy_that_cannot_be_written_is_an_error_that_names_the_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "HELD_BYTES", 100)
    (tmp_path / "cache").write_text("a file")
    pyarrow.parquet.write_table(pyarrow.table({"image": [value(1)]}), tmp_path / "rows.parquet")
    with pytest.raises(UserError, match="rows.parquet: .* cannot be written to .*cache.* HF_DATASETS_CACHE"):
        records(tmp_path / "rows.parquet")


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("damage", ["empty", "cut", "overwritten"])
def test_a_damaged_file_is_an_error_that_names_it(copied, damage, tmp_path, monkeypatch):
    if copied:
        monkeypatch.setattr(files, "HELD_BYTES", 100)
    file = write(pyarrow.table({"image": [value(number) for number in range(50)]}), tmp_path)
    data = bytearray(file.read_bytes())
    if damage == "overwritten":
        middle = len(data) // 2
        data[middle - 500 : middle + 500] = b"\xff" * 1000
    file.write_bytes({"empty": b"", "cut": data[: len(data) // 2], "overwritten": data}[damage])
    with pytest.raises(UserError, match=f"{file.name}: not a readable Parquet file"):
        records(file)
    assert not list((tmp_path / "cache").glob("**/*.arrow"))


def picture_rows(folder):
    """A file with one row, its image a picture of 40 x 30 random pixels."""
    Image.frombytes("RGB", (40, 30), value(7, 3600)).save(folder / "a.bmp")
    data = (folder / "a.bmp").read_bytes()
    table = pyarrow.table({"problem": ["<image>Which?"], "images": [[data]], "answer": ["3"]})
    return write(table, folder), data


def test_rows_show_and_store_the_image_that_stays_in_the_file(tmp_path):
    file, data = picture_rows(tmp_path)
    (row,) = load_rows(str(file))
    (part,) = images_of(row.messages)
    assert isinstance(part.source, StoredBytes)
    assert kind_of(part.source) == "bytes"
    assert describe(part.source) == "<image 40x30>"
    assert load_image(part, location="").tobytes() == load_image(ImagePart(data), location="").tobytes()
    assert stored_messages(row.messages)[0]["content"][0]["image"].startswith("data:image/bmp;base64,")
    assert load_rows(str(file))[0].messages == row.messages
    assert hash(load_rows(str(file))[0].messages) == hash(row.messages)
    assert copy.deepcopy(row).messages[0].parts[0].source is part.source


def test_a_broken_stored_image_is_an_error_with_its_row(tmp_path):
    table = pyarrow.table({"problem": ["<image>Which?"], "images": [[value(1)]], "answer": ["3"]})
    (row,) = load_rows(str(write(table, tmp_path)))
    with pytest.raises(UserError, match="rows.parquet row 1: cannot read the image <image, 3000 bytes>"):
        load_image(images_of(row.messages)[0], location=row.location)


def test_another_machine_gets_the_bytes_with_the_row(tmp_path):
    file, data = picture_rows(tmp_path)
    sent = pickle.dumps(load_rows(str(file)))
    file.unlink()
    code = "import pickle, sys; (row,) = pickle.load(sys.stdin.buffer); sys.stdout.buffer.write(row.messages[0].parts[0].source)"
    done = subprocess.run([sys.executable, "-c", code], input=sent, stdout=subprocess.PIPE, check=True)
    assert done.stdout == data


@pytest.mark.parametrize(
    "kind", [pyarrow.string(), pyarrow.dictionary(pyarrow.int32(), pyarrow.string()), pyarrow.binary()]
)
def test_a_file_that_grows_a_thousandfold_is_refused_before_it_fills_the_memory(kind, tmp_path, monkeypatch):
    file = tmp_path / "rows.parquet"
    values = pyarrow.array([b"x" * 100_000 if kind == BYTES else "x" * 100_000] * 1000).cast(kind)
    table = pyarrow.table({"problem": values, "answer": ["1"] * 1000})
    pyarrow.parquet.write_table(table, file, compression="zstd")
    assert file.stat().st_size < 60_000
    assert len(list(read_records(str(file)))) == 1000, "a gibibyte may be had by any file"
    monkeypatch.setattr(files, "FREE_GROWTH_BYTES", 2**20)
    if kind == BYTES:
        os.utime(file, ns=(1, 1))
    read = read_records(str(file))
    with pytest.raises(UserError, match="rows.parquet: its rows take more than 1,000 times the .* bytes of the file"):
        list(read)


@pytest.mark.parametrize("copied", [False, True])
def test_a_row_that_cannot_be_read_is_named_and_the_others_are_read(copied, tmp_path, monkeypatch):
    if copied:
        monkeypatch.setattr(files, "HELD_BYTES", 100)
    texts = pyarrow.array([b"one", b"t\xffo", b"three"]).view(pyarrow.string())
    file = write(pyarrow.table({"problem": texts, "image": [value(1), value(2), value(3)]}), tmp_path)
    found = list(all_records(str(file), split="train"))
    assert [fields.get("problem") for fields, _, _ in found] == ["one", None, "three"]
    assert str(found[1][0].error).startswith(f"{file} row 2: cannot be read (")
