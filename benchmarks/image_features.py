"""CPU seconds of an RL step's passes over images with a frozen vision tower, features kept and made anew; JSON on the last line.

python benchmarks/image_features.py [--model DIR] [--groups 4] [--samples 8] [--output benchmarks/results/image_features.json]

A step is what becomes of a rollout: the reference's log-probs, the policy's, and the forward and backward pass of each epoch
over it; a second step is shown the same images. Each group is a pass, as a packed sequence with its prompt shared, or each
sample is one by itself. CPU seconds, of one thread, as others may use the cores.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from machine import machine_name

from lmm_r1 import cpu

if TYPE_CHECKING:
    from train_batches import GroupBatch

    from lmm_r1.models.actor import KitActor
from lmm_r1.models.loading import LoadSettings

EPOCHS = (1, 4)
KEPT_GIB = 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="checkpoint folder; without it a tiny Qwen2.5-VL is made")
    parser.add_argument("--hidden-size", type=int, default=256, help="width of the tiny model")
    parser.add_argument("--layers", type=int, default=6, help="layers of the tiny language model")
    parser.add_argument("--groups", type=int, default=4, help="prompts of a step, each with an image of its own")
    parser.add_argument("--samples", type=int, default=8, help="responses per prompt")
    parser.add_argument("--scale", type=float, default=1.0, help="lengths and image sides are multiplied by it")
    parser.add_argument("--repeats", type=int, default=3, help="times that each way is measured, in turns")
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    arguments = parser.parse_args()
    # Before anything imports torch or DeepSpeed.
    cpu.prepare_process()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(arguments, Path(folder) / "model")
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the seconds of all ways, and the differences of what they compute."""
    import torch
    from train_batches import build_tiny_checkpoint, groups_of, make_batch

    from lmm_r1.lmm_kits import get_kit, kit_of

    torch.set_num_threads(1)
    if arguments.model is None:
        kit = get_kit("qwen2_5_vl")
        build_tiny_checkpoint(kit, folder, hidden_size=arguments.hidden_size, layers=arguments.layers)
    else:
        folder, kit = arguments.model, kit_of(str(arguments.model), trust_remote_code=False)
    processor = kit.load_processor(str(folder), trust_remote_code=False)
    config = kit.load_config(str(folder), trust_remote_code=False)
    groups = [
        make_batch(
            kit,
            processor,
            config,
            groups=groups_of("image", scale=arguments.scale),
            samples=arguments.samples,
            seed=seed,
        )
        for seed in range(arguments.groups)
    ]
    alone = [sample for group in groups for sample in samples_of(group)]
    ways = {
        f"{passes}, {epochs} epochs": steps(folder, batches, epochs=epochs, repeats=arguments.repeats)
        for passes, batches in (("groups", groups), ("samples", alone))
        for epochs in EPOCHS
    }
    model = load(folder, gib=0.0, trained=True).model
    vision = (*kit.vision_prefixes, *kit.projector_prefixes)
    return {
        "benchmark": "image_features",
        "machine": machine_name(),
        "threads": torch.get_num_threads(),
        "model": {
            "type": kit.model_type,
            "of_vision_tower": sum(w.numel() for name, w in model.named_parameters() if name.startswith(vision)),
            "of_language_model": sum(w.numel() for name, w in model.named_parameters() if not name.startswith(vision)),
        },
        "groups": arguments.groups,
        "samples": arguments.samples,
        "prompt_tokens": [group.prompt_lengths[0] for group in groups],
        "response_tokens": [sum(group.response_lengths) for group in groups],
        "ways": ways,
    }


def samples_of(group: GroupBatch) -> list[GroupBatch]:
    """Return each sample of a group as a batch."""
    from dataclasses import replace

    return [
        replace(
            group,
            sequences=group.sequences[row : row + 1],
            attention_mask=group.attention_mask[row : row + 1],
            action_mask=group.action_mask[row : row + 1],
            media=group.media[row : row + 1],
            response_lengths=group.response_lengths[row : row + 1],
        )
        for row in range(len(group.sequences))
    ]


def load(folder: Path, *, gib: float, trained: bool) -> KitActor:
    from lmm_r1.models.actor import KitActor

    return KitActor(
        str(folder),
        LoadSettings(
            attn_implementation="sdpa",
            param_dtype="fp32",
            packing_samples=True,
            share_prefix=True,
            freeze_visual_encoder=trained,
            image_cache_gib=gib,
            trained=trained,
        ),
    )


def steps(folder: Path, batches: Sequence[GroupBatch], *, epochs: int, repeats: int) -> dict[str, Any]:
    """Return the median CPU seconds of two steps with features made anew and kept, the first with images that are new."""
    from lmm_r1.models.image_features import process_store

    seconds: dict[str, list[float]] = {name: [] for name in ("anew", "kept_first", "kept_again")}
    losses: dict[str, float] = {}
    policy, reference = (load(folder, gib=0.0, trained=trained) for trained in (True, False))
    for _ in range(repeats):
        spent, losses["anew"] = step(policy, reference, batches, epochs=epochs)
        seconds["anew"].append(spent)
        process_store.cache_clear()
        keeping = load(folder, gib=KEPT_GIB, trained=True)
        # In a run it is another process, which finds none of the policy's features.
        process_store.cache_clear()
        keeping_reference = load(folder, gib=KEPT_GIB, trained=False)
        for name in ("kept_first", "kept_again"):
            spent, losses[name] = step(keeping, keeping_reference, batches, epochs=epochs)
            seconds[name].append(spent)
        counts = keeping.take_feature_counts()
    medians = {name: round(statistics.median(values), 3) for name, values in seconds.items()}
    return {
        "cpu_seconds": medians,
        "saved_share": {name: round(1 - medians[name] / medians["anew"], 3) for name in medians},
        "policy_images_found": round(1 - counts.computed / counts.needed, 3),
        "kept_bytes": counts.kept_bytes,
        "max_loss_difference": max(abs(loss - losses["anew"]) for loss in losses.values()),
    }


def step(policy: KitActor, reference: KitActor, batches: Sequence[GroupBatch], *, epochs: int) -> tuple[float, float]:
    """Make the passes of a step without an optimizer's, and return its CPU seconds and the last epoch's loss."""
    import torch

    began = time.process_time()
    with torch.no_grad():
        for batch in batches:
            for model in (reference.eval(), policy.eval()):
                model(batch.sequences, batch.action_mask, attention_mask=batch.attention_mask, media=batch.media)
    policy.train()
    for _ in range(epochs):
        policy.zero_grad()
        total = 0.0
        for batch in batches:
            log_probs = policy(
                batch.sequences, batch.action_mask, attention_mask=batch.attention_mask, media=batch.media
            )
            loss = -(log_probs * batch.action_mask).sum() / batch.action_mask.sum()
            loss.backward()
            total += float(loss.detach())
    return time.process_time() - began, total / len(batches)


if __name__ == "__main__":
    main()
