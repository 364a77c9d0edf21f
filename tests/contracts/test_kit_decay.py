"""Weight decay reaches the matrices of every kit's model, and no norm, bias or vector, whatever it is called."""

import pytest
import torch

from lmm_r1.host.strategy import decay_groups
from lmm_r1.lmm_kits import KITS
from lmm_r1.models.loading import LoadSettings, load_model

MATRICES = (torch.nn.Linear, torch.nn.Embedding, torch.nn.Conv2d, torch.nn.Conv3d)


@pytest.mark.parametrize("arch", sorted(KITS))
def test_matrices_decay_and_norms_biases_and_vectors_do_not(arch, tiny_checkpoint):
    settings = LoadSettings(attn_implementation="sdpa", param_dtype="fp32", max_len=64)
    model = load_model(str(tiny_checkpoint(arch)), settings, empty=True).model
    decaying, others = decay_groups(model, weight_decay=0.1)
    assert (decaying["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    groups = [{id(weight) for weight in group["params"]} for group in (decaying, others)]
    trained = {id(weight) for weight in model.parameters() if weight.requires_grad}
    assert groups[0] | groups[1] == trained
    assert groups[0] & groups[1] == set()
    norms, matrices = set(), set()
    for module in model.modules():
        own = {name: id(weight) for name, weight in module.named_parameters(recurse=False) if weight.requires_grad}
        if "Norm" in type(module).__name__:
            norms |= set(own.values())
        elif isinstance(module, MATRICES):
            matrices |= {own["weight"]} if "weight" in own else set()
            assert "bias" not in own or own["bias"] in groups[1]
    assert norms, "every model has norms"
    assert norms <= groups[1]
    assert matrices <= groups[0]
    vectors = {id(weight) for weight in model.parameters() if weight.dim() < 2 and weight.requires_grad}
    assert vectors <= groups[1]


def test_names_say_nothing():
    model = torch.nn.ModuleDict({"norm": torch.nn.Linear(2, 2), "ln_q": torch.nn.LayerNorm((2, 2))})
    model.register_parameter("scale", torch.nn.Parameter(torch.ones(3)))
    decaying, others = decay_groups(model, weight_decay=1.0)
    # OpenRLHF's list of names would spare `norm.weight` and let `ln_q.weight` and `scale` decay.
    assert [weight.shape for weight in decaying["params"]] == [(2, 2)]
    assert decaying["params"][0] is model["norm"].weight
    assert [tuple(weight.shape) for weight in others["params"]] == [(3,), (2,), (2, 2), (2, 2)]
