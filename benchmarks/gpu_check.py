"""Packed rows on a GPU: agreement with a CPU's single precision for every kit, and speed of a larger model; JSON last.

python benchmarks/gpu_check.py [--device cuda] [--kits qwen2_5_vl ...] [--hidden-size 2048 --layers 36 ...]

Needs PyTorch, transformers and this folder's neighbours, none of OpenRLHF, DeepSpeed and vLLM. Ends with code 1 where a
kit's passes disagree or fail. `--device cpu` checks the same passes with the CPU's kernels.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from machine import machine_name
from memory import peak_bytes
from train_batches import GroupBatch, build_tiny_checkpoint, groups_of, make_batch

from lmm_r1.lmm_kits import KITS, LmmKit, get_kit
from lmm_r1.models.batch_inputs import BatchInputs
from lmm_r1.models.packed_attention import packed_row, use_packed_attention
from lmm_r1.models.packing import Targets

WAYS = ("padded", "packed", "shared")
SINGLE_TOLERANCE = 1e-3
# A token that sees another sample moves log-probs by about 1.
HALF_TOLERANCE = 0.05
# Dense bf16 operations per second, by what the device's name holds.
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="where the passes run that are checked: cuda or cpu")
    parser.add_argument("--kits", nargs="*", choices=KITS, default=list(KITS), help="kits whose passes are compared")
    parser.add_argument("--samples", type=int, default=16, help="responses per prompt of the larger model")
    parser.add_argument("--hidden-size", type=int, default=2048, help="width of the larger model; its heads have 128")
    parser.add_argument("--layers", type=int, default=36, help="its layers")
    parser.add_argument("--vision-layers", type=int, default=32, help="its vision tower's layers")
    parser.add_argument("--vocabulary", type=int, default=151936, help="its tokens")
    parser.add_argument("--repeats", type=int, default=5, help="times that each way is measured, in turns")
    parser.add_argument("--scale", type=float, default=1.0, help="lengths and image sides are multiplied by it")
    parser.add_argument("--peak-tflops", type=float, help="the device's dense bf16 peak; known for H200, H100, A100")
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    with tempfile.TemporaryDirectory() as folder:
        kits = {name: checked(name, Path(folder) / name, device=device, scale=arguments.scale) for name in arguments.kits}
        steps = measure_steps(arguments, Path(folder) / "larger", device=device)
    result = {
        "benchmark": "gpu_check",
        "machine": machine_name(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "kits": kits,
        "update_steps": steps,
        "agrees": all(entry["judgement"] == "agrees" for entry in kits.values()),
    }
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))
    if not result["agrees"]:
        raise SystemExit(1)


def checked(name: str, folder: Path, *, device: torch.device, scale: float) -> dict[str, Any]:
    """Return a kit's differences and the judgement; what fails is the kit's result, so that the others run, too."""
    try:
        entry = differences(get_kit(name), folder, device=device, scale=scale)
    except (ImportError, AttributeError, TypeError, ValueError, RuntimeError, NotImplementedError) as error:
        traceback.print_exc()
        entry = {"judgement": f"failed: {type(error).__name__}: {error}"}
    print(json.dumps({name: entry}), file=sys.stderr)
    return entry


def differences(kit: LmmKit, folder: Path, *, device: torch.device, scale: float) -> dict[str, Any]:
    """Compare log-probs and gradients of all ways on the device with those of the padded batch on the CPU."""
    build_tiny_checkpoint(kit, folder, hidden_size=64, layers=2)
    processor = kit.load_processor(str(folder), trust_remote_code=False)

    def load(place: torch.device, dtype: torch.dtype) -> Any:
        settings = {"dtype": dtype, "attn_implementation": "sdpa", "trust_remote_code": False}
        model = kit.load_model(str(folder), **settings)
        # Some kits' projectors start at zero; without this, their images would not matter.
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for weight in model.parameters():
                weight += 0.02 * torch.randn(weight.shape, generator=generator).to(weight)
        return model.to(place).train()

    reference = load(torch.device("cpu"), torch.float32)
    groups = groups_of("mixed" if kit.takes_images else "text", scale=scale)
    batch = make_batch(kit, processor, reference.config, groups=groups, samples=4)
    expected = results(kit, reference, batch, "padded")
    found: dict[str, Any] = {}
    for label, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        model = load(device, dtype)
        use_packed_attention(model)
        found[label] = {way: compare(results(kit, model, batch, way), expected) for way in WAYS}
    return {**found, "judgement": judgement(found)}


def results(kit: LmmKit, model: Any, batch: GroupBatch, way: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probs (B, T - 1) and all gradients of their mean (N,), on the CPU in single precision."""
    model.zero_grad()
    log_probs = run(kit, model, batch, way)
    (log_probs.sum() / batch.action_mask.sum()).backward()
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    whole = torch.cat([gradient.flatten().float() for gradient in gradients])
    return log_probs.detach().float().cpu(), whole.cpu()


