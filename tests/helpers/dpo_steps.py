"""Updates of runs on pairs on two DeepSpeed ranks, and the same ones by hand: padded, in one process, sides apart."""

import importlib
import pickle
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers.conversations import message, picture
from helpers.launched_ranks import Ranks, launch
from helpers.tiny_models import make_actor
from helpers.value_models import make_value_model

from lmm_r1.data.preferences import PreferenceRow
from lmm_r1.lmm_kits import get_kit
from lmm_r1.models.actor import KitActor
from lmm_r1.models.adapters import adapted_layers, layer_weights, magnitude_of

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
    rewards: bool = False
    """Whether a reward model is trained, with margins, and no policy; `folder` then holds one with a head."""


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


def start(cases: Sequence[Case], folder: Path) -> Ranks:
    """Start the ranks; `finish` waits for them."""
    folder.mkdir()
    (folder / "cases.pickle").write_bytes(pickle.dumps(list(cases)))
    return launch("helpers.dpo_steps", str(folder), count=RANKS, folder=folder / "logs")


def finish(ranks: Ranks, folder: Path) -> list[Updates]:
    """Return the updates of each case."""
    ranks.wait()
    cases = pickle.loads((folder / "cases.pickle").read_bytes())
    return [torch.load(folder / f"case{number}.pt", weights_only=False) for number in range(len(cases))]


def by_hand(case: Case) -> Updates:
    """Make the updates with PyTorch's AdamW, each conversation run by itself."""
    from lmm_r1.trainer.preference_samples import encode_pair
    from lmm_r1.trainer.sft_samples import SFTSample, collate

    kit = get_kit(KIT)
    processor = kit.load_processor(str(case.folder), trust_remote_code=False)
    samples = [encode_pair(row, kit=kit, processor=processor, max_len=4096) for row in rows()]
    in_4bit = case.flags.get("ds.load_in_4bit", False)
    kinds = {name: case.flags.get(f"ds.lora.{name}", False) for name in ("use_dora", "use_rslora")}
    policy = policy_of(str(case.folder), lora=case.lora, load_in_4bit=in_4bit, **kinds).train()
    reference = make_actor(case.folder, load_in_4bit=in_4bit)
    trained = {name: weight for name, weight in policy.model.named_parameters() if weight.requires_grad}
    optimizer = torch.optim.AdamW(list(trained.values()), **ADAM)

    def log_prob(actor: KitActor, sample: SFTSample) -> torch.Tensor:
        batch = collate([sample], pad_token_id=0)
        values = actor(batch.sequences, attention_mask=batch.attention_mask, return_logprobs=True, media=batch.media)
        return (values * batch.loss_mask).sum()

    losses, means, norms = [], [], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        pairs = []
        for sample in samples:
            chosen, rejected = (log_prob(policy, side) for side in (sample.chosen, sample.rejected))
            with torch.no_grad():
                others = [log_prob(reference, side) for side in (sample.chosen, sample.rejected)]
            margin = BETA * (chosen - others[0] - rejected + others[1])
            loss = -(1 - SMOOTHING) * F.logsigmoid(margin) - SMOOTHING * F.logsigmoid(-margin)
            loss = loss - NLL * chosen / sum(sample.chosen.loss_mask)
            (loss / len(samples)).backward()
            pairs.append([value.item() for value in (loss, margin, chosen, rejected)])
        norms.append(
            torch.stack([weight.grad.norm() for weight in trained.values() if weight.grad is not None]).norm().item()
        )
        mean = torch.tensor(pairs).double().mean(0).tolist()
        losses.append(mean[0])
        means.append(dict(zip(("reward_margin", "chosen_log_prob", "rejected_log_prob"), mean[1:], strict=True)))
        optimizer.step()
    weights = {name: value.detach().clone() for name, value in policy.model.state_dict().items()}
    return Updates(losses=losses, means=means, norms=norms, weights=weights)


def rewards_by_hand(case: Case) -> Updates:
    """Make the updates of a reward model as `by_hand` does a policy's."""
    from lmm_r1.trainer.rm_rows import RewardEncoder
    from lmm_r1.trainer.sft_samples import SFTSample, collate

    kit = get_kit(KIT)
    processor = kit.load_processor(str(case.folder), trust_remote_code=False)
    encode = RewardEncoder(kit=kit, processor=processor, max_len=4096)
    samples = [encode(row) for row in rows()]
    model = make_value_model(case.folder).train()
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, **ADAM)

    def reward(sample: SFTSample) -> torch.Tensor:
        batch = collate([sample], pad_token_id=0)
        return model(batch.sequences, attention_mask=batch.attention_mask, media=batch.media)[0]

    losses, means, norms = [], [], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        pairs = []
        for sample in samples:
            chosen, rejected = reward(sample.pair.chosen), reward(sample.pair.rejected)
            loss = -F.logsigmoid(chosen - rejected - sample.margin)
            (loss / len(samples)).backward()
            pairs.append([value.item() for value in (loss, chosen - rejected, chosen, rejected)])
        norms.append(torch.stack([weight.grad.norm() for weight in trained if weight.grad is not None]).norm().item())
        mean = torch.tensor(pairs).double().mean(0).tolist()
        losses.append(mean[0])
        means.append(dict(zip(("reward_margin", "chosen_reward", "rejected_reward"), mean[1:], strict=True)))
        optimizer.step()
    weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return Updates(losses=losses, means=means, norms=norms, weights=weights)


