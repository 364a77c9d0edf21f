import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from lmm_r1.models.image_features import FeatureStore, Links, Place

CPU = torch.device("cpu")
RUN = "0123456789abcdef"


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def features(number: int, *, lines: int = 1) -> tuple[torch.Tensor]:
    """Return so many lines of 64 bytes; with its key an entry has one more."""
    return (torch.full((lines, 16), float(number)),)


def kept(store: FeatureStore, *numbers: int) -> list[int]:
    """Return which of these are kept, whole."""
    found = [number for number in numbers if store.find(key(number), device=CPU) is not None]
    for number in found:
        (tensor,) = store.find(key(number), device=CPU)
        assert (tensor == number).all(), number
    return found


@pytest.fixture
def links(tmp_path, monkeypatch) -> Links:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    found = Links.of(RUN)
    assert found is not None
    return found


def test_what_is_found_is_what_was_kept_with_types_and_shapes():
    store = FeatureStore(1024, links=None)
    parts = (torch.randn(3, 5), torch.randn(3, 2, 2).bfloat16(), torch.arange(3, dtype=torch.float64))
    store.keep(key(1), parts)
    found = store.find(key(1), device=CPU)
    for one, other in zip(found, parts, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert torch.equal(one, other)
    # 60 and 24 and 24 bytes, each of which takes 64, and 64 for the key.
    assert store.nbytes == 256
    assert store.find(key(2), device=CPU) is None


def test_the_first_are_written_over_first():
    store = FeatureStore(6 * 64, links=None)
    for number in (1, 2, 3):
        store.keep(key(number), features(number))
    assert kept(store, 1, 2, 3) == [1, 2, 3]
    assert store.nbytes == 6 * 64
    # It takes three lines of the four that the first two have.
    store.keep(key(4), features(4, lines=2))
    assert kept(store, 1, 2, 3, 4) == [3, 4]
    # Of lines 3 and 4, the second is the third entry's first.
    store.keep(key(5), features(5))
    assert kept(store, 3, 4, 5) == [4, 5]
    # One line is left behind it, so that it goes to the start.
    store.keep(key(6), features(6))
    assert kept(store, 4, 5, 6) == [5, 6]
    assert store.nbytes == 4 * 64


def test_a_process_reads_what_another_keeps_until_it_is_written_over_or_the_other_ends(links, tmp_path):
    """The other has room for two, and keeps 1 and 2 and, when it is told to, 3."""
    program = f"""
        import sys, torch
        from pathlib import Path
        from lmm_r1.models.image_features import FeatureStore, Links
        store = FeatureStore(4 * 64, links=Links(folder=Path({str(links.folder)!r}), run={RUN!r}))
        for number in (1, 2, 3):
            store.keep(number.to_bytes(16, "big"), (torch.full((1, 16), float(number)),))
            if number > 1:
                print("kept", flush=True)
                sys.stdin.readline()
    """
    other = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )
    try:
        assert other.stdout.readline() == "kept\n"
        store = FeatureStore(1024, links=links)
        assert kept(store, 1, 2, 3) == [1, 2]
        assert store.nbytes == 0
        first = links.get(key(1))
        print(file=other.stdin, flush=True)
        assert other.stdout.readline() == "kept\n"
        assert kept(store, 1, 2, 3) == [2, 3]
        # As if it had been read before it was written over.
        links.put(key(1), first)
        assert kept(store, 1) == []
        # Another run's processes do not find it.
        assert kept(FeatureStore(1024, links=Links(folder=links.folder, run="f" * 16)), 2) == []
    finally:
        other.kill()
        other.wait()
    # One that has read of it before still has the memory; a new one does not come to it.
    assert kept(store, 2) == [2]
    assert kept(FeatureStore(1024, links=links), 2) == []
    assert len(list(links.folder.iterdir())) == 3
    Links.of(RUN)
    assert list(links.folder.iterdir()) == []


def test_a_link_to_anything_else_is_no_place_of_features(links, tmp_path):
    store = FeatureStore(1024, links=links)
    with (tmp_path / "file").open("w") as file:
        links.put(key(1), Place(process=os.getppid(), file=0, start=0, tensors=[("float32", [1, 16])]))
        links.put(key(2), Place(process=os.getpid(), file=file.fileno(), start=0, tensors=[("float32", [1, 16])]))
        assert kept(store, 1, 2) == []


def test_links_of_another_users_folder_are_not_followed(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("os.getuid", lambda: 12345)
    assert Links.of(RUN) is None
