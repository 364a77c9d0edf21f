"""Two updates with settings that few runs have, against a few lines of plain PyTorch: the weights are the same.

Flags are those of `train_sft`, in one process; the rows of an update are known by hand (`data.keep_order`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers.conversations import message, picture, row
from helpers.sessions import begun, run_of, updated

from lmm_r1 import dotted
from lmm_r1.config import SFTConfig, resolve
from lmm_r1.data.messages import Row
from lmm_r1.host.models import whole_state_dict
from lmm_r1.models.adapters import adapted_layers, merged_state_dict
from lmm_r1.supervised.samples import SFTSample
from lmm_r1.supervised.sft import SFTRun

pytestmark = pytest.mark.usefixtures("one_process")

UPDATES = 2
BATCH = 4
LR, BETAS, EPS = 1e-2, (0.7, 0.8), 1e-4
Weights = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What two updates are by hand."""

    rates: tuple[float, float] = (LR, LR)
    frozen: tuple[str, ...] = ()
    """How the names of weights begin that stay as they are."""
    slow: tuple[str, ...] = ()
    """How those begin that learn at another rate."""
    slow_rates: tuple[float, float] = (0.0, 0.0)
    decay: float = 0.0
    max_norm: float = math.inf
    adapters: tuple[str, ...] = ()
    """How the names of the layers end that have them."""
    scale: float = 0.0
    """Of the adapters' product."""
    left_out: int = 0
    """Rows of each update that are too long."""


@dataclass(frozen=True, kw_only=True)
class Case:
    expected: Expected
    flags: dict[str, Any] = field(default_factory=dict)
    kit: str = "llm"


VISION = ("model.visual.",)
CASES = {
    # Half of two updates is one of warm-up, at its peak; the other is transformers' first after it, at the peak, too.
    "first layers frozen, decay, warm-up over half": Case(
        flags={
            "model.freeze_prefix": ("model.embed_tokens.", "model.layers.0."),
            "adam.weight_decay": 0.5,
            "lr_scheduler": "linear",
            "lr_warmup_ratio": 0.5,
            "train.micro_batch_size": 1,
        },
        expected=Expected(frozen=("model.embed_tokens.", "model.layers.0."), decay=0.5),
    ),
    # Both are of warm-up: 1/2 and 2/2.
    "warm-up over all, half of a pass left out": Case(
        flags={"lr_warmup_ratio": 1.0, "data.max_len": 100}, expected=Expected(rates=(LR / 2, LR), left_out=1)
    ),
    # Halfway down, 0.25 + 0.75 x (1 + cos(pi / 2)) / 2.
    "clipped, down to a quarter": Case(
        flags={"lr_warmup_ratio": 0.0, "min_lr_ratio": 0.25, "max_norm": 0.03, "train.micro_batch_size": 2},
        expected=Expected(rates=(LR, 0.625 * LR), max_norm=0.03),
    ),
    "rsLoRA on queries and values, decay": Case(
        flags={
            "ds.lora.rank": 4,
            "ds.lora.alpha": 6,
            "ds.lora.use_rslora": True,
            "ds.lora.target_modules": ("q_proj", "v_proj"),
            "adam.weight_decay": 0.5,
            "lr_scheduler": "constant",
        },
        # 6 / sqrt(4)
        expected=Expected(adapters=("q_proj", "v_proj"), scale=3.0, decay=0.5),
    ),
    # 1 / sqrt(1 + 1 / 10,000): transformers' time scale without a warm-up.
    "packed, stage 3, inverse square root": Case(
        flags={"ds.packing_samples": True, "ds.zero_stage": 3, "lr_scheduler": "inverse_sqrt", "lr_warmup_ratio": 0.0},
        expected=Expected(rates=(LR, LR * 0.99995)),
    ),
    # The convolution's weight is read without its module, which ZeRO-3 must see.
    "linear layers, packed, stage 3": Case(
        kit="qwen3_5",
        flags={"ds.packing_samples": True, "ds.zero_stage": 3, "lr_scheduler": "constant"},
        expected=Expected(),
    ),
    "a vision tower at its own rate, decay": Case(
        kit="qwen2_5_vl",
        flags={"adam.vision_lr": 2e-3, "adam.weight_decay": 0.5, "lr_warmup_ratio": 1.0, "train.micro_batch_size": 2},
        expected=Expected(rates=(LR / 2, LR), slow=VISION, slow_rates=(1e-3, 2e-3), decay=0.5),
    ),
    "a frozen vision tower, clipped, stage 1": Case(
        kit="qwen2_5_vl",
        flags={"model.freeze_visual_encoder": True, "ds.zero_stage": 1, "max_norm": 0.03, "lr_scheduler": "constant"},
        expected=Expected(frozen=VISION, max_norm=0.03),
    ),
    # Polynomial: from the peak to 1e-7 over two updates.
    "not clipped, stage 0, one pass, the last turn only": Case(
        flags={
            "max_norm": 0.0,
            "ds.zero_stage": 0,
            "data.multiturn": False,
            "lr_scheduler": "polynomial",
            "lr_warmup_ratio": 0.0,
            "train.micro_batch_size": BATCH,
        },
        expected=Expected(rates=(LR, (LR - 1e-7) / 2 + 1e-7)),
    ),
}


