"""Memory and time of rows whose images are embedded in their file, against the same rows without images; Linux only.

python benchmarks/row_store.py [--rows 100000] [--steps 1000] [--cases NAME ...] [--output benchmarks/results/row_store.json]

Each file has JPEGs of 20,000 bytes, all different. It is loaded in a process of its own, twice where the first loading copies
it; the second process then reads single images in random order, and decodes 128 rows of each step in shuffled order.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from machine import machine_name

if TYPE_CHECKING:
    import pyarrow

IMAGE_BYTES = 20_000
DIFFERENT_PICTURES = 200
ROWS_PER_STEP = 128
FIRST_STEPS = 10
"""After these the cache of decoded row groups is full, and growth is counted from here."""
SINGLE_READS = 2_000
WRITTEN_ROWS = 1_000
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Case:
    """One file."""

    suffix: str = ".parquet"
    group_rows: int = WRITTEN_ROWS
    """Of a row group of Parquet, or of a batch of Arrow."""
    images: bool = True
    compression: str | None = None
    """Of Arrow; Parquet is written with its usual one."""


CASES = {
    "text only": Case(images=False),
    "Parquet, row groups of 100": Case(group_rows=100),
    "Parquet, row groups of 1,000": Case(),
    "Parquet, one row group": Case(group_rows=10**9),
    "Arrow": Case(suffix=".arrow"),
    "Arrow, compressed": Case(suffix=".arrow", compression="lz4"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--steps", type=int, default=1_000)
    parser.add_argument(
        "--cases", nargs="+", metavar="NAME", choices=list(CASES), default=list(CASES), help="; ".join(CASES)
    )
    parser.add_argument("--measure", type=Path, metavar="FILE", help="only measure this file here, for the benchmark")
    parser.add_argument(
        "--output", type=Path, help="also write the JSON to this file, with its cases that are not run"
    )
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.measure, steps=arguments.steps)))
        return
    results: dict[str, Any] = {}
    if arguments.output and arguments.output.exists():
        results = json.loads(arguments.output.read_text())["cases"]
    for name in arguments.cases:
        results[name] = run(CASES[name], rows=arguments.rows, steps=arguments.steps)
        print(json.dumps({name: results[name]}), file=sys.stderr, flush=True)
        report = {
            "benchmark": "row_store",
            "machine": machine_name(),
            "rows": arguments.rows,
            "image_bytes": IMAGE_BYTES,
            "steps": arguments.steps,
            "rows_per_step": ROWS_PER_STEP,
            "cases": {case: results[case] for case in CASES if case in results},
        }
        if arguments.output:
            arguments.output.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report))


def run(case: Case, *, rows: int, steps: int) -> dict[str, Any]:
    """Write a case's file, and return what processes of their own measured of it."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"rows{case.suffix}"
        write(case, file, rows=rows)
        environment = {**os.environ, "HF_DATASETS_CACHE": f"{folder}/cache"}

        def in_process(steps: int) -> dict[str, Any]:
            command = [sys.executable, __file__, "--measure", str(file), "--steps", str(steps)]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
            return json.loads(done.stdout.splitlines()[-1])

        first = in_process(0)
        copies = sum(copy.stat().st_size for copy in Path(folder).glob("cache/**/*.arrow"))
        return {
            "file_mib": round(file.stat().st_size / MIB),
            "copy_mib": round(copies / MIB),
            **({"first_load_seconds": first["load_seconds"], "first_peak_mib": first["peak_mib"]} if copies else {}),
            **in_process(steps if case.images else 0),
        }


def write(case: Case, file: Path, *, rows: int) -> None:
    """Write a case's rows, with pictures that are compressed as photographs are."""
    import pyarrow
    import pyarrow.parquet

    kinds = {"problem": pyarrow.string(), "answer": pyarrow.string()}
    image = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    schema = pyarrow.schema({**kinds, **({"images": pyarrow.list_(image)} if case.images else {})})
    batches = row_batches(case, schema, rows=rows)
    if case.suffix == ".arrow":
        options = pyarrow.ipc.IpcWriteOptions(compression=case.compression)
        with pyarrow.ipc.new_file(str(file), schema, options=options) as writer:
            for batch in batches:
                writer.write_batch(batch)
        return
    with pyarrow.parquet.ParquetWriter(file, schema) as writer:
        if case.group_rows <= WRITTEN_ROWS:
            for batch in batches:
                writer.write_batch(batch, row_group_size=case.group_rows)
        else:
            writer.write_table(pyarrow.Table.from_batches(batches), row_group_size=case.group_rows)


