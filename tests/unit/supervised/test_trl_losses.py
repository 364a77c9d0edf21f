"""Policy losses, losses on judged responses and distances of distributions are TRL's, values and gradients, on random inputs."""

from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.rl_steps import LossPass, random_pass
from helpers.tables import frozen
from trl.experimental.cpo.cpo_trainer import CPOTrainer
from trl.experimental.gkd.gkd_trainer import GKDTrainer
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.reward_trainer import RewardTrainer

from lmm_r1.models.distillation import Divergence
from lmm_r1.rl.losses import LossSettings, PolicyLoss, PolicyPass
from lmm_r1.supervised.pairs import bradley_terry_loss, dpo_loss, ipo_loss, simpo_loss
from remote_rm.adapters import TRLReward

PAIRS, TOKENS = 5, 7
BETAS = (0.05, 0.1, 1.7)


class _Accelerator:
    device = torch.device("cpu")
    num_processes = 1
    gather = gather_for_metrics = staticmethod(lambda value: value)
    reduce = staticmethod(lambda value, reduction: value)


def trainer(**settings: object) -> SimpleNamespace:
    """What TRL's methods read of their trainer, which is one process here and has the reference's log-probs."""
    common = {
        "accelerator": _Accelerator(),
        "model": SimpleNamespace(training=False),
        "aux_loss_enabled": False,
        "precompute_ref_logps": True,
        "_metrics": defaultdict(lambda: defaultdict(list)),
        "_total_train_tokens": 0,
    }
    return SimpleNamespace(**common | settings)