def rows(*, images: bool) -> list[Row]:
    """Two updates' rows, of many lengths; the second of each update is longer than 100 tokens."""
    made = []
    for number in range(UPDATES * BATCH):
        shown = [picture(56, 28 * (1 + number % 3))] if images and number % 2 else []
        text = "What is 12 + 34? " * (12 if number % BATCH == 1 else 1)
        turns = [message("user", *shown, text), message("assistant", "It is 46." * (1 + number % 3))]
        if number % BATCH == 2:
            turns += [message("user", "And 3?"), message("assistant", "7, as you can see.")]
        made.append(row(*turns))
    return made


def config_of(case: Case, folder: Path, **more: Any) -> SFTConfig:
    flags = {
        "model.model_name_or_path": str(folder),
        "data.dataset": "rows.jsonl",
        "data.keep_order": True,
        "train.batch_size": BATCH,
        "train.micro_batch_size": 2,
        "ds.param_dtype": "fp32",
        "ds.attn_implementation": "sdpa",
        "adam.lr": LR,
        "adam.betas": BETAS,
        "adam.eps": EPS,
        "max_norm": 0.0,
    }
    return resolve(dotted.replace(SFTConfig(), flags | case.flags | more))


def started(case: Case, folder: Path, **more: Any) -> SFTRun:
    config = config_of(case, folder, **more)
    run = run_of(SFTRun, begun(config, steps=UPDATES), rows(images=case.kit != "llm"))
    run.actor.train()
    return run


def update(run: SFTRun, step: int) -> None:
    updated(run, run._micro_batches(step))


def weights_of(run: SFTRun) -> Weights:
    """Return the weights as they would be saved, adapters merged in."""
    weights = whole_state_dict(run.engine)
    module = run.engine.module
    if adapted_layers(module):
        weights = merged_state_dict(module, weights)
    return {name: value.detach().clone() for name, value in weights.items()}


def samples_of(run: SFTRun, step: int) -> list[SFTSample]:
    """Return the samples of an update, without rows that are too long."""
    encoded = [run.encode(run.rows[place]) for place in range(step * BATCH, (step + 1) * BATCH)]
    return [sample for sample in encoded if sample is not None]


def loss_of(model: torch.nn.Module, sample: SFTSample, kit: Any) -> torch.Tensor:
    """Minus the log-probs of a sample's loss tokens, added up."""
    ids = torch.tensor([sample.token_ids])
    inputs = kit.forward_inputs(model.config, ids, torch.ones_like(ids), sample.media)
    log_probs = model(input_ids=ids, **inputs).logits[0, :-1].log_softmax(-1)
    picked = log_probs[torch.arange(ids.shape[1] - 1), ids[0, 1:]]
    return -picked[torch.tensor(sample.loss_mask[1:])].sum()


def with_adapters(model: torch.nn.Module, run: SFTRun, expected: Expected) -> dict[str, torch.nn.Parameter]:
    """Let a model's layers add `scale` times the adapters' product, which begin as the run's; return the factors."""
    factors = {}
    for name, layer in adapted_layers(run.engine.module).items():
        down, up = (
            torch.nn.Parameter(part["default"].weight.detach().clone()) for part in (layer.lora_A, layer.lora_B)
        )
        assert name.endswith(expected.adapters)
        factors |= {f"{name}.down": down, f"{name}.up": up}
        model.get_submodule(name).register_forward_hook(
            lambda _, given, out, down=down, up=up: out + expected.scale * (given[0] @ down.T @ up.T)
        )
    return factors