def compare(mine: tuple[torch.Tensor, torch.Tensor], theirs: tuple[torch.Tensor, torch.Tensor]) -> dict[str, float]:
    return {
        "log_probs": float((mine[0] - theirs[0]).abs().max()),
        "gradients": float((mine[1] - theirs[1]).norm() / theirs[1].norm()),
    }


def judgement(found: dict[str, dict[str, dict[str, float]]]) -> str:
    """Judge packed passes in bf16 by how far the padded pass in bf16 is from single precision itself."""
    for label, ways in found.items():
        for way, values in ways.items():
            for name, value in values.items():
                limit = SINGLE_TOLERANCE if label == "fp32" else max(HALF_TOLERANCE, 3 * ways["padded"][name])
                # A comparison that is not a number is false.
                if not value <= limit:
                    return f"disagrees: {name} of {way} in {label} are off by {value:.2g}, more than {limit:.2g}"
    return "agrees"


def run(kit: LmmKit, model: Any, batch: GroupBatch, way: str) -> torch.Tensor:
    """Return the responses' log-probs (B, T - 1) as the policy computes them, without a ban of media tokens."""
    weight = next(model.parameters())
    inputs = BatchInputs(kit=kit, config=model.config, dtype=weight.dtype)
    sequences, attention_mask = batch.sequences.to(weight.device), batch.attention_mask.to(weight.device)
    wanted = batch.action_mask.to(weight.device)
    if way == "padded":
        logits = model(**inputs.padded(sequences, attention_mask, batch.media), use_cache=False).logits
        return log_probs_of(logits[:, :-1], sequences[:, 1:]) * wanted
    targets = Targets(wanted=wanted, shared=True)
    parts = []
    for row, arguments in inputs.packed(
        sequences, attention_mask, batch.media, targets=targets, share_prefix=way == "shared"
    ):
        with packed_row(row.layout):
            logits = model(**arguments, use_cache=False, logits_to_keep=row.sources).logits
        parts.append(row.scatter(log_probs_of(logits[0], row.target_ids), like=wanted))
    return torch.stack(parts).sum(dim=0)


def log_probs_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    logits = logits.float()
    return logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(dim=-1)


def larger_model(arguments: argparse.Namespace, config: Any, *, device: torch.device) -> Any:
    """Return a random model in bf16 with the proportions of Qwen2.5-VL-3B, for the tokens of a tiny checkpoint."""
    text, vision = config.text_config, config.vision_config
    width, heads = arguments.hidden_size, max(1, arguments.hidden_size // 128)
    text.hidden_size, text.num_hidden_layers, text.vocab_size = width, arguments.layers, arguments.vocabulary
    text.intermediate_size = 11008 * width // 2048
    text.num_attention_heads, text.num_key_value_heads = heads, max(1, heads // 8)
    text.layer_types, text.initializer_range = ["full_attention"] * arguments.layers, 0.02
    text.rope_parameters = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
    # Divided by 160, the released widths keep to whole heads of 80.
    vision.num_heads = max(1, 16 * width // 2048)
    vision.hidden_size, vision.out_hidden_size = 80 * vision.num_heads, width
    vision.intermediate_size, vision.depth = 3420 * width // 2048, arguments.vision_layers
    vision.fullatt_block_indexes = list(range(7, arguments.vision_layers, 8))
    return get_model_class(config)._from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").to(device)