def random_tokens(*, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return log-probs of two responses' tokens per pair, (2, PAIRS, TOKENS), which are theirs, and the reference's sums."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, TOKENS + 1, (2, PAIRS, 1), generator=generator)
    mask = torch.arange(TOKENS) < lengths
    log_probs, reference = -torch.rand(2, 2, PAIRS, TOKENS, generator=generator, dtype=torch.float64) * 3 * mask
    return log_probs.requires_grad_(), mask, reference.sum(-1)


def outputs_of(log_probs: torch.Tensor) -> Callable[..., SimpleNamespace]:
    """A model of which TRL asks the log-probs of tokens alone."""
    flat = log_probs.flatten(0, -2)
    nothing = torch.zeros_like(flat).detach()
    return lambda **inputs: SimpleNamespace(
        log_probs=flat, entropy=nothing, mean_logits=nothing, is_top1=nothing.bool()
    )


def inputs_of(mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """A prompt of one token before each response."""
    whole = torch.nn.functional.pad(mask.flatten(0, -2).long(), (1, 0))
    return {"completion_mask": whole, "input_ids": torch.ones_like(whole), "attention_mask": torch.ones_like(whole)}


def assert_same(ours: torch.Tensor, theirs: torch.Tensor, *, of: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    mine, others = (torch.autograd.grad(loss, of, retain_graph=True)[0] for loss in (ours, theirs))
    assert others.abs().max() > 1e-4
    torch.testing.assert_close(mine, others, rtol=0, atol=1e-12)


def dpo_of_trl(log_probs: Any, mask: Any, reference: Any, *, loss_type: str, **settings: object) -> torch.Tensor:
    named = {"loss_types": [loss_type], "loss_weights": [1.0], "f_divergence_type": "reverse_kl", "ld_alpha": None}
    named |= {"use_weighting": False}
    inputs = inputs_of(mask) | dict(zip(("ref_chosen_logps", "ref_rejected_logps"), reference, strict=True))
    own = trainer(**named, **settings)
    return DPOTrainer._compute_loss(own, outputs_of(log_probs), inputs, False)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("seed", [0, 1])
def test_dpo(seed, beta):
    log_probs, mask, reference = random_tokens(seed=seed)
    chosen, rejected = log_probs.sum(-1) - reference
    theirs = dpo_of_trl(log_probs, mask, reference, loss_type="sigmoid", beta=beta, label_smoothing=0.0)
    assert_same(dpo_loss(chosen, rejected, beta=beta).mean(), theirs, of=log_probs)


@pytest.mark.parametrize("beta", BETAS)
def test_label_smoothing(beta):
    """TRL has conservative DPO in CPO's trainer alone: -(1 - e) log s(x) - e log s(-x)."""
    log_probs, _, reference = random_tokens(seed=2)
    chosen, rejected = log_probs.sum(-1) - reference
    own = trainer(alpha=0.0, beta=beta, loss_type="sigmoid", label_smoothing=0.2)
    theirs, *_ = CPOTrainer.cpo_loss(own, chosen, rejected)
    assert_same(dpo_loss(chosen, rejected, beta=beta, label_smoothing=0.2).mean(), theirs.mean(), of=log_probs)


@pytest.mark.parametrize("beta", BETAS)
def test_ipo_of_means_over_tokens(beta):
    log_probs, mask, reference = random_tokens(seed=3)
    chosen, rejected = (log_probs.sum(-1) - reference) / mask.sum(-1)
    theirs = dpo_of_trl(log_probs, mask, reference, loss_type="ipo", beta=beta, label_smoothing=0.0)
    assert_same(ipo_loss(chosen, rejected, beta=beta).mean(), theirs, of=log_probs)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.3])
@pytest.mark.parametrize("beta", [0.5, 2.0])
def test_simpo(beta, label_smoothing):
    log_probs, mask, _ = random_tokens(seed=4)
    chosen, rejected = log_probs.sum(-1) / mask.sum(-1)
    own = trainer(alpha=0.0, beta=beta, loss_type="simpo", simpo_gamma=0.7, label_smoothing=label_smoothing)
    theirs, *_ = CPOTrainer.cpo_loss(own, chosen, rejected)
    ours = simpo_loss(chosen, rejected, beta=beta, gamma=0.7, label_smoothing=label_smoothing)
    assert_same(ours.mean(), theirs.mean(), of=log_probs)


@pytest.mark.parametrize("with_margin", [True, False])
def test_reward_models(with_margin):
    generator = torch.Generator().manual_seed(6)
    rewards = (torch.randn(2, PAIRS, generator=generator, dtype=torch.float64) * 3).requires_grad_()
    margin = torch.rand(PAIRS, generator=generator, dtype=torch.float64) if with_margin else None
    own = trainer(args=SimpleNamespace(center_rewards_coefficient=None))

    def model(**inputs: object) -> SimpleNamespace:
        return SimpleNamespace(logits=rewards.flatten()[:, None])

    theirs = RewardTrainer.compute_loss(own, model, {"margin": margin} if with_margin else {})
    assert_same(bradley_terry_loss(*rewards, margin=margin).mean(), theirs, of=rewards)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize(
    ("name", "beta", "trls"),
    [("forward_kl", 0.5, 0.0), ("reverse_kl", 0.5, 1.0), ("jsd", 0.5, 0.5), ("jsd", 0.1, 0.1)],
)
def test_distances_of_distributions(name, beta, trls, temperature):
    generator = torch.Generator().manual_seed(7)
    student, teacher = torch.randn(2, TOKENS, 11, generator=generator, dtype=torch.float64) * 2
    student.requires_grad_()
    distance = Divergence(name=name, beta=beta, temperature=temperature)
    theirs = GKDTrainer.generalized_jsd_loss(student[None], teacher[None], beta=trls, temperature=temperature)
    values = distance.values(student, teacher)
    torch.testing.assert_close(values.sum(), theirs, rtol=0, atol=1e-12)
    of_ours, of_theirs = (torch.autograd.grad(one, student)[0] for one in (values.sum(), theirs))
    torch.testing.assert_close(of_ours, of_theirs, rtol=0, atol=1e-12)


def trl_policy_loss(loss_type: str, given: LossPass, *, level: str = "token", high: float = 0.3) -> torch.Tensor:
    """The loss of a pass that is a whole optimizer step."""
    mask = given["mask"]
    entropies = torch.zeros(mask.shape, dtype=torch.double)
    its = trainer(
        loss_type=loss_type,
        importance_sampling_level=level,
        epsilon_low=0.1,
        epsilon_high=high,
        args=SimpleNamespace(delta=None, sapo_temperature_pos=1.0, sapo_temperature_neg=1.05),
        beta=0.0,
        max_completion_length=10,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        _entropy_bonus_enabled=False,
        _get_per_token_logps_and_entropies=lambda *given_, **named: (given["log_probs"], entropies, None),
    )
    nothing = torch.zeros(len(mask), 0, dtype=torch.long)
    inputs = {
        **dict.fromkeys(("prompt_ids", "prompt_mask"), nothing),
        **dict.fromkeys(("completion_ids", "completion_mask"), mask),
        "advantages": given["advantages"],
        "old_per_token_logps": given["old_log_probs"],
        "num_items_in_batch": mask.sum(),
    }
    return GRPOTrainer._compute_loss(its, None, inputs)


@pytest.mark.parametrize(("loss_type", "theirs", "ours"), frozen("supervised/trl_losses", "policy_losses_are_trls"))
def test_policy_losses_are_trls(loss_type, theirs, ours):
    given = random_pass(6, 3, 1, 4)
    # As TRL has it: one advantage for all tokens of a response.
    given["advantages"] = given["advantages"][:, :1].repeat(1, given["mask"].shape[1])
    expected = trl_policy_loss(loss_type, given, **theirs)
    settings = LossSettings(**{"clip": (0.1, 0.3)} | ours)
    found = PolicyLoss(settings)(PolicyPass(**given), kl_weight=0.0).loss / settings.units(given["mask"])
    torch.testing.assert_close(found, expected)
    slopes = [torch.autograd.grad(value, given["log_probs"])[0] for value in (found, expected)]
    torch.testing.assert_close(*slopes, atol=1e-12, rtol=1e-9)


def test_trl_takes_the_rewards_of_a_verifier(monkeypatch):
    reward = TRLReward(verifier="math", label="solution")
    owner = trainer(
        accelerator=SimpleNamespace(device=torch.device("cpu"), is_main_process=True),
        reward_funcs=[reward],
        reward_processing_classes=[None],
        reward_func_names=[reward.__name__],
        reward_weights=torch.ones(1),
        state=SimpleNamespace(global_step=0),
        args=SimpleNamespace(report_to=[]),
        _log_completion_extra=None,
        _log_metric=None,
        environments=None,
    )
    monkeypatch.setattr("trl.trainer.grpo_trainer.gather", lambda value: value)
    rows = [{"prompt": "2+2?", "solution": solution} for solution in ("4", "5")]
    said = ["<think>two twos</think><answer>4</answer>"] * 2
    rewards = GRPOTrainer._calculate_rewards(owner, rows, ["2+2?"] * 2, said, [[1], [2]])
    assert rewards.tolist() == [[1.5], [0.5]]
