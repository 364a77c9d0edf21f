"""Passes of a policy loss: log-probs of policy, old policy and engine, drawn at random."""

import torch

Pass = dict[str, torch.Tensor]


def random_pass(*lengths: int, seed: int = 0, width: int = 6) -> Pass:
    """Samples of so many loss tokens, of which not every second stands beside the next; ratios of 0.3 to 3."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), width)
    mask = torch.zeros(shape, dtype=torch.long)
    for row, length in enumerate(lengths):
        mask[row, torch.randperm(width, generator=generator)[:length]] = 1
    old = -2 * torch.rand(shape, generator=generator, dtype=torch.double)
    log_probs = (old + 0.5 * torch.randn(shape, generator=generator, dtype=torch.double)).requires_grad_(True)
    engine = old + 0.3 * torch.randn(shape, generator=generator, dtype=torch.double)
    return {
        "log_probs": log_probs,
        "old_log_probs": old,
        "advantages": torch.randn(shape, generator=generator, dtype=torch.double),
        "action_mask": mask,
        "rollout_log_probs": engine,
    }
