"""The load-balancing loss of experts: by hand, against transformers', over real tokens, and down to the routers."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.conversations import message
from helpers.packed_batches import Batch, groups
from helpers.passes import samples_of
from helpers.tiny_models import BALANCED_KITS, build_experts, encode, make_actor, pad

from lmm_r1.errors import UserError
from lmm_r1.lmm_kits import KITS, get_kit
from lmm_r1.models.actor import KitActor
from lmm_r1.models.load_balancing import Routed, Routers, check_balanced
from lmm_r1.models.packed.packing import ModelSample, pack_batch, stacked

LAYERS = 3
ARCHITECTURES = {
    "Qwen3Moe": {"num_attention_heads": 4, "head_dim": 16},
    "Qwen2Moe": {"num_experts": 6, "shared_expert_intermediate_size": 32},
    "Mixtral": {"num_local_experts": 4},
    "Olmoe": {"num_experts": 8, "num_experts_per_tok": 3},
}
# Their routers score experts one by one, with a bias for the choice.
SIGMOIDS = {"MiniMaxM2": {}, "HYV3": {"mlp_layer_types": ["sparse"] * LAYERS}}


@pytest.fixture(scope="module")
def experts(tiny_checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function from an architecture to the folder of a tiny checkpoint with the language model kit's tokenizer."""
    folders: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp("experts") / name
            sizes = {"num_hidden_layers": LAYERS} | (ARCHITECTURES | SIGMOIDS)[name]
            build_experts(tiny_checkpoint("llm"), folders[name], architecture=name, **sizes)
        return folders[name]

    return folder


def balanced(folder: Path, **settings: object) -> KitActor:
    actor = make_actor(folder, **settings)
    actor.balance_experts()
    return actor


def prompts_of(folder: Path) -> list:
    kit = get_kit("llm")
    processor = kit.load_processor(str(folder), trust_remote_code=False)
    return [encode(kit, processor, [message("user", text)]) for text in ("What is 1 + 2?", "12 + 34, which digit?")]


def loss(*layers: torch.Tensor, top_k: int, mask: torch.Tensor) -> torch.Tensor:
    routers = Routers(recorders=(), top_k=top_k, sigmoid=False)
    return routers.loss([Routed(logits=logits, choices=None) for logits in layers], mask)


def test_by_hand():
    # Two tokens and two experts, of which each token takes one: probabilities 3/4 and 1/4, and 1/5 and 4/5.
    logits = torch.tensor([[0.75, 0.25], [0.2, 0.8]]).log()
    both = loss(logits, top_k=1, mask=torch.ones(2))
    assert both.item() == pytest.approx(2 * (0.5 * (0.75 + 0.2) / 2 + 0.5 * (0.25 + 0.8) / 2))
    first = loss(logits, top_k=1, mask=torch.tensor([1, 0]))
    assert first.item() == pytest.approx(2 * 0.75)
    # As a second layer of one token: shares and probabilities are means over layers.
    layers = loss(logits[:1], logits[1:], top_k=1, mask=torch.ones(1))
    assert layers.item() == pytest.approx(both.item())
    # Where all are taken equally often, each of the choices counts 1.
    assert loss(torch.zeros(5, 4), top_k=4, mask=torch.ones(5)).item() == pytest.approx(4.0)
    assert loss(logits, top_k=1, mask=torch.zeros(2)).item() == 0.0


