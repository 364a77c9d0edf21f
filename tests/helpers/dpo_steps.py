"""Updates of runs on judged responses on two DeepSpeed ranks, and the same ones by hand: padded, in one process, apart."""

import importlib
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers.conversations import message, picture
from helpers.sessions import begun, run_of, updated
from helpers.tiny_models import make_actor
from helpers.value_models import make_value_model

from lmm_r1.data.messages import PreferenceRow
from lmm_r1.lmm_kits import get_kit
from lmm_r1.models.actor import KitActor
from lmm_r1.models.adapters import adapted_layers, layer_weights
from lmm_r1.models.loading import LoadSettings

RANKS, STEPS = 2, 2
KIT = "qwen2_5_vl"
BETA, SMOOTHING, NLL = 0.5, 0.1, 0.2
LORA_RANK = 4
# An AdamW whose steps are as large as the gradients, so that a wrong scale would show.
ADAM = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1.0, "weight_decay": 0.0}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run of some settings."""

    folder: Path
    flags: dict[str, Any] = field(default_factory=dict)
    lora: bool = False
    kind: Literal["pairs", "rewards", "distilled"] = "pairs"
    """What is learned from; rewards are pairs with margins for a reward model, of which `folder` holds one with a head."""
    teacher: Path | None = None
    """Of what is distilled."""


@dataclass(frozen=True, kw_only=True)
class Updates:
    """What the updates of a run gave."""

    losses: list[float]
    means: list[dict[str, float]]
    norms: list[float]
    """Of the gradients."""
    weights: dict[str, torch.Tensor]


def rows() -> list[PreferenceRow]:
    """Four pairs, two of them about images; the sides of one begin alike."""
    prompts = [
        ("What is 12 + 34?",),
        (picture(84, 56), "Which digit is this?"),
        ("Think about it for a while: what is 46 + 1, and why?",),
        ("And", picture(56, 56), picture(84, 56), "?"),
    ]
    sides = [
        ("<answer>46</answer>", "3"),
        ("4", "<think>12 + 34</think>"),
        ("<think>12 + 34 = 46 and one</think><answer>47</answer>", "<think>12 + 34 = 46 and two</think>"),
        ("<answer>5</answer>", "<answer>6</answer> or so"),
    ]
    return [
        PreferenceRow(
            messages=(message("user", *prompt),),
            chosen=(message("assistant", chosen),),
            rejected=(message("assistant", rejected),),
            margin=0.25 * number,
            location=f"rows.jsonl line {number}",
        )
        for number, (prompt, (chosen, rejected)) in enumerate(zip(prompts, sides, strict=True), start=1)
    ]


def by_hand(case: Case) -> Updates:
    """Make the updates with PyTorch's AdamW, each conversation run by itself."""
    return {
        "pairs": _pairs_by_hand,
        "rewards": _rewards_by_hand,
        # It imports this module.
        "distilled": lambda case: importlib.import_module("helpers.kd_steps").by_hand(case),
    }[case.kind](case)


def _pairs_by_hand(case: Case) -> Updates:
    from lmm_r1.supervised.pairs import encode_pair

    kit, processor = _kit_of(case)
    samples = [encode_pair(row, kit=kit, processor=processor, max_len=4096) for row in rows()]
    in_4bit = case.flags.get("ds.load_in_4bit", False)
    use_rslora = case.flags.get("ds.lora.use_rslora", False)
    policy = policy_of(str(case.folder), lora=case.lora, load_in_4bit=in_4bit, use_rslora=use_rslora).train()
    reference = make_actor(case.folder, load_in_4bit=in_4bit)

    def losses() -> tuple[list[torch.Tensor], dict[str, float]]:
        found, pairs = [], []
        for sample in samples:
            chosen, rejected = (_log_prob(policy, side) for side in (sample.chosen, sample.rejected))
            with torch.no_grad():
                others = [_log_prob(reference, side) for side in (sample.chosen, sample.rejected)]
            margin = BETA * (chosen - others[0] - rejected + others[1])
            loss = -(1 - SMOOTHING) * F.logsigmoid(margin) - SMOOTHING * F.logsigmoid(-margin)
            found.append(loss - NLL * chosen / sum(sample.chosen.loss_mask))
            pairs.append([value.item() for value in (margin, chosen, rejected)])
        return found, _means(pairs, "reward_margin", "chosen_log_prob", "rejected_log_prob")

    return _updates(policy.model, losses)


def _rewards_by_hand(case: Case) -> Updates:
    from lmm_r1.supervised.pairs import RewardEncoder
    from lmm_r1.supervised.samples import SFTSample

    kit, processor = _kit_of(case)
    encode = RewardEncoder(kit=kit, processor=processor, max_len=4096)
    samples = [encode(row) for row in rows()]
    model = make_value_model(case.folder).train()

    def reward(sample: SFTSample) -> torch.Tensor:
        return model([sample.for_model()], of_samples=True)[0]

    def losses() -> tuple[list[torch.Tensor], dict[str, float]]:
        found, pairs = [], []
        for sample in samples:
            chosen, rejected = reward(sample.chosen), reward(sample.rejected)
            found.append(-F.logsigmoid(chosen - rejected - sample.margin))
            pairs.append([value.item() for value in (chosen - rejected, chosen, rejected)])
        return found, _means(pairs, "reward_margin", "chosen_reward", "rejected_reward")

    return _updates(model, losses)


