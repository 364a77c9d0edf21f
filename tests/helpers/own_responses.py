"""Distillation on the student's own responses as one of two ranks: what the engine samples is likeliest to the student now."""

import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from helpers.dpo_steps import KIT
from helpers.kd_steps import conversations
from helpers.sessions import begun, run_of

from lmm_r1 import cpu


def main(folder: Path, stage: int) -> None:
    torch.set_num_threads(1)
    cpu.prepare_process()
    from lmm_r1 import dotted
    from lmm_r1.config import KDConfig, resolve
    from lmm_r1.supervised.kd import KDRun, check_sampled
    from lmm_r1.supervised.samples import collate

    flags = {
        "model.model_name_or_path": str(folder / "student"),
        "model.kd_coef": 1.0,
        "teacher.model_name_or_path": str(folder / "teacher"),
        "data.dataset": "rows.jsonl",
        "data.max_len": 256,
        "train.batch_size": 4,
        "train.micro_batch_size": 2,
        "rollout.on_policy_share": 1.0,
        "rollout.temperature": 0.0,
        "rollout.max_new_tokens": 8,
        "ds.param_dtype": "fp32",
        "ds.zero_stage": stage,
        "adam.lr": 0.01,
        "lr_scheduler": "constant",
        "lr_warmup_ratio": 0.0,
    }
    config = resolve(dotted.replace(KDConfig(), flags))
    session = begun(config, steps=2)
    checkpoint = session.checkpoint
    assert checkpoint.kit.model_type == KIT
    check_sampled(config, checkpoint)
    rows = [replace(row, location=f"row {number}") for number, row in enumerate(conversations())]
    run = run_of(KDRun, session, rows)
    banned = torch.tensor(checkpoint.banned_token_ids)
    seen = []
    for step in range(3):
        batches = run._micro_batches(step)
        assert run.on_policy
        run.actor.eval()
        for batch in batches:
            with torch.no_grad():
                output = run.actor(batch.sequences, attention_mask=batch.attention_mask, media=batch.media)
            logits = output["logits"][:, :-1]
            logits[..., banned] = -100.0
            assert batch.loss_mask.any(-1).all()
            assert torch.equal(
                logits.argmax(-1)[batch.loss_mask], batch.sequences[:, 1:][batch.loss_mask]
            ), f"step {step}"
        seen.append([batch.sequences[:, 1:][batch.loss_mask].tolist() for batch in batches])
        run.actor.train()
        run._update(batches)
        assert run.means["on_policy"] == 1.0
    # Other weights at each step, which would have chosen other tokens.
    assert seen[0] != seen[1] != seen[2]
    samples = run.student_engine.samples(rows[:1], step=0, numbers=[0])
    assert samples[0] is not None
    assert len(collate(samples, pad_token_id=0).sequences) == 1
    dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