def test_by_hand_where_scores_are_sigmoids():
    """The first token's experts are not those of its highest scores: its router has a bias."""
    # Scores 3/4, 1/4 and 1/2 of the first token, of a sum of 3/2; 1/5, 4/5 and 1/2 of the second, which does as well.
    logits = torch.tensor([[0.75, 0.25, 0.5], [0.2, 0.8, 0.5]]).logit()
    choices = torch.tensor([[1, 2], [1, 2]])
    routers = Routers(recorders=(), top_k=2, sigmoid=True)
    both = routers.loss([Routed(logits=logits, choices=choices)], torch.ones(2))
    assert both.item() == pytest.approx(3 * ((0.25 + 0.8) / 2 + 0.5) / 1.5)
    first = routers.loss([Routed(logits=logits, choices=choices)], torch.tensor([1, 0]))
    assert first.item() == pytest.approx(3 * (0.25 + 0.5) / 1.5)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_it_is_that_of_transformers_on_real_tokens_padded_and_packed(name, experts):
    actor = balanced(experts(name))
    # Two samples of other lengths, of which the padding must not count.
    sequences, mask = pad([[5, 6, 7, 8, 9, 10, 11], [20, 21, 22, 23]], side="right")
    samples = samples_of(sequences, mask)
    with torch.no_grad():
        _, padded = actor(samples, return_output=True)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        given = {"attention_mask": mask, "position_ids": positions}
        expected = actor.model(sequences, **given, output_router_logits=True, use_cache=False).aux_loss
        packing = balanced(experts(name), packing_samples=True)
        _, packed = packing(samples, return_output=True)
    # Sums of about a hundred terms in single precision.
    assert padded.aux_loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert packed.aux_loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert 1 < expected.item() < 2 * actor.routers.top_k


@pytest.mark.parametrize("multiple", [1, 8, 13])
@pytest.mark.parametrize("kit_name", ["llm", "qwen2_5_vl"])
def test_a_packed_sequence_says_how_many_of_its_tokens_are_filler(kit_name, multiple, tiny_checkpoint):
    kit = get_kit(kit_name)
    config = kit.load_config(str(tiny_checkpoint(kit_name)), trust_remote_code=False)
    samples = [ModelSample.whole([5, 6, 7, 8, 9]), ModelSample.whole([5, 6, 7])]
    wanted = stacked(samples, lambda sample: sample.loss_mask)
    packed = pack_batch(
        kit, config, samples, wanted=wanted, share_prefix=False, fill=kit.takes_images, multiple_of=multiple
    )
    assert packed.layout.length - packed.filler == 8
    assert packed.layout.length % multiple == 0
    assert packed.filled == (kit_name == "qwen2_5_vl")


def gradients(actor: KitActor, batch: Batch) -> dict[str, torch.Tensor]:
    _, output = actor(batch.for_model, return_output=True)
    output.aux_loss.backward()
    return {name: weight.grad for name, weight in actor.model.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize("shared", [False, True])
def test_its_gradient_reaches_every_router_also_with_checkpointing(shared, experts):
    folder = experts("Qwen3Moe")
    batch = Batch(tuple(groups(prompts_of(folder), [(4, 7)] * 2)))
    found = []
    for checkpointing in (None, {"use_reentrant": False}):
        actor = balanced(folder, packing_samples=shared, share_prefix=shared).train()
        if checkpointing is not None:
            actor.gradient_checkpointing_enable(checkpointing)
        found.append(gradients(actor, batch))
    plain, checkpointed = found
    routers = [name for name in plain if name.endswith("mlp.gate.weight")]
    assert len(routers) == LAYERS
    assert all(plain[name].abs().max() > 1e-6 for name in routers)
    assert plain.keys() == checkpointed.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(checkpointed[name], gradient, rtol=0, atol=1e-7)


@pytest.mark.parametrize("name", sorted(set(KITS) - set(BALANCED_KITS)))
def test_a_model_without_it_is_refused_by_name(name, tiny_checkpoint):
    kit = get_kit(name)
    config = kit.load_config(str(tiny_checkpoint(name)), trust_remote_code=False)
    check_balanced(config, kit=kit, coef=0.0, flag="actor.aux_loss_coef", model="--actor.model_name_or_path model")
    with pytest.raises(UserError, match=rf"--actor.aux_loss_coef 0.01: .* has the architecture {config.model_type}"):
        check_balanced(
            config, kit=kit, coef=0.01, flag="actor.aux_loss_coef", model="--actor.model_name_or_path model"
        )
