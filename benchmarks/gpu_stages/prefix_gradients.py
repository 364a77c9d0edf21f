"""Full width, four layers: log-probs, and what reaches the keys and values of a prompt from all of its responses.

With a shared prefix the gradients of n responses are added up in one place, in half precision; in the padded batch each
has its own. What an error there does to a model no loss shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from gpu_stages.policy import LAYOUTS, LOGITS
from gpu_stages.record import Result, Save, Task
from gpu_stages.setting import Once, Setting
from gpu_stages.subject import Shape, Subject, make_subject
from train_batches import GroupSizes

PROJECTIONS = ("k_proj", "v_proj")
SHAPE = Shape(layers=4, vision_layers=8)
# An image of 16 x 16 tokens.
GROUP, SAMPLES = GroupSizes(prompt_tokens=256 + 64, responses=(64, 192), image_side=448), 8

Values = dict[str, torch.Tensor]


def tasks(setting: Setting) -> list[Task]:
    """Return all ways in bf16, each compared with the padded batch and whole logits in fp32 on the same device."""
    half = Once(partial(_subject, setting, torch.bfloat16))
    single = Once(partial(_subject, setting, torch.float32))
    expected = Once(lambda: _values(setting, single(), layout="padded", logits="whole"))
    return [
        Task(name=f"{layout}/{logits}", measure=partial(_compared, setting, expected, half, layout, logits))
        for layout in LAYOUTS
        for logits in LOGITS
    ]


def _subject(setting: Setting, dtype: torch.dtype) -> Subject:
    """Return the model; the one in single precision has the weights of the one in half precision."""
    shape, folder = SHAPE.scaled(setting.scale), setting.folder / "subject"
    make = partial(make_subject, shape, folder, setting.device, checkpointing=False)
    subject = make(dtype=dtype)
    if dtype == torch.float32:
        subject.policy.model.load_state_dict(make(dtype=torch.bfloat16).policy.model.state_dict())
    return subject


def _compared(
    setting: Setting, expected: Once[Values], half: Once[Subject], layout: str, logits: str, save: Save
) -> Result:
    theirs = expected()
    mine = _values(setting, half(), layout=layout, logits=logits)
    found: dict[str, float] = {
        "log_probs_max": float((mine["log_probs"] - theirs["log_probs"]).abs().max()),
        "log_probs_mean": float((mine["log_probs"] - theirs["log_probs"]).abs().sum() / theirs["action_mask"].sum()),
    }
    for name in theirs.keys() - {"log_probs", "action_mask"}:
        found[name] = float((mine[name] - theirs[name]).norm() / theirs[name].norm())
    return {"differences": dict(sorted(found.items()))}


def _values(setting: Setting, subject: Subject, *, layout: str, logits: str) -> Values:
    """Return log-probs (B, T - 1) and the gradients on the prompt's tokens, summed over its copies, on the CPU."""
    batch = subject.batch(GROUP.scaled(setting.scale), samples=setting.scaled(SAMPLES, least=2))
    (prompt,) = batch.prompt_lengths
    model = subject.policy.model
    try:
        with _outputs(model) as outputs:
            log_probs = subject.policy.log_probs(batch, layout=layout, logits=logits)
            (log_probs.sum() / batch.action_mask.sum()).backward()
        values = {"log_probs": log_probs.detach().float().cpu(), "action_mask": batch.action_mask}
        lengths = [prompt + length for length in batch.response_lengths]
        for name, output in outputs.items():
            assert output.grad is not None, f"{name} does not reach the loss"
            values[name] = _on_prompt(output.grad, layout=layout, prompt=prompt, lengths=lengths).float().cpu()
        for name, weight in model.named_parameters():
            if name.endswith(tuple(f"{part}.weight" for part in PROJECTIONS)) and "visual" not in name:
                values[f"weights of {name.removesuffix('.weight')}"] = weight.grad.float().cpu()
    finally:
        model.zero_grad(set_to_none=True)
    return values


@contextmanager
def _outputs(model: torch.nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Yield a dict that gets the outputs of the text layers' keys and values by name, which keep their gradients."""
    outputs: dict[str, torch.Tensor] = {}

    def keep(name: str, module: torch.nn.Module, inputs: object, output: torch.Tensor) -> None:
        output.retain_grad()
        outputs[name] = output

    hooks = [
        module.register_forward_hook(partial(keep, f"prefix of {name}"))
        for name, module in model.named_modules()
        if name.endswith(PROJECTIONS)
    ]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()


def _on_prompt(gradient: torch.Tensor, *, layout: str, prompt: int, lengths: list[int]) -> torch.Tensor:
    """Return the gradient on the prompt's tokens (P, C), summed over its copies in single precision.

    Args:
        gradient: (B, T, C) of a padded batch, (1, T, C) of a packed sequence.
        lengths: tokens of each sample, its prompt included.
    """
    if layout == "padded":
        return gradient[:, :prompt].float().sum(0)
    if layout == "shared":
        return gradient[0, :prompt].float()
    starts = torch.tensor([0, *lengths]).cumsum(0)[:-1]
    return torch.stack([gradient[0, start : start + prompt].float() for start in starts.tolist()]).sum(0)
