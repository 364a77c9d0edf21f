"""What was measured of a checkpoint before: kept in a cache, shown with what has changed since."""

from dataclasses import replace
from pathlib import Path

import pytest

from lmm_r1 import checkpoints
from lmm_r1.checkpoints import (
    Parity,
    ParityGap,
    all_kept,
    checkpoint_state,
    full_name,
    keep,
    kept_for,
    library_versions,
)

AGREES = ParityGap(rows="text", weights="as loaded", mean_exp=1.000001, mean=7e-7, largest=4e-6, verdict="agree")


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LMM_R1_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "vlm"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_text("weights")
    return folder


def measured(model: Path, **changes: object) -> Parity:
    parity = Parity(
        checkpoint=full_name(str(model)),
        state=checkpoint_state(str(model)),
        kit="qwen2_5_vl",
        dtype="bf16",
        max_len=1024,
        device="CPU",
        measured="2026-11-25",
        libraries=library_versions(),
        gaps=(AGREES, replace(AGREES, rows="image", mean_exp=1.25), replace(AGREES, rows="image", mean_exp=1.5)),
    )
    return replace(parity, **changes)


def test_what_is_kept_is_read_again_and_a_later_figure_takes_its_place(model):
    assert all_kept() == []
    keep(measured(model, measured="2026-11-24"))
    keep(measured(model))
    keep(measured(model, max_len=4096))
    assert all_kept() == [measured(model), measured(model, max_len=4096)]
    assert measured(model).line == (
        "engine and trainer agree: mean exp |d| text 1.000001, image 1.500000 (bf16, 1,024 tokens, CPU, 2026-11-25)"
    )
    apart = replace(AGREES, mean_exp=float("inf"), mean=float("inf"), largest=float("inf"), verdict="apart")
    keep(measured(model, gaps=(apart,)))
    assert all_kept()[0].gaps == (apart,)
    assert all_kept()[0].line.startswith("engine and trainer are apart: mean exp |d| text inf (")


def test_a_figure_is_stale_where_weights_or_libraries_are_others_now(model, monkeypatch):
    parity = measured(model)
    monkeypatch.setattr(checkpoints, "library_versions", lambda: {**parity.libraries, "transformers": "9.9"})
    before = parity.libraries["transformers"]
    assert parity.line.endswith(f"; stale: transformers was {before} and is 9.9")
    (model / "model.safetensors").write_text("others")
    assert parity.changes() == ["the checkpoint has changed", f"transformers was {before} and is 9.9"]
    (model / "model.safetensors").unlink()
    (model / "config.json").unlink()
    model.rmdir()
    assert parity.changes()[0] == "the checkpoint has changed"


def test_a_run_is_told_the_figure_of_its_dtype_and_device_at_its_length_or_the_next_shorter_one(model):
    for length in (256, 1024, 4096):
        keep(measured(model, max_len=length))
    keep(measured(model, max_len=2048, dtype="fp32"))

    def found(max_len: int, dtype: str = "bf16", device: str = "CPU") -> int | None:
        parity = kept_for(str(model), dtype=dtype, max_len=max_len, device=device)
        return None if parity is None else parity.max_len

    assert [found(length) for length in (100, 256, 2000, 9000)] == [256, 256, 1024, 4096]
    assert (found(512, dtype="fp32"), found(512, dtype="fp16"), found(512, device="CUDA")) == (2048, None, None)
    assert kept_for("some/other", dtype="bf16", max_len=512, device="CPU") is None