def policy_of(path: str, *, lora: bool, **settings: Any) -> KitActor:
    """Return the policy; of adapters, both factors do something from the start."""
    given = {"lora_rank": LORA_RANK} if lora else {}
    actor = make_actor(Path(path), **{**settings, **given})
    generator = torch.Generator().manual_seed(0)
    for layer in adapted_layers(actor.model).values():
        for factor in layer_weights(layer)[1:]:
            torch.nn.init.normal_(factor, std=0.1, generator=generator)
        magnitude = magnitude_of(layer)
        if magnitude is not None:
            magnitude.data *= 1 + 0.1 * torch.randn(magnitude.shape, generator=generator)
    return actor


def _flags(case: Case) -> dict[str, Any]:
    own = {"model.beta": BETA, "model.label_smoothing": SMOOTHING, "model.nll_loss_coef": NLL}
    return {
        "model.model_name_or_path": str(case.folder),
        **({"model.margin_loss_enable": True} if case.rewards else own),
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


def _reward_updates(case: Case) -> Updates:
    """Make the updates of a reward model as one of the ranks."""
    from lmm_r1 import dotted
    from lmm_r1.config import RMConfig, resolve, to_openrlhf_args
    from lmm_r1.trainer import rm
    from lmm_r1.trainer.strategy import make_strategy

    config = resolve(dotted.replace(RMConfig(), _flags(case)))
    args = to_openrlhf_args(config)
    strategy = make_strategy(args)
    strategy.setup_distributed()
    kit = get_kit(KIT)
    processor = kit.load_processor(str(case.folder), trust_remote_code=False)
    encode = rm.RewardEncoder(kit=kit, processor=processor, max_len=4096)
    run = rm.RMRun(
        config,
        strategy,
        rm.prepare_model(config, args, strategy, steps=STEPS),
        kit=kit,
        processor=processor,
        rows=rows(),
        folder=None,
        encode=encode,
        filler=encode(rows()[0]).filler,
    )
    return _made(run)


def _ranks_updates(case: Case) -> Updates:
    """Make the updates of a policy as one of the ranks."""
    from lmm_r1 import dotted
    from lmm_r1.config import DPOConfig, resolve, to_openrlhf_args
    from lmm_r1.trainer import dpo
    from lmm_r1.trainer.dpo_rows import PairEncoder
    from lmm_r1.trainer.strategy import make_strategy

    config = resolve(dotted.replace(DPOConfig(), _flags(case)))
    args = to_openrlhf_args(config)
    strategy = make_strategy(args)
    strategy.setup_distributed()
    load = dpo.KitActor

    def made(path: str, **settings: Any) -> KitActor:
        """The policy's adapters as they are by hand; the reference has none."""
        if not settings.get("lora_rank"):
            return load(path, **settings)
        return policy_of(path, lora=True, attention=settings.pop("attn_implementation"), **settings)

    dpo.KitActor = made
    try:
        actor = dpo.prepare_policy(config, args, strategy, steps=STEPS)
        reference = dpo.prepare_reference(config, strategy, policy=actor)
    finally:
        dpo.KitActor = load
    kit = get_kit(KIT)
    processor = kit.load_processor(str(case.folder), trust_remote_code=False)
    encode = PairEncoder(kit=kit, processor=processor, max_len=4096)
    run = dpo.DPORun(
        config,
        strategy,
        actor,
        reference=reference,
        kit=kit,
        processor=processor,
        rows=rows(),
        folder=None,
        encode=encode,
        filler=encode(rows()[0]).filler,
    )
    return _made(run)


def _made(run: Any) -> Updates:
    """Make a run's updates."""
    from lmm_r1.trainer.strategy import whole_state_dict

    run.actor.train()
    losses, means, norms = [], [], []
    for step in range(STEPS):
        loss, _ = run._update(run._micro_batches(step))
        losses.append(loss)
        means.append(run.means)
        norms.append(run.strategy.get_grad_norm(run.actor))
    weights = {name: value.detach().clone() for name, value in (whole_state_dict(run.engine) or {}).items()}
    return Updates(losses=losses, means=means, norms=norms, weights=weights)


def main(folder: Path) -> None:
    from lmm_r1 import cpu

    torch.set_num_threads(1)
    cpu.prepare_process()
    for number, case in enumerate(pickle.loads((folder / "cases.pickle").read_bytes())):
        updates = _reward_updates(case) if case.rewards else _ranks_updates(case)
        if dist.get_rank() == 0:
            torch.save(updates, folder / f"case{number}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    # The cases were pickled under this module's name in the test.
    importlib.import_module("helpers.dpo_steps").main(Path(sys.argv[1]))
