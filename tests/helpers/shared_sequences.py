"""Ranks that share packed sequences, as processes: each runs every case with and without the others, and compares."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from helpers.launched_ranks import launch

Gradients = dict[str, torch.Tensor]
DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


def run_ranks(count: int, job: dict[str, Any], *, folder: Path, timeout_s: float) -> list[dict[str, Any]]:
    """Run `job` on ranks that talk over loopback; return what each of them found, by the names of the cases."""
    folder.mkdir()
    (folder / "job.json").write_text(json.dumps(job))
    launch("helpers.shared_sequences", str(folder), count=count, folder=folder / "logs").wait(seconds=timeout_s)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(count)]


def main(folder: Path) -> None:
    """Run this rank's part of all cases."""
    from lmm_r1 import cpu, dotted
    from lmm_r1.config import SFTConfig
    from lmm_r1.host.strategy import make_strategy

    torch.set_num_threads(1)
    cpu.prepare_process()
    job = json.loads((folder / "job.json").read_text())
    settings = {"ds.ulysses_size": job["ulysses_size"], "train.batch_size": 128, "train.micro_batch_size": 8}
    strategy = make_strategy(dotted.replace(SFTConfig(), settings))
    strategy.setup_distributed()
    cases = {"compare": compare, "train": train, "exchange": exchange}
    found = {
        name: cases[case.pop("kind")](group=strategy.ring_attn_group, **case) for name, case in job["cases"].items()
    }
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def exchange(*, group: dist.ProcessGroup, key_heads: int) -> dict[str, Any]:
    """Exchange one number per token and head, 10 x token + head, of two tokens a rank; and gradients on the way back."""
    from lmm_r1.models.packed.attention import heads_for_tokens, tokens_for_heads

    def numbers(heads: int) -> torch.Tensor:
        tokens = torch.arange(2.0) + 2 * dist.get_rank(group)
        return (10 * tokens + torch.arange(float(heads))[:, None])[None, :, :, None].requires_grad_()  # (1, H, 2, 1)

    query, key, value = numbers(4), numbers(key_heads), numbers(key_heads)
    parts = tokens_for_heads(query, key, value, group=group)
    output = heads_for_tokens(parts[0].transpose(1, 2), group=group)  # (1, 2, H, 1)
    (output * (dist.get_rank(group) + 1) + parts[2].sum()).sum().backward()
    return {
        "parts": [part[0, :, :, 0].tolist() for part in parts],
        "output": output[0, :, :, 0].tolist(),
        "gradients": [tensor.grad[0, :, :, 0].tolist() for tensor in (query, value)],
    }