def row_batches(case: Case, schema: pyarrow.Schema, *, rows: int) -> Iterator[pyarrow.RecordBatch]:
    import pyarrow

    pictures = [picture(number) for number in range(DIFFERENT_PICTURES)] if case.images else []
    for start in range(0, rows, WRITTEN_ROWS):
        numbers = range(start, min(start + WRITTEN_ROWS, rows))
        problems = [f"Row {number}: which of the colours fills most of the picture?" for number in numbers]
        columns: dict[str, list[Any]] = {"problem": problems, "answer": [str(number) for number in numbers]}
        if case.images:
            columns["problem"] = [f"<image>{problem}" for problem in problems]
            # Behind a JPEG's end anything may stand.
            columns["images"] = [
                [{"bytes": data + number.to_bytes(8, "big") + bytes(IMAGE_BYTES - len(data) - 8), "path": None}]
                for number in numbers
                for data in [pictures[number % len(pictures)]]
            ]
        yield pyarrow.RecordBatch.from_pydict(columns, schema=schema)


def picture(number: int) -> bytes:
    """Return a JPEG of 256 x 256 pixels and a little less than `IMAGE_BYTES`."""
    from PIL import Image

    coarse = Image.frombytes("RGB", (64, 64), random.Random(number).randbytes(64 * 64 * 3))
    image = coarse.resize((256, 256), Image.Resampling.BICUBIC)
    for quality in range(95, 5, -5):
        buffer = io.BytesIO()
        image.save(buffer, format="JPEG", quality=quality)
        if buffer.tell() <= IMAGE_BYTES - 8:
            return buffer.getvalue()
    raise AssertionError(f"a picture takes more than {IMAGE_BYTES} bytes at every quality")


def measure(file: Path, *, steps: int) -> dict[str, Any]:
    """Return seconds and memory of loading a file in this process, and of reading its images."""
    from lmm_r1.data.files import read_row_file
    from lmm_r1.data.image_sources import StoredBytes
    from lmm_r1.data.images import load_image
    from lmm_r1.data.messages import images_of
    from lmm_r1.data.training_rows import PromptStream

    began = time.perf_counter()
    rows = list(read_row_file(str(file)).rows.values())
    measured: dict[str, Any] = {"load_seconds": round(time.perf_counter() - began, 2), "peak_mib": status("VmHWM")}
    measured |= {"resident_mib": status("VmRSS"), "anonymous_mib": status("RssAnon")}
    if not steps:
        return measured
    images = [image for row in rows for image in images_of(row.messages)]
    stored = [image.source for image in images if isinstance(image.source, StoredBytes)]
    del images
    assert len(stored) == len(rows)
    chosen = random.Random(1).sample(stored, min(SINGLE_READS, len(stored)))
    began = time.perf_counter()
    for source in chosen:
        source.read()
    measured["read_milliseconds_per_image"] = round((time.perf_counter() - began) / len(chosen) * 1e3, 3)
    stream = PromptStream(rows, seed=1, episodes=10**6)
    resident: dict[int, float] = {}
    began = time.perf_counter()
    for step in range(1, steps + 1):
        assert stream.has(ROWS_PER_STEP)
        for row in stream.take(ROWS_PER_STEP):
            for part in images_of(row.messages):
                load_image(part, location=row.location)
        if step == FIRST_STEPS or step % max(1, steps // 10) == 0:
            resident[step] = status("VmRSS")
    measured["decode_milliseconds_per_image"] = round((time.perf_counter() - began) / steps / ROWS_PER_STEP * 1e3, 3)
    measured["resident_mib_by_step"] = resident
    measured["growth_percent"] = round((resident[steps] / resident[FIRST_STEPS] - 1) * 100, 2)
    return measured


def status(name: str) -> float:
    """Return a memory figure of this process, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return round(next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:")), 1)


if __name__ == "__main__":
    main()