def _kit_of(case: Case) -> tuple[Any, Any]:
    kit = get_kit(KIT)
    return kit, kit.load_processor(str(case.folder), trust_remote_code=False)


def _log_prob(actor: KitActor, sample: Any) -> torch.Tensor:
    return actor([sample.for_model()]).sum()


def _means(values: list[list[float]], *names: str) -> dict[str, float]:
    return dict(zip(names, torch.tensor(values).double().mean(0).tolist(), strict=True))


def _updates(model: torch.nn.Module, losses_of: Callable[[], tuple[list[torch.Tensor], dict[str, float]]]) -> Updates:
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, **ADAM)
    losses, means, norms = [], [], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        found, logged = losses_of()
        loss = torch.stack(found).mean()
        loss.backward()
        norms.append(torch.stack([weight.grad.norm() for weight in trained if weight.grad is not None]).norm().item())
        losses.append(loss.item())
        means.append(logged)
        optimizer.step()
    weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return Updates(losses=losses, means=means, norms=norms, weights=weights)


def policy_of(path: str, *, lora: bool, **settings: Any) -> KitActor:
    """Return the policy; of adapters, both factors do something from the start."""
    given = {"lora_rank": LORA_RANK} if lora else {}
    return _disturbed(make_actor(Path(path), **{**settings, **given}))


def _disturbed(actor: KitActor) -> KitActor:
    generator = torch.Generator().manual_seed(0)
    for layer in adapted_layers(actor.model).values():
        for factor in layer_weights(layer)[1:]:
            torch.nn.init.normal_(factor, std=0.1, generator=generator)
    return actor


def flags_of(case: Case) -> dict[str, Any]:
    """Return the flags of a case; `kd_steps` knows those of a distillation's loss."""
    own: dict[str, dict[str, Any]] = {
        "pairs": {"model.beta": BETA, "model.label_smoothing": SMOOTHING, "model.nll_loss_coef": NLL},
        "rewards": {"model.margin_loss_enable": True},
        "distilled": {},
    }
    return {
        "model.model_name_or_path": str(case.folder),
        **own[case.kind],
        "data.dataset": "rows.jsonl",
        "data.max_len": 4096,
        "train.batch_size": len(rows()),
        "train.micro_batch_size": 1,
        "ds.param_dtype": "fp32",
        "ds.attn_implementation": "sdpa",
        "ds.lora.rank": LORA_RANK if case.lora else 0,
        **{f"adam.{name}": value for name, value in ADAM.items()},
        "lr_scheduler": "constant",
        "min_lr_ratio": 0.1,
        "lr_warmup_ratio": 0.0,
        "max_norm": 0.0,
        **case.flags,
    }


def _settings(case: Case) -> Any:
    """The settings of a case's run."""
    from lmm_r1 import dotted
    from lmm_r1.config import DPOConfig, RMConfig, resolve

    made = {"pairs": DPOConfig, "rewards": RMConfig}[case.kind]()
    return resolve(dotted.replace(made, flags_of(case)))


def _ranks_updates(case: Case) -> Updates:
    """Make the updates as one of the ranks."""
    from lmm_r1.supervised import start as supervised_start
    from lmm_r1.supervised.pairs import DPORun, RMRun

    session = begun(_settings(case), steps=STEPS)
    run_class, found = {"pairs": (DPORun, rows()), "rewards": (RMRun, rows())}[case.kind]
    load = supervised_start.KitActor

    def with_adapters_as_by_hand(path: str, settings: LoadSettings, **own: Any) -> KitActor:
        actor = load(path, settings, **own)
        return _disturbed(actor) if settings.lora.rank else actor

    supervised_start.KitActor = with_adapters_as_by_hand
    try:
        return updates_made(run_of(run_class, session, found))
    finally:
        supervised_start.KitActor = load


def updates_made(run: Any) -> Updates:
    """Return the updates that a run makes."""
    from lmm_r1.host.models import whole_state_dict

    run.actor.train()
    losses, means, norms = [], [], []
    for step in range(STEPS):
        made = updated(run, run._micro_batches(step))
        losses.append(made.loss)
        means.append(made.means)
        norms.append(made.grad_norm)
    weights = {name: value.detach().clone() for name, value in (whole_state_dict(run.engine) or {}).items()}
    return Updates(losses=losses, means=means, norms=norms, weights=weights)


def main(folder: Path) -> None:
    from lmm_r1 import cpu

    torch.set_num_threads(1)
    cpu.prepare_process()
    for number, case in enumerate(pickle.loads((folder / "cases.pickle").read_bytes())):
        # `kd_steps` imports this module.
        distilled = case.kind == "distilled"
        updates = (
            importlib.import_module("helpers.kd_steps").ranks_updates(case) if distilled else _ranks_updates(case)
        )
        if dist.get_rank() == 0:
            torch.save(updates, folder / f"case{number}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    # The cases were pickled under this module's name in the test.
    importlib.import_module("helpers.dpo_steps").main(Path(sys.argv[1]))