def compare(
    *,
    group: dist.ProcessGroup,
    kit: str,
    path: str,
    messages: str,
    lengths: Sequence[Sequence[int]],
    dtype: str = "fp32",
    checkpointing: str | None = None,
    every_token: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """Compare an actor's log-probs, entropies and gradients on a batch of groups with and without the other ranks."""
    from helpers.double_precision import DoublePrecision
    from helpers.tiny_models import make_actor

    actor = make_actor(Path(path), packing_samples=True, share_prefix=True, **settings).train()
    _disturb(actor.model, dtype=dtype)
    if checkpointing is not None:
        actor.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
    given = _batch(kit, path, messages, lengths)
    if every_token:
        given = [replace(sample, loss_mask=torch.ones_like(sample.loss_mask), group=None) for sample in given]

    def run(shared_by: dist.ProcessGroup | None) -> list[torch.Tensor]:
        log_probs, output = actor(given, return_output=True, return_entropy=True, ring_attn_group=shared_by)
        return [log_probs, output.entropy]

    # Norms would round gradients to fp32: a sum in another order may round the other way.
    with DoublePrecision() if dtype == "fp64" else nullcontext():
        return _compared(actor, actor.kit, run, group=group)


def _compared(
    module: Any, kit: Any, run: Callable[[dist.ProcessGroup | None], list[torch.Tensor]], *, group: dist.ProcessGroup
) -> dict[str, Any]:
    """Return the largest differences between alone and shared, and how many tokens the first layer saw of each."""
    with _token_counts(kit, module.model) as tokens:
        alone, gradients = _outputs_and_gradients(module, lambda: run(None))
        shared, shared_gradients = _outputs_and_gradients(module, lambda: run(group))
    for gradient in shared_gradients.values():
        # As DeepSpeed takes them.
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
    assert gradients.keys() == shared_gradients.keys()
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    return {
        "outputs": max((one - other).abs().max().item() for one, other in zip(alone, shared, strict=True)),
        "largest_output": max(output.abs().max().item() for output in alone),
        "gradients": max((gradients[name] - shared_gradients[name]).norm().item() for name in gradients) / norm.item(),
        "norm": norm.item(),
        "trained": len(gradients),
        "tokens": tokens,
    }


def _outputs_and_gradients(module: Any, run: Callable[[], list[torch.Tensor]]) -> tuple[list[torch.Tensor], Gradients]:
    """Return outputs, and the gradients of their sum with random weights."""
    module.zero_grad()
    torch.manual_seed(0)
    outputs = run()
    generator = torch.Generator().manual_seed(7)
    weights = [torch.randn(output.shape, generator=generator, dtype=torch.float64) for output in outputs]
    torch.stack([(output * w.to(output)).sum() for output, w in zip(outputs, weights, strict=True)]).sum().backward()
    named = module.named_parameters()
    gradients = {name: weight.grad.clone() for name, weight in named if weight.grad is not None}
    return [output.detach() for output in outputs], gradients


@contextmanager
def _token_counts(kit: Any, model: torch.nn.Module) -> Iterator[list[int]]:
    """Collect how many tokens the language model's first layer gets, once per forward pass."""
    counts: list[int] = []

    def count(layer: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        counts.append((args[0] if args else kwargs["hidden_states"]).shape[1])

    hook = kit.language_model_of(model).layers[0].register_forward_pre_hook(count, with_kwargs=True)
    yield counts
    hook.remove()


def _disturb(model: torch.nn.Module, *, dtype: str) -> None:
    """Move all weights a little, as some are zero at first, which would hide what they are multiplied with."""
    torch.manual_seed(1)
    for weight in model.parameters():
        weight.data.add_(0.02 * torch.randn(weight.shape))
    model.to(DTYPES[dtype])


def _batch(kit: str, path: str, messages: str, lengths: Sequence[Sequence[int]]) -> Any:
    from helpers.packed_batches import Batch, fork, groups
    from helpers.tiny_models import encode

    from lmm_r1.data import sample as samples
    from lmm_r1.lmm_kits import get_kit

    own = get_kit(kit)
    processor = own.load_processor(path, trust_remote_code=False)
    prompts = [encode(own, processor, conversation) for conversation in _conversations(messages)]
    if messages == "branches":
        # Nodes of single tokens.
        samples.LEAST_SHARED = 1
        return fork(*prompts).for_model
    return Batch(tuple(groups(prompts, lengths))).for_model


def _conversations(name: str) -> list[Any]:
    from helpers.conversations import message, picture

    text = [message("user", "What is 12 + 34?")]
    other = [message("system", "Think first, and then say what you found."), message("user", "And 46 + 1?")]
    image = [message("user", picture(84, 56), "Which digit is this?")]
    two_images = [message("user", "Is", picture(56, 56), "or", picture(84, 56), "larger?")]
    crop, crops = [message("user", picture(56, 84))], [message("user", picture(56, 56), picture(84, 56))]
    return {
        "text": [text, other],
        "images": [image, text, two_images],
        "image": [image, text],
        "branches": [image, crop, crops],
    }[name]


def train(*, group: dist.ProcessGroup, kit: str, path: str, ulysses_size: int, stage: int) -> dict[str, Any]:
    """Make two supervised updates under DeepSpeed and the same ones by hand; return what differs.

    With an epsilon that large, AdamW's steps are as large as the gradients, and would show a wrong scale.
    """
    from helpers.sessions import begun, run_of, updated

    from lmm_r1 import dotted
    from lmm_r1.config import SFTConfig
    from lmm_r1.host.models import whole_state_dict
    from lmm_r1.lmm_kits import get_kit
    from lmm_r1.supervised.sft import RowEncoder, SFTRun

    flags = {
        "model.model_name_or_path": path,
        "model.gradient_checkpointing_enable": False,
        "train.batch_size": 4,
        "train.micro_batch_size": 1,
        "ds.zero_stage": stage,
        "ds.param_dtype": "fp32",
        "ds.ulysses_size": ulysses_size,
        "ds.packing_samples": True,
        "adam.lr": 0.1,
        "adam.eps": 1.0,
        "lr_scheduler": "constant",
        "lr_warmup_ratio": 0.0,
        "max_norm": 0.0,
    }
    config = dotted.replace(SFTConfig(), flags)
    own = get_kit(kit)
    processor = own.load_processor(path, trust_remote_code=False)
    rows = _rows()
    encode = RowEncoder.of(config, kit=own, processor=processor)
    samples = [encode(row) for row in rows]
    expected = _by_hand(config, samples, kit=own, processor=processor)

    run = run_of(SFTRun, begun(config, steps=2), rows)
    run.actor.train()
    found: dict[str, Any] = {"losses": [], "norms": [], "tokens": []}
    for step in range(2):
        made = updated(run, run._micro_batches(step))
        found["losses"].append(made.loss)
        found["tokens"].append(made.tokens)
        found["norms"].append(made.grad_norm)
    weights = whole_state_dict(run.engine)
    if dist.get_rank() == 0:
        differences = [(weights[name] - weight).abs().max().item() for name, weight in expected["weights"].items()]
        found["weights"] = max(differences)
    return {**found, **{f"expected_{name}": expected[name] for name in ("losses", "norms", "moved")}}


def _rows() -> list[Any]:
    """Four rows, two of them with images, all of other lengths."""
    from helpers.conversations import message, picture, row

    questions = [
        ("What is 12 + 34?",),
        (picture(84, 56), "Which digit is this?"),
        ("Think about it for a while: what is 46 + 1, and why?",),
        ("And", picture(56, 56), picture(84, 56), "?"),
    ]
    answers = ("<answer>46</answer>", "4", "<think>easy</think><answer>47</answer>", "<answer>5</answer>")
    return [
        row(message("user", *question), message("assistant", answer))
        for question, answer in zip(questions, answers, strict=True)
    ]


def _by_hand(config: Any, samples: Sequence[Any], *, kit: Any, processor: Any) -> dict[str, Any]:
    """Return losses, gradient norms and weights of two updates of PyTorch's AdamW on all samples, one by one."""
    from helpers.tiny_models import make_actor

    actor = make_actor(Path(config.model.model_name_or_path)).train()
    trained = [weight for weight in actor.model.parameters() if weight.requires_grad]
    before = {name: weight.detach().clone() for name, weight in actor.model.named_parameters()}
    adam = config.adam
    optimizer = torch.optim.AdamW(trained, lr=adam.lr, betas=adam.betas, eps=adam.eps, weight_decay=0.0)
    losses, norms = [], []
    for _ in range(2):
        optimizer.zero_grad()
        total = sum(sum(sample.loss_mask[1:]) for sample in samples)
        loss = torch.zeros(())
        for sample in samples:
            loss = loss - actor([sample.for_model()]).sum() / total
        loss.backward()
        norms.append(torch.stack([weight.grad.norm() for weight in trained if weight.grad is not None]).norm().item())
        losses.append(loss.item())
        optimizer.step()
    weights = {name: weight.detach() for name, weight in actor.model.named_parameters()}
    moved = max((weights[name] - before[name]).abs().max().item() for name in weights)
    return {"losses": losses, "norms": norms, "weights": weights, "moved": moved}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
