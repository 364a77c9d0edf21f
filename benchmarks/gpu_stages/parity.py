"""Every kit's passes on the device, in single and half precision, against the padded pass in fp32 on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_stages.policy import LAYOUTS, Policy, prepare_tower
from gpu_stages.record import Result, Save, Task
from gpu_stages.setting import Setting
from train_batches import GroupBatch, build_tiny_checkpoint, groups_of, make_batch

from lmm_r1.lmm_kits import LmmKit, get_kit
from lmm_r1.models.packed.attention import use_packed_attention

SINGLE_TOLERANCE = 1e-3
# A token that sees another sample moves log-probs by about 1.
HALF_TOLERANCE = 0.05
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def tasks(setting: Setting) -> list[Task]:
    return [Task(name=f"parity/{name}", measure=partial(_compared, setting, name)) for name in setting.kits]


def _compared(setting: Setting, name: str, save: Save) -> Result:
    """Compare log-probs and gradients of all layouts with those of the padded batch and whole logits on the CPU."""
    kit, folder = get_kit(name), setting.folder / name
    if not folder.exists():
        build_tiny_checkpoint(kit, folder, hidden_size=64, layers=2)
    processor = kit.load_processor(str(folder), trust_remote_code=False)
    reference = _loaded(kit, folder, torch.device("cpu"), torch.float32)
    groups = groups_of("mixed" if kit.takes_images else "text", scale=min(1.0, setting.scale))
    batch = make_batch(kit, processor, reference.config, groups=groups, samples=4)
    banned = kit.banned_token_ids(reference.config, kit.tokenizer_of(processor))
    expected = _results(Policy.of(kit, reference, banned=banned), batch, layout="padded", logits="whole")
    found: dict[str, dict[str, dict[str, float]]] = {}
    for label, dtype in DTYPES.items():
        policy = Policy.of(kit, _loaded(kit, folder, setting.device.place, dtype), banned=banned)
        found[label] = {}
        for layout in LAYOUTS:
            mine = _results(policy, batch, layout=layout, logits="chunked")
            found[label][layout] = _differences(mine, expected)
            save({"differences": found})
    return {"differences": found, "judgement": judgement(found)}


def _loaded(kit: LmmKit, folder: Path, place: torch.device, dtype: torch.dtype) -> Any:
    model = kit.load_model(str(folder), dtype=dtype, attn_implementation="sdpa", trust_remote_code=False)
    # Some kits' projectors start at zero; without this, their images would not matter.
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.02 * torch.randn(weight.shape, generator=generator).to(weight)
    prepare_tower(model, kit)
    use_packed_attention(model)
    return model.to(place).train()


def _results(policy: Policy, batch: GroupBatch, *, layout: str, logits: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probs (B, T - 1) and all gradients of their mean (N,), on the CPU in single precision."""
    model = policy.model
    model.zero_grad()
    log_probs = policy.log_probs(batch, layout=layout, logits=logits)
    (log_probs.sum() / batch.action_mask.sum()).backward()
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    whole = torch.cat([gradient.flatten().float() for gradient in gradients])
    return log_probs.detach().float().cpu(), whole.cpu()


def _differences(
    mine: tuple[torch.Tensor, torch.Tensor], theirs: tuple[torch.Tensor, torch.Tensor]
) -> dict[str, float]:
    return {
        "log_probs": float((mine[0] - theirs[0]).abs().max()),
        "gradients": float((mine[1] - theirs[1]).norm() / theirs[1].norm()),
    }


def judgement(found: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """Judge packed passes in bf16 by how far the padded pass in bf16 is from single precision itself."""
    for label, layouts in found.items():
        for layout, values in layouts.items():
            for name, value in values.items():
                limit = SINGLE_TOLERANCE if label == "fp32" else max(HALF_TOLERANCE, 3 * layouts["padded"][name])
                # A comparison that is not a number is false.
                if not value <= limit:
                    return f"disagrees: {name} of {layout} in {label} are off by {value:.2g}, more than {limit:.2g}"
    return "agrees"
