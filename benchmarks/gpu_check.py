"""Packed sequences on a GPU: agreement with a CPU's single precision for every kit, and speed of a larger model; JSON last.

python benchmarks/gpu_check.py [--device cuda] [--kits qwen2_5_vl ...] [--hidden-size 2048 --layers 36 ...]

Needs PyTorch, transformers and this folder's neighbours, none of OpenRLHF, DeepSpeed and vLLM. Ends with code 1 where a
kit's passes disagree or fail. `--device cpu` checks the same passes with the CPU's kernels.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from machine import machine_name
from memory import peak_bytes
from train_batches import GroupBatch, build_tiny_checkpoint, groups_of, make_batch

from lmm_r1.lmm_kits import KITS, LmmKit, get_kit
from lmm_r1.models.packed.attention import packed_as, use_packed_attention
from lmm_r1.models.packed.batch_inputs import BatchInputs
from lmm_r1.models.packed.packing import Targets

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
        kits = {
            name: checked(name, Path(folder) / name, device=device, scale=arguments.scale) for name in arguments.kits
        }
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
    inputs = BatchInputs.of(model, kit=kit, config=model.config)
    sequences, attention_mask = batch.sequences.to(weight.device), batch.attention_mask.to(weight.device)
    wanted = batch.action_mask.to(weight.device)
    if way == "padded":
        logits = model(**inputs.padded(sequences, attention_mask, batch.media), use_cache=False).logits
        return log_probs_of(logits[:, :-1], sequences[:, 1:]) * wanted
    targets = Targets(wanted=wanted, shared=True)
    packed, arguments = inputs.packed(
        sequences, attention_mask, batch.media, targets=targets, share_prefix=way == "shared"
    )
    with packed_as(packed.layout):
        logits = model(**arguments, use_cache=False, logits_to_keep=packed.sources).logits
    return packed.scatter(log_probs_of(logits[0], packed.target_ids), like=wanted)


def log_probs_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    logits = logits.float()
    return logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(dim=-1)


def measure_steps(arguments: argparse.Namespace, folder: Path, *, device: torch.device) -> dict[str, Any]:
    """Return speed and memory of whole update steps of the larger model in bf16, for one image-heavy group."""
    kit = get_kit("qwen2_5_vl")
    build_tiny_checkpoint(kit, folder, hidden_size=64, layers=2)
    model = larger_model(arguments, kit, folder, device=device)
    processor = kit.load_processor(str(folder), trust_remote_code=False)
    groups = groups_of("image", scale=arguments.scale)
    batch = make_batch(kit, processor, model.config, groups=groups, samples=arguments.samples)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=device.type == "cuda")
    advantages = torch.randn(len(batch.sequences), 1, generator=torch.Generator().manual_seed(0)).to(device)

    def update(way: str) -> None:
        log_probs = run(kit, model, batch, way)
        ratio = (log_probs - log_probs.detach()).exp()
        (-(ratio * advantages)[batch.action_mask.to(device)].mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    # The first of two runs makes the optimizer's state and chooses kernels.
    memory = {way: [taken(partial(update, way), device=device) for _ in range(2)][-1] for way in WAYS}
    times = [{way: seconds(partial(update, way)) for way in WAYS} for _ in range(arguments.repeats)]
    peak = arguments.peak_tflops * 1e12 if arguments.peak_tflops else known_peak(device)
    tokens = sum(batch.prompt_lengths) * arguments.samples + sum(batch.response_lengths)
    entries = {}
    for way in WAYS:
        took = statistics.median(row[way] for row in times)
        work = operations(model, batch, way)
        entries[way] = {
            "seconds": round(took, 4),
            "sample_tokens_per_second": round(tokens / took),
            "tera_operations": round(work / 1e12, 3),
            "utilisation": None if peak is None else round(work / took / peak, 4),
            "memory_gib": round(memory[way] / 2**30, 2),
        }
    return {
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "samples": arguments.samples,
        "prompt_tokens": batch.prompt_lengths[0],
        "response_tokens": [min(batch.response_lengths), max(batch.response_lengths)],
        "ways": entries,
        "speedup_of_shared": {
            way: round(statistics.median(row[way] / row["shared"] for row in times), 2) for way in WAYS[:-1]
        },
    }


def larger_model(arguments: argparse.Namespace, kit: LmmKit, folder: Path, *, device: torch.device) -> Any:
    """Return a random model in bf16 with the proportions of Qwen2.5-VL-3B, for the tokens of a tiny checkpoint."""
    tiny = kit.load_model(str(folder), dtype=torch.bfloat16, attn_implementation="sdpa", trust_remote_code=False)
    config, width = tiny.config, arguments.hidden_size
    text, vision = config.text_config, config.vision_config
    heads, of_head = max(1, width // 128), min(128, width)
    text.hidden_size, text.intermediate_size = width, 11008 * width // 2048
    text.num_hidden_layers, text.vocab_size = arguments.layers, arguments.vocabulary
    text.num_attention_heads, text.num_key_value_heads = heads, max(1, heads // 8)
    text.layer_types, text.initializer_range = ["full_attention"] * arguments.layers, 0.02
    # An eighth, and twice three sixteenths: half of a head.
    sections = [of_head // 8, 3 * of_head // 16, 3 * of_head // 16]
    text.rope_parameters = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections}
    vision.num_heads, vision.depth = max(1, 16 * width // 2048), arguments.vision_layers
    vision.hidden_size, vision.intermediate_size = 80 * vision.num_heads, 3420 * width // 2048
    vision.out_hidden_size, vision.initializer_range = width, 0.02
    vision.fullatt_block_indexes = [*range(7, arguments.vision_layers, 8)]
    with device:
        model = type(tiny)._from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    use_packed_attention(model)
    return model.to(device).train()


def operations(model: Any, batch: GroupBatch, way: str) -> float:
    """Return the multiplications and additions of a forward and backward pass, on padding, too; norms are left out."""
    text, vision = model.config.text_config, model.config.vision_config
    samples, width = len(batch.sequences), batch.sequences.shape[1]
    (prompt,), responses = batch.prompt_lengths, batch.response_lengths
    if way == "padded":
        tokens, targets, pairs, images = samples * width, samples * width, samples * width**2 / 2, samples
    elif way == "packed":
        lengths = [prompt + response for response in responses]
        tokens, pairs, images = sum(lengths), sum(length**2 / 2 for length in lengths), samples
        targets = sum(responses)
    else:
        tokens, targets, images = batch.unique_tokens, sum(responses), 1
        pairs = prompt**2 / 2 + sum(response * (prompt + response / 2) for response in responses)
    patches = images * len(batch.media[0]["pixel_values"])
    merged = vision.spatial_merge_size**2
    weights = {
        part: sum(weight.numel() for name, weight in model.named_parameters() if marker in name)
        for part, marker in (("text", ".layers."), ("head", "lm_head"), ("blocks", ".blocks."), ("merger", ".merger."))
    }
    whole = len(vision.fullatt_block_indexes)
    of_window = (vision.window_size // vision.patch_size) ** 2
    seen = whole * patches / images + (vision.depth - whole) * of_window
    forward = 2 * (weights["text"] * tokens + weights["head"] * targets)
    forward += 2 * (weights["blocks"] * patches + weights["merger"] * patches / merged)
    forward += 4 * text.num_hidden_layers * text.hidden_size * pairs + 4 * vision.hidden_size * patches * seen
    return 3 * forward


def known_peak(device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAKS.items() if part in name), None)


def taken(call: Callable[[], None], *, device: torch.device) -> int:
    """Return the most bytes that a call holds beside what was held before."""
    if device.type != "cuda":
        return peak_bytes(call)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    return torch.cuda.max_memory_allocated(device) - before


def seconds(call: Callable[[], None]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
