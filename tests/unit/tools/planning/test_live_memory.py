"""Bytes that are alive while code runs, counted by hand."""

import pytest
import torch

from lmm_r1.tools.planning.pass_memory import LiveMemory, Unpredictable, take_memory

KIB = 1024


def block() -> torch.Tensor:
    """Return a KiB."""
    return torch.zeros(256)


def test_what_is_given_back_counts_no_more_and_the_peak_stays():
    before = block()
    with LiveMemory() as memory:
        one = block()
        other = one + before
        assert (memory.live, memory.peak) == (2 * KIB, 2 * KIB)
        del one
        view = other[:8].view(2, 4)
        other.add_(1)
        del other
        assert (memory.live, memory.peak) == (KIB, 2 * KIB), "a view keeps what it looks at, and takes nothing"
        del view
        assert memory.live == 0
        memory.hold(5 * KIB)
    assert (memory.live, memory.peak) == (5 * KIB, 5 * KIB)


@pytest.mark.parametrize("zeros", [False, True])
def test_a_layer_keeps_its_input_for_the_backward_pass(zeros):
    layer = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False), torch.nn.Linear(64, 64, bias=False))
    take_memory(layer, zeros=zeros)
    hidden = torch.zeros(4, 64)  # a KiB
    with LiveMemory() as memory:
        output = layer(hidden)
        # The first layer's output, which the second one keeps, and the second one's.
        assert memory.live == 2 * KIB
        with torch.no_grad():
            layer(hidden)
        assert (memory.live, memory.peak) == (2 * KIB, 4 * KIB)
        output.sum().backward()
        # The weights' gradients, 16 KiB each, are there; beside them the sum's, while the graph is given back.
        assert memory.live >= 2 * 16 * KIB
    assert layer[0].weight.grad.shape == (64, 64)


def test_weights_that_are_one_stay_one_and_what_is_frozen_stays_so():
    module = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False))
    module[1].weight = module[0].weight
    module[0].weight.requires_grad_(False)
    take_memory(module)
    assert module[0].weight is module[1].weight
    assert not module[0].weight.requires_grad


def test_masks_that_are_known_choose_and_values_that_are_not_cannot_be_asked_for():
    layer = torch.nn.Linear(8, 8)
    take_memory(layer)
    with LiveMemory():
        output = layer(torch.zeros(4, 8))
        assert output[torch.tensor([True, False, True, True])].shape == (3, 8)
        assert output[torch.eye(8, dtype=torch.bool)[:4]].shape == (4,)
        with pytest.raises(Unpredictable):
            output.sum().item()
