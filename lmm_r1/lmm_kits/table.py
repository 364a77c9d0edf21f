"""The kits and what each of them supports, as rows of a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lmm_r1.config.differences import NOT_YET
from lmm_r1.lmm_kits.kit import LmmKit
from lmm_r1.lmm_kits.registry import KITS, get_kit

COLUMNS = ("kit", "images", "video", "SFT", "RL", "LoRA", "packing", "critic", "vLLM", "checkpoints")


@dataclass(frozen=True, kw_only=True)
class Refusals:
    """What no kit can do in this version, by what the flags refuse."""

    lora: bool = "ds.lora.rank" in NOT_YET
    packing: bool = "ds.packing_samples" in NOT_YET
    critic: bool = "algo.advantage.estimator" in NOT_YET


def kit_rows(*, vllm_version: str, refusals: Refusals = Refusals()) -> list[tuple[str, ...]]:
    """Return one row per kit, as `COLUMNS` names its cells.

    Args:
        vllm_version: the installed one, shown where the kit rolls out in it.
    """
    return [_row(get_kit(name), vllm_version=vllm_version, refusals=refusals) for name in KITS]


def kit_notes() -> list[str]:
    """Return a sentence for each kit that vLLM cannot run, or computes other log-probs for."""
    kits = [get_kit(name) for name in KITS]
    refused = [f"{kit.model_type} takes no part in RL: {kit.engine_refusal}." for kit in kits if kit.engine_refusal]
    corrected = [
        f"{kit.model_type} is corrected in RL on CPUs: {kit.engine_disagreement}."
        for kit in kits
        if kit.engine_disagreement
    ]
    return refused + corrected


def markdown(rows: Sequence[Sequence[str]], notes: Sequence[str]) -> str:
    """Return the table in Markdown with the notes below, without a line break at its end."""
    lines = [COLUMNS, tuple("---" for _ in COLUMNS), *((f"`{row[0]}`", *row[1:]) for row in rows)]
    return "\n".join([*(f"| {' | '.join(line)} |" for line in lines), *(f"\n{note}" for note in notes)])


def _row(kit: LmmKit, *, vllm_version: str, refusals: Refusals) -> tuple[str, ...]:
    rolls_out = kit.engine_refusal is None
    return (
        kit.model_type,
        _yes(kit.takes_images),
        _yes(kit.takes_videos),
        "yes",
        _yes(rolls_out),
        _yes(not refusals.lora),
        _yes(not refusals.packing),
        # A critic takes part in RL alone.
        _yes(rolls_out and not refusals.critic),
        vllm_version if rolls_out else "no class",
        kit.checkpoints,
    )


def _yes(answer: bool) -> str:
    return "yes" if answer else "no"