def by_hand(case: Case, folder: Path, run: SFTRun, batches: Sequence[Sequence[SFTSample]]) -> Weights:
    """Return the weights after the updates, by PyTorch's AdamW and nothing of the trainer's."""
    expected = case.expected
    loader = transformers.AutoModelForCausalLM if case.kit == "llm" else transformers.AutoModelForImageTextToText
    model = loader.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").train()
    trained = {
        name: weight for name, weight in model.named_parameters() if not name.startswith(expected.frozen or ("-",))
    }
    if expected.adapters:
        trained = with_adapters(model, run, expected)
        model.requires_grad_(False)
    for name, weight in model.named_parameters():
        weight.requires_grad_(name in trained and not expected.adapters)
    groups = [
        # Matrices, kernels and embeddings decay.
        {
            "params": [weight],
            "weight_decay": expected.decay * (weight.dim() > 1),
            "slow": name.startswith(expected.slow or ("-",)),
        }
        for name, weight in trained.items()
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS)
    for samples, rate, slow_rate in zip(batches, expected.rates, expected.slow_rates, strict=True):
        assert len(samples) == BATCH - expected.left_out
        optimizer.zero_grad()
        tokens = sum(sum(sample.loss_mask[1:]) for sample in samples)
        (sum(loss_of(model, sample, run.checkpoint.kit) for sample in samples) / tokens).backward()
        norm = math.sqrt(
            sum(float(weight.grad.square().sum()) for weight in trained.values() if weight.grad is not None)
        )
        if norm > expected.max_norm:
            for weight in trained.values():
                if weight.grad is not None:
                    weight.grad *= expected.max_norm / norm
        else:
            assert expected.max_norm == math.inf, "it is to be clipped"
        for group in optimizer.param_groups:
            group["lr"] = slow_rate if group["slow"] else rate
        optimizer.step()
    weights = {name: weight.detach().clone() for name, weight in model.state_dict().items()}
    for name in [name.removesuffix(".down") for name in trained if name.endswith(".down")]:
        weights[f"{name}.weight"] += expected.scale * (trained[f"{name}.up"] @ trained[f"{name}.down"]).detach()
    return weights


def assert_same(found: Weights, expected: Weights, *, start: Weights) -> None:
    """Each weight has moved as by hand, up to rounding, and those that have not moved there have not at all."""
    moved = 0
    for name, value in expected.items():
        by_hand_moved = (value - start[name]).norm()
        if not by_hand_moved:
            assert torch.equal(found[name], start[name]), name
            continue
        moved += 1
        assert (found[name] - value).norm() < 1e-3 * by_hand_moved, name
    assert moved


@pytest.mark.parametrize("name", CASES)
def test_the_weights_after_two_updates_are_those_worked_out_by_hand(name, tiny_checkpoint: Callable[[str], Path]):
    case = CASES[name]
    folder = tiny_checkpoint(case.kit)
    run = started(case, folder)
    start = weights_of(run)
    expected = by_hand(case, folder, run, [samples_of(run, step) for step in range(UPDATES)])
    for step in range(UPDATES):
        update(run, step)
    assert_same(weights_of(run), expected, start=start)


@pytest.mark.parametrize("name", ["warm-up over all, half of a pass left out", "rsLoRA on queries and values, decay"])
def test_a_run_that_was_stopped_between_makes_the_same_updates(name, tiny_checkpoint, tmp_path):
    case = CASES[name]
    folder = tiny_checkpoint(case.kit)
    first = started(case, folder, **{"ckpt.output_dir": str(tmp_path)})
    start = weights_of(first)
    expected = by_hand(case, folder, first, [samples_of(first, step) for step in range(UPDATES)])
    update(first, 0)
    first._save(1)
    second = started(case, folder, **{"ckpt.output_dir": str(tmp_path), "train.seed": 1})
    assert second._resume() == 1
    update(second, 1)
    assert_same(weights_of(second), expected, start=start)
