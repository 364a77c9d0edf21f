import copy
import ctypes
import gc
import multiprocessing
import os
import pickle
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from helpers.conversations import load_rows
from PIL import Image

from lmm_r1.data import arrow, parquet_files
from lmm_r1.data.arrow import MappedFiles
from lmm_r1.data.files import read_records
from lmm_r1.data.images import load_image
from lmm_r1.data.messages import FEWEST_BYTES, ImagePart, StoredBytes, describe, images_of, kind_of
from lmm_r1.data.row_parser import stored_messages
from lmm_r1.errors import UserError

BYTES = pyarrow.binary()
FEATURE = pyarrow.struct([("bytes", BYTES), ("path", pyarrow.string())])
PART = pyarrow.struct([("type", pyarrow.string()), ("text", pyarrow.string()), ("image", FEATURE)])
MESSAGES = pyarrow.list_(pyarrow.struct([("role", pyarrow.string()), ("content", pyarrow.list_(PART))]))


@pytest.fixture(autouse=True)
def _private_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(parquet_files, "_DECODED", parquet_files._DecodedColumns(2**20))


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


def write(table, folder, kind):
    file = folder / f"rows.{kind.partition(' ')[0]}"
    if kind == "parquet":
        pyarrow.parquet.write_table(table, file, row_group_size=4)
    elif kind == "parquet copied":
        pyarrow.parquet.write_table(table, file)
    else:
        opened = pyarrow.ipc.new_stream if "stream" in kind else pyarrow.ipc.new_file
        options = pyarrow.ipc.IpcWriteOptions(compression="zstd" if "compressed" in kind else None)
        with opened(str(file), table.schema, options=options) as writer:
            writer.write_table(table, max_chunksize=4)
    return file


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


KINDS = ("parquet", "parquet copied", "arrow", "arrow stream", "arrow compressed", "arrow compressed stream")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("names", [[name] for name in COLUMNS] + [list(COLUMNS)], ids=[*COLUMNS, "all"])
def test_records_hold_what_eager_reading_gives_with_long_binaries_left_in_the_file(kind, names, tmp_path, monkeypatch):
    if kind == "parquet copied":
        monkeypatch.setattr(parquet_files, "_LARGEST_GROUP", 100)
    table = table_of(names)
    found = records(write(table, tmp_path, kind))
    assert read_again(found) == table.to_pylist()
    for number, record in enumerate(found, start=1):
        assert all(place.length >= FEWEST_BYTES and place.row == number for place in stored_in(record))
    long = [name for name in names if name != "text"]
    assert all(stored_in([record[name] for record in found]) for name in long)
    # In no order, and again from the cache.
    places = [place for record in found for place in stored_in(record)]
    assert [place.read() for place in reversed(places)] == [place.read() for place in places][::-1]


def test_values_are_counted_over_batches_and_row_groups(tmp_path):
    images = [[image(number, 1024), image(number + 5000, 1024)] if number % 3 else None for number in range(700)]
    table = pyarrow.table({"images": pyarrow.array(images, pyarrow.list_(FEATURE))})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet", row_group_size=300)
    assert read_again(records(tmp_path / "rows.parquet")) == table.to_pylist()


def test_a_columns_name_may_begin_as_the_path_of_another(tmp_path):
    names = {"image": FEATURE, "image.bytes": BYTES, "image.path": BYTES, "im": BYTES}
    rows = [{"image": image(number), **{name: value(9) for name in [*names][1:]}} for number in range(3)]
    table = pyarrow.Table.from_pylist(rows, schema=pyarrow.schema(names.items()))
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    assert read_again(records(tmp_path / "rows.parquet")) == rows


def test_saved_datasets_keep_their_images_in_their_files_however_rows_were_chosen(tmp_path):
    rows = [{"image": image(number), "number": number} for number in range(600)]
    dataset = datasets.Dataset.from_list(rows)
    dataset.save_to_disk(tmp_path / "whole", num_shards=3)
    dataset.shuffle(seed=3).filter(lambda row: row["number"] % 2 == 0).save_to_disk(tmp_path / "chosen")
    whole = records(tmp_path / "whole")
    assert read_again(whole) == rows
    assert {os.path.dirname(place.place.state.path) for place in stored_in(whole)} == {str(tmp_path / "whole")}
    assert len(stored_in(whole)) == 600
    chosen = records(tmp_path / "chosen")
    assert len(stored_in(chosen)) == 300
    assert sorted(read_again(chosen), key=lambda row: row["number"]) == rows[::2]


def test_no_image_is_in_memory_after_loading_and_the_cache_keeps_its_bound(tmp_path):
    table = pyarrow.table({"image": [value(number) for number in range(2000)]})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet", row_group_size=100)
    del table
    found = records(tmp_path / "rows.parquet")
    gc.collect()
    held = sum(len(item) for record in found for item in gc.get_referents(record) if isinstance(item, bytes))
    assert held == 0
    assert all(isinstance(record["image"], StoredBytes) for record in found)
    assert parquet_files._DECODED.nbytes == 0
    for record in found:
        record["image"].read()
        # 100 values of 3,000 bytes and their offsets: three row groups fit into 1 MiB.
        assert parquet_files._DECODED.nbytes <= 2**20
    assert len(parquet_files._DECODED._columns) == 3


