"""Updates of distillations on DeepSpeed ranks, and the same ones by hand: padded, in one process, with all logits at once.

The cases run in the processes of `dpo_steps`."""

from __future__ import annotations

from pathlib import Path

import torch
from helpers.dpo_steps import ADAM, KIT, STEPS, Case, Updates, flags_of, rows, updates_made
from helpers.passes import logits_of
from helpers.sessions import begun, run_of
from helpers.tiny_models import CORPUS, make_actor

from lmm_r1.data.messages import Row
from lmm_r1.lmm_kits import LmmKit, TinyModelSpec, get_kit
from lmm_r1.models.actor import KitActor
from lmm_r1.supervised.samples import SFTSample, encode_sample

COEF, BETA, TEMPERATURE = 0.7, 0.3, 1.5
FLAGS = {"model.kd_coef": COEF, "model.kd_loss": "jsd", "model.kd_beta": BETA, "model.kd_temperature": TEMPERATURE}
SHARPNESS = 40.0


def build_teacher(kit: LmmKit, folder: Path) -> None:
    """Write a checkpoint that is larger than the tiny one, and surer of its random predictions."""
    folder.mkdir(exist_ok=True)
    kit.build_tiny(TinyModelSpec(hidden_size=128, layers=3, seed=1, tie_embeddings=False), CORPUS, folder)
    model = kit.load_model(str(folder), dtype=torch.float32, attn_implementation="sdpa", trust_remote_code=False)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(SHARPNESS)
    model.save_pretrained(folder)


def conversations() -> list[Row]:
    """Four rows, two of them with images."""
    return [pair.sides[0] for pair in rows()]


def losses_by_hand(student: KitActor, teacher: KitActor, sample: SFTSample) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the distance and the cross-entropy of each loss token of a conversation that runs by itself."""
    given = sample.for_model()
    ids = given.token_ids[None]
    log_q, log_p = (logits_of(actor, ids, media=[given.media])[0, :-1] for actor in (student, teacher))
    losses = -log_q.log_softmax(-1).gather(-1, given.token_ids[1:, None])[:, 0]
    log_p = log_p.detach()
    log_q, log_p = ((logits / TEMPERATURE).log_softmax(-1) for logits in (log_q, log_p))
    log_m = (BETA * log_p.exp() + (1 - BETA) * log_q.exp()).log()
    parts = BETA * log_p.exp() * (log_p - log_m) + (1 - BETA) * log_q.exp() * (log_q - log_m)
    return parts.sum(-1)[given.loss_mask], losses[given.loss_mask]


def by_hand(case: Case) -> Updates:
    """Make the updates with PyTorch's AdamW."""
    kit = get_kit(KIT)
    processor = kit.load_processor(str(case.folder), trust_remote_code=False)
    samples = [
        encode_sample(row, kit=kit, processor=processor, max_len=4096, every_turn=True) for row in conversations()
    ]
    student, teacher = make_actor(case.folder).train(), make_actor(case.teacher)
    trained = [weight for weight in student.model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, **ADAM)
    count = sum(sum(sample.loss_mask) for sample in samples)
    found = Updates(losses=[], means=[], norms=[], weights={})
    for _ in range(STEPS):
        optimizer.zero_grad()
        sums = torch.zeros(2, dtype=torch.double)
        for sample in samples:
            distance, entropy = losses_by_hand(student, teacher, sample)
            (COEF * distance + (1 - COEF) * entropy).sum().div(count).backward()
            sums += torch.stack([distance.sum(), entropy.sum()]).detach().double() / count
        found.losses.append((COEF * sums[0] + (1 - COEF) * sums[1]).item())
        found.means.append(dict(zip(("kd_loss", "nll_loss"), sums.tolist(), strict=True)))
        norms = [weight.grad.norm() for weight in trained if weight.grad is not None]
        found.norms.append(torch.stack(norms).norm().item())
        optimizer.step()
    found.weights.update((name, value.detach().clone()) for name, value in student.model.state_dict().items())
    return found


def ranks_updates(case: Case) -> Updates:
    """Make the updates as one of the ranks."""
    from lmm_r1 import dotted
    from lmm_r1.config import KDConfig, resolve
    from lmm_r1.supervised.sft import KDRun

    given = {"teacher.model_name_or_path": str(case.teacher), **FLAGS, **flags_of(case)}
    config = resolve(dotted.replace(KDConfig(), given))
    return updates_made(run_of(KDRun, begun(config, steps=STEPS), conversations()))
