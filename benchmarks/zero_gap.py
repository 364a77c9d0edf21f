"""How far the trainer's log-probs are from the engine's under each ZeRO stage, in bf16 on two ranks; JSON at the end.

python benchmarks/zero_gap.py [--output benchmarks/results/zero_gap.json]
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from machine import machine_name

ARCHITECTURE = "qwen2_5_vl"
# vLLM on the CPU has no attention for smaller heads than 32.
HIDDEN_SIZE, LAYERS = 128, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    arguments = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
    with tempfile.TemporaryDirectory() as folder:
        result = measure(Path(folder))
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


def measure(folder: Path) -> dict[str, Any]:
    """Sample from vLLM in fp32 and in bf16, and return the gaps of what the trainer computes for the same samples."""
    from lmm_r1 import cpu

    cpu.prepare_process()
    ranks = importlib.import_module("helpers.zero_log_probs")
    checkpoint = build(folder / "model")
    result: dict[str, Any] = {
        "benchmark": "zero_gap",
        "machine": machine_name(),
        "model": {"architecture": ARCHITECTURE, "hidden_size": HIDDEN_SIZE, "layers": LAYERS},
        "ranks": ranks.RANKS,
        "tokens": ranks.TOKENS,
        "engines": {},
    }
    for dtype in ("float32", "bfloat16"):
        samples = sample(checkpoint, dtype=dtype)
        place = folder / dtype
        started = ranks.start(checkpoint, [ids for ids, _ in samples], place)
        computed = ranks.finish(started, place)
        result["engines"][dtype] = {
            way: gaps(
                [values for rank in computed for values in rank[way]], [own for _, own in samples] * len(computed)
            )
            for way in computed[0]
        }
    return result


def build(folder: Path) -> Path:
    """Write a random checkpoint whose weights bf16 holds exactly."""
    import torch
    from helpers.tiny_models import CORPUS

    from lmm_r1.lmm_kits import TinyModelSpec, get_kit

    kit = get_kit(ARCHITECTURE)
    spec = TinyModelSpec(hidden_size=HIDDEN_SIZE, layers=LAYERS, seed=0, tie_embeddings=False)
    kit.build_tiny(spec, CORPUS, folder / "fp32")
    model = kit.load_model(
        str(folder / "fp32"), dtype=torch.bfloat16, attn_implementation="sdpa", trust_remote_code=False
    )
    model.save_pretrained(folder / "bf16")
    kit.save_processor(kit.load_processor(str(folder / "fp32"), trust_remote_code=False), folder / "bf16")
    return folder / "bf16"


def sample(checkpoint: Path, *, dtype: str) -> list[tuple[list[int], list[float]]]:
    """Return for each prompt a response's token ids and the log-probs that vLLM reports for them."""
    from helpers.engines import running_engine, sampled
    from helpers.zero_log_probs import TOKENS, prompts_of

    from lmm_r1.lmm_kits import get_kit

    kit = get_kit(ARCHITECTURE)
    prompts = prompts_of(kit, checkpoint)
    tokenizer = kit.tokenizer_of(kit.load_processor(str(checkpoint), trust_remote_code=False))
    banned = kit.banned_token_ids(kit.load_config(str(checkpoint), trust_remote_code=False), tokenizer)
    with running_engine(kit, checkpoint, max_images=1, dtype=dtype) as engine:
        groups = [
            sampled(engine, kit, [prompt], banned=banned, n=1, max_tokens=TOKENS - len(prompt.token_ids))[0]
            for prompt in prompts
        ]
    return [group[0] for group in groups]


def gaps(trainer: list[Any], engine: list[list[float]]) -> dict[str, float]:
    """Return the mean and the largest distance of log-probs, of all tokens of all samples and ranks."""
    import torch

    off = (torch.cat(trainer) - torch.tensor([value for values in engine for value in values])).abs()
    return {"mean": round(float(off.mean()), 6), "largest": round(float(off.max()), 6)}


if __name__ == "__main__":
    main()