def test_a_row_group_that_decodes_to_far_more_than_the_file_says_is_not_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet_files, "_LARGEST_GROUP", 200_000)
    # One value 2,000 times is stored once.
    table = pyarrow.table({"image": [value(1)] * 2000 + [value(2)]})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    found = records(tmp_path / "rows.parquet")
    assert [found[place]["image"].read() for place in (0, 1999, 2000)] == [value(1), value(1), value(2)]
    assert parquet_files._DECODED.nbytes == 0
    assert not (tmp_path / "cache").exists()


def test_a_copy_is_made_once_and_anew_when_the_file_changes(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet_files, "_LARGEST_GROUP", 100)
    file = tmp_path / "rows.parquet"
    for number, copies in ((1, 1), (1, 1), (2, 2)):
        pyarrow.parquet.write_table(pyarrow.table({"image": [value(number)]}), file)
        os.utime(file, ns=(number, number))
        assert read_again(records(file)) == [{"image": value(number)}]
        assert len(list((tmp_path / "cache" / "lmm_r1_rows").glob("*.arrow"))) == copies
    assert not list((tmp_path / "cache" / "lmm_r1_rows").glob("*.partial"))


def test_memory_that_another_file_has_left_is_not_taken_for_that_file(tmp_path):
    system = ctypes.CDLL(None, use_errno=True)
    system.mmap.restype = ctypes.c_void_p
    system.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    system.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    readable, private, anonymous_there = 1 | 2, 2, 2 | 0x20 | 0x100000
    (tmp_path / "left").write_bytes(b"x" * 8192)
    with (tmp_path / "left").open("rb") as file:
        address = system.mmap(None, 8192, 1, private, file.fileno(), 0)
    rows = write(pyarrow.table({"image": [value(1)]}), tmp_path, "arrow")
    with pyarrow.memory_map(str(rows)) as source:
        mapped = MappedFiles([str(rows)], name="rows")
        own = pyarrow.ipc.open_file(source).get_batch(0).column("image")
        assert isinstance(mapped.values(own, [1], "image")[0], StoredBytes)
        system.munmap(address, 8192)
        assert system.mmap(address, 8192, readable, anonymous_there, -1, 0) == address
        ctypes.memmove(address, value(2), 3000)
        ends = pyarrow.array([0, 3000], pyarrow.int32()).buffers()[1]
        data = pyarrow.foreign_buffer(address, 8192)
        assert mapped.values(pyarrow.Array.from_buffers(BYTES, 1, [None, ends, data]), [1], "image") == [value(2)]


def test_copies_go_when_no_process_uses_them_any_more(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet_files, "_LARGEST_GROUP", 100)
    file, folder = tmp_path / "rows.parquet", tmp_path / "cache" / "lmm_r1_rows"

    def read(number):
        pyarrow.parquet.write_table(pyarrow.table({"image": [value(number)]}), file)
        os.utime(file, ns=(number, number))
        return records(file)

    def copies():
        return {path.name for path in folder.glob("*.arrow")}

    context = multiprocessing.get_context("fork")
    ready, over = context.Event(), context.Event()
    other = context.Process(target=lambda: (read(1), ready.set(), over.wait(60)))
    other.start()
    assert ready.wait(60)
    (first,) = copies()
    for name, days in (
        ("old.arrow", 31),
        ("new.arrow", 29),
        ("again.arrow", 31),
        ("again.lock", 29),
        ("killed.partial", 0),
    ):
        (folder / name).write_bytes(b"x")
        os.utime(folder / name, times=(time.time() - days * 86400,) * 2)
    rows = read(2)
    assert read_again(records(file)) == read_again(rows), "to use a copy again is no change of it"
    (second,) = copies() - {first, "new.arrow", "again.arrow"}
    assert not list(folder.glob("*.partial"))
    over.set()
    other.join()
    read(3)
    assert len(copies()) == 4
    assert copies() > {second, "new.arrow", "again.arrow"}
    assert read_again(rows) == [{"image": value(2)}]
    assert len(list(folder.glob("*.user"))) == 1


def test_threads_that_need_a_copy_at_once_share_one(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(parquet_files, "_LARGEST_GROUP", 100)
    table = pyarrow.table({"image": [value(number) for number in range(300)]})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: records(tmp_path / "rows.parquet"), range(4)))
    assert all(read_again(rows) == table.to_pylist() for rows in found)
    assert [message.split(": ")[1][:11] for message in caplog.messages] == ["copied once"]


def test_a_copy_that_cannot_be_written_is_an_error_that_names_the_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet_files, "_LARGEST_GROUP", 100)
    (tmp_path / "cache").write_text("a file")
    pyarrow.parquet.write_table(pyarrow.table({"image": [value(1)]}), tmp_path / "rows.parquet")
    with pytest.raises(UserError, match="rows.parquet: .* cannot be written to .*cache.* HF_DATASETS_CACHE"):
        records(tmp_path / "rows.parquet")


