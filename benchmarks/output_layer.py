"""Memory and seconds of log-probs and entropies with all logits at once, and without; JSON on the last line.

python benchmarks/output_layer.py [--tokens 512 2048] [--hidden-size 256] [--vocabularies 32000 152064] \\
    [--output benchmarks/results/output_layer.json]

Each is a forward and a backward pass of an output layer and OpenRLHF's own log-probs, or ours, in turns; with and without
entropies, of which OpenRLHF's are not compiled here. Memory is what the process grows by at most, from the hidden states on:
the gradients of the weight and of the hidden states are in it, which both ways need.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from machine import machine_name
from memory import peak_bytes

from lmm_r1 import cpu

if TYPE_CHECKING:
    import torch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048], help="response tokens in a pass")
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[32_000, 152_064])
    parser.add_argument("--repeats", type=int, default=2, help="times that each way is measured, in turns")
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    arguments = parser.parse_args()
    # Before anything imports torch, which reads it; the compilation would count as the first case's.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    # Before anything imports OpenRLHF.
    cpu.prepare_process()
    result: dict[str, Any] = {
        "benchmark": "output_layer",
        "machine": machine_name(),
        "hidden_size": arguments.hidden_size,
        "dtype": "float32",
        "repeats": arguments.repeats,
        "cases": [],
    }
    for vocabulary, tokens, entropy in product(arguments.vocabularies, arguments.tokens, (False, True)):
        case = measure(
            tokens, vocabulary, hidden_size=arguments.hidden_size, entropy=entropy, repeats=arguments.repeats
        )
        print(json.dumps(case), file=sys.stderr, flush=True)
        result["cases"].append(case)
        if arguments.output:
            arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


def measure(tokens: int, vocabulary: int, *, hidden_size: int, entropy: bool, repeats: int) -> dict[str, Any]:
    """Return peak memory and median seconds of both ways, and how far their gradients are apart."""
    import torch

    torch.manual_seed(0)
    layer = torch.nn.Linear(hidden_size, vocabulary, bias=False)
    hidden = torch.randn(1, tokens, hidden_size, requires_grad=True)
    targets = torch.randint(vocabulary, (1, tokens))
    ways = {"logits": partial(_from_logits, entropy=entropy), "hidden": partial(_from_hidden, entropy=entropy)}
    for way in ways.values():
        # What is made once in a process counts for neither.
        _update(way, layer, torch.randn(1, 8, hidden_size, requires_grad=True), targets[:, :8])
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    peaks: dict[str, list[int]] = {name: [] for name in ways}
    gradients: dict[str, list[torch.Tensor]] = {}
    for _ in range(repeats):
        for name, way in ways.items():
            gradients.pop(name, None)

            def run(name: str = name, way: Callable[..., torch.Tensor] = way) -> None:
                began = time.perf_counter()
                gradients[name] = _update(way, layer, hidden, targets)
                seconds[name].append(time.perf_counter() - began)

            peaks[name].append(peak_bytes(run))
    differences = [
        (one - other).norm() / one.norm() for one, other in zip(*(gradients[name] for name in ways), strict=True)
    ]
    return {
        "tokens": tokens,
        "vocabulary": vocabulary,
        "entropy": entropy,
        "peak_mib": {name: round(max(values) / 2**20, 1) for name, values in peaks.items()},
        "seconds": {name: round(statistics.median(values), 3) for name, values in seconds.items()},
        "peak_ratio": round(max(peaks["logits"]) / max(peaks["hidden"]), 2),
        "seconds_ratio": round(statistics.median(seconds["hidden"]) / statistics.median(seconds["logits"]), 2),
        "gradient_difference": max(map(float, differences)),
    }


def _update(
    way: Callable[..., torch.Tensor], layer: torch.nn.Linear, hidden: torch.Tensor, targets: torch.Tensor
) -> list[torch.Tensor]:
    """Return the gradients of hidden states and weight; none is left that the next call would give back."""
    way(layer, hidden, targets).sum().backward()
    gradients = [tensor.grad for tensor in (hidden, layer.weight) if tensor.grad is not None]
    layer.weight.grad = hidden.grad = None
    return gradients


def _from_logits(
    layer: torch.nn.Linear, hidden: torch.Tensor, targets: torch.Tensor, *, entropy: bool
) -> torch.Tensor:
    from openrlhf.models.utils import compute_entropy, log_probs_from_logits

    logits = layer(hidden)
    log_probs = log_probs_from_logits(logits, targets)
    return log_probs + compute_entropy(logits) if entropy else log_probs


def _from_hidden(
    layer: torch.nn.Linear, hidden: torch.Tensor, targets: torch.Tensor, *, entropy: bool
) -> torch.Tensor:
    import torch

    from lmm_r1.models.output_layer import Sampler, TokenOutcomes, token_outcomes

    nothing = torch.tensor([], dtype=torch.long)
    outcomes = TokenOutcomes(
        targets=targets, sampler=Sampler(temperature=1.0, banned_token_ids=nothing), entropy=entropy
    )
    with token_outcomes(layer, outcomes):
        found = outcomes.of(layer(hidden))
    assert found is not None, "nothing changes the layer's output"
    return found[0] + found[1] if entropy else found[0]


if __name__ == "__main__":
    main()