@pytest.mark.parametrize("kind", ["arrow", "arrow compressed", "parquet", "parquet copied"])
@pytest.mark.parametrize("damage", ["empty", "cut", "overwritten"])
def test_a_damaged_file_is_an_error_that_names_it(kind, damage, tmp_path, monkeypatch):
    monkeypatch.setattr(parquet_files, "_LARGEST_GROUP", 100 if kind == "parquet copied" else 10**6)
    file = write(pyarrow.table({"image": [value(number) for number in range(50)]}), tmp_path, kind)
    data = bytearray(file.read_bytes())
    if damage == "overwritten":
        # The bodies of pages and batches; the values of an Arrow file that is not compressed are what they are.
        middle = len(data) // 2
        data[middle - 500 : middle + 500] = b"\xff" * 1000
    file.write_bytes({"empty": b"", "cut": data[: len(data) // 2], "overwritten": data}[damage])
    if (kind, damage) == ("arrow", "overwritten"):
        assert len(records(file)) == 50
        return
    with pytest.raises(UserError, match=f"{file.name}: not a readable (Arrow|Parquet) file"):
        records(file)
    assert not list((tmp_path / "cache").glob("**/*.arrow"))


def picture_rows(folder, kind="parquet"):
    """A file with one row, its image a picture of 40 x 30 random pixels."""
    Image.frombytes("RGB", (40, 30), value(7, 3600)).save(folder / "a.bmp")
    data = (folder / "a.bmp").read_bytes()
    table = pyarrow.table({"problem": ["<image>Which?"], "images": [[data]], "answer": ["3"]})
    return write(table, folder, kind), data


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_rows_show_and_store_the_image_that_stays_in_the_file(kind, tmp_path):
    file, data = picture_rows(tmp_path, kind)
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
    (row,) = load_rows(str(write(table, tmp_path, "parquet")))
    with pytest.raises(UserError, match="rows.parquet row 1: cannot read the image <image, 3000 bytes>"):
        load_image(images_of(row.messages)[0], location=row.location)


def test_another_machine_gets_the_bytes_with_the_row(tmp_path):
    file, data = picture_rows(tmp_path)
    sent = pickle.dumps(load_rows(str(file)))
    file.unlink()
    code = "import pickle, sys; (row,) = pickle.load(sys.stdin.buffer); sys.stdout.buffer.write(row.messages[0].parts[0].source)"
    done = subprocess.run([sys.executable, "-c", code], input=sent, stdout=subprocess.PIPE, check=True)
    assert done.stdout == data


def test_a_forked_process_reads_from_the_file_though_a_thread_was_reading(tmp_path):
    file, data = picture_rows(tmp_path)
    (row,) = load_rows(str(file))
    source = images_of(row.messages)[0].source
    context = multiprocessing.get_context("fork")
    received, sent = context.Pipe(duplex=False)
    with parquet_files._DECODED._lock:
        process = context.Process(target=lambda: sent.send_bytes(source.read()))
        process.start()
    assert received.poll(timeout=30)
    assert received.recv_bytes() == data
    process.join()


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@pytest.mark.parametrize("change", ["vanished", "cut", "touched"])
def test_a_file_that_has_changed_is_an_error_with_file_and_row(kind, change, tmp_path):
    file, _ = picture_rows(tmp_path, kind)
    (row,) = load_rows(str(file))
    (part,) = images_of(row.messages)
    if change == "vanished":
        file.unlink()
    elif change == "cut":
        os.truncate(file, 50)
    else:
        os.utime(file, ns=(1, 1))
    for call in (
        lambda: load_image(part, location=row.location),
        lambda: pickle.dumps(row),
        lambda: describe(part.source),
    ):
        with pytest.raises(UserError, match=f"rows.{kind} row 1: its image cannot be read any more"):
            call()


@pytest.mark.parametrize(
    "kind", [pyarrow.string(), pyarrow.dictionary(pyarrow.int32(), pyarrow.string()), pyarrow.binary()]
)
@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_a_file_that_grows_a_thousandfold_is_refused_before_it_fills_the_memory(kind, suffix, tmp_path, monkeypatch):
    file = tmp_path / f"rows.{suffix}"
    values = pyarrow.array([b"x" * 100_000 if kind == BYTES else "x" * 100_000] * 1000).cast(kind)
    table = pyarrow.table({"problem": values, "answer": ["1"] * 1000})
    if suffix == "parquet":
        pyarrow.parquet.write_table(table, file, compression="zstd")
    else:
        options = pyarrow.ipc.IpcWriteOptions(compression="zstd")
        with pyarrow.ipc.new_file(file, table.schema, options=options) as writer:
            writer.write_table(table, max_chunksize=100)
    assert file.stat().st_size < 60_000
    assert len(list(read_records(str(file)))) == 1000, "a gibibyte may be had by any file"
    monkeypatch.setattr(arrow, "FREE_GROWTH_BYTES", 2**20)
    if kind == BYTES:
        os.utime(file, ns=(1, 1))
    read = read_records(str(file))
    with pytest.raises(
        UserError, match=f"rows.{suffix}: its rows take more than 1,000 times the .* bytes of the file"
    ):
        list(read)
